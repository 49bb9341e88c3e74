"""(c) Real vLLM without its compiled kernels: prefill and decode beside one engine alone, one card.

For each model three engines run, in processes of their own.  Decode's answer must be the one of the
engine alone, and pdconn must have counted a pull.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pdconn.tools.lab.compare_answers import Answer, compare, make_prompts
from pdconn.tools.lab.model import TINY, write_model
from pdconn.tools.lab.ports import free_ports
from tests.gpu.kit.engine_process import EngineProcess, end_at_sigterm
from tests.gpu.kit.found import Found, step_arguments
from tests.vllm.engines.families.models import GRANITE_4_H
from transport import Device

MODEL_S = {"cuda": 170, "cpu": 600}
"""A model takes no longer, so that an engine that hangs leaves time to the next model."""
LENGTHS = {"cuda": (5, 33, 64, 200, 700, 1500), "cpu": (5, 70)}
TOKENS = {"cuda": 8, "cpu": 3}
TOLERANCE = {"cuda": 0.02, "cpu": 1e-3}
"""In nats, between right answers: kernels for one token and for many sum in another order.
Changing the first of 3000 tokens moves an answer by more than 0.1 (``pdconn.tools.lab.model``)."""
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Model:
    """A model that is made on the spot, and options of its engines."""

    name: str
    write: Callable[[Path], Path]
    options: dict[str, Any] = field(default_factory=dict)


MODELS = (
    Model("gemma-3-like", lambda folder: write_model(folder, TINY), {"block_size": 32}),
    Model("granite-4-h-like", GRANITE_4_H.write, {"enable_prefix_caching": True}),
)


def options_of(device: Device, model: Model, role: str | None) -> dict[str, Any]:
    """Options of an engine: as small as it gets, and explicit about memory."""
    options = {
        "max_model_len": 2048 if device.kind == "cuda" else 256,
        "max_num_batched_tokens": 2048 if device.kind == "cuda" else 256,
        "max_num_seqs": 4 if device.kind == "cuda" else 2,
        "kv_cache_memory_bytes": (1 << 30) if device.kind == "cuda" else (64 << 20),
        "gpu_memory_utilization": 0.1,
        **model.options,
    }
    if role is not None:
        options["kv_transfer_config"] = transfer_config(role, {"verify": "always"})
    return options


def transfer_config(role: str, extra: dict[str, Any]) -> dict[str, Any]:
    """pdconn's, of a ``kv_producer`` or a ``kv_consumer``."""
    if role == "kv_producer":
        extra |= {"side_channel_host": "127.0.0.1", "side_channel_port": free_ports(1)[0]}
    return {
        "kv_connector": "PdconnConnector",
        "kv_connector_module_path": "pdconn.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }


@contextmanager
def engines(device: Device, model: Model, folder: Path) -> Iterator[list[EngineProcess]]:
    """Alone, prefill and decode."""
    written = model.write(folder / "model")
    with ExitStack() as stack:
        made = []
        for name, role in (("alone", None), ("prefill", "kv_producer"), ("decode", "kv_consumer")):
            one = EngineProcess(
                name, written, options_of(device, model, role), folder / f"{name}.log"
            )
            stack.callback(one.end)
            made.append(one)
        yield made


def look_at(
    device: Device,
    started: Sequence[EngineProcess],
    found: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Compare the answers of a model's engines (alone, prefill, decode) prompt by prompt.

    ``found`` has after each prompt what it found, which ``keep`` writes down.
    """
    right: list[Answer] = []
    alone, prefill, decode = started
    found["engines"] = [one.answered() for one in (alone, prefill, decode)]
    pulled, pulls = "pdconn:pulls_total", 0
    # Kernels are compiled at their first use, some of them once for each length.
    for part, seed in (("warming", 6), ("prompts", 5)):
        began, found[part] = time.monotonic(), []
        right.clear()
        for prompt in make_prompts(LENGTHS[device.kind], seed):
            whole = alone.ask(prompt, TOKENS[device.kind])
            lent = prefill.ask(prompt, 1, PREFILL)["kv_transfer_params"]
            seen = decode.ask(prompt, TOKENS[device.kind], lent)
            right.append(answer_of(whole))
            differs = compare(right[-1], answer_of(seen), TOLERANCE[device.kind])
            row = {
                "tokens": len(prompt),
                "pulls": seen["counts"][pulled] - pulls,
                "hand-over, ms": _ms(seen["first_s"]),
                "alone, ms": _ms(whole["first_s"]),
                "differs": str(differs) if differs else None,
            }
            found[part].append(row)
            keep()
            pulls = seen["counts"][pulled]
        found[f"{part}, s"] = round(time.monotonic() - began, 1)
    for name in ("hand-over, ms", "alone, ms"):
        found[f"median of {name}"] = statistics.median(row[name] for row in found["prompts"])
    control = compare(right[0], right[-1], TOLERANCE[device.kind])
    found["control: another prompt's answer differs"] = control is not None
    found["ok"] = is_right(found)


def is_right(found: dict[str, Any]) -> bool:
    """Whether every answer is the one of the engine alone, and was pulled, by runner V2."""
    return (
        all(
            row["differs"] is None and row["pulls"] == 1
            for row in (*found["warming"], *found["prompts"])
        )
        and all(one["runner"] == "V2" for one in found["engines"])
        and found["control: another prompt's answer differs"]
    )


def answer_of(answered: dict[str, Any]) -> Answer:
    """For ``compare``."""
    top = tuple({int(token): value for token, value in one.items()} for one in answered["top"])
    return Answer(tuple(answered["tokens"]), tuple(answered["logprobs"]), top)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def main() -> int:
    """Exit status 1: a model failed; the others are looked at all the same."""
    device, found = step_arguments(__doc__)
    # vLLM's mixers for CPUs are compiled, whatever Triton can do.
    models = MODELS if device.kind == "cuda" else MODELS[:1]
    return run_models(device, models, found)


def _too_long(*_: object) -> None:
    raise TimeoutError("the model's time is over")


def run_models(device: Device, models: Sequence[Model], found: Found) -> int:
    """Look at each model."""
    signal.signal(signal.SIGALRM, _too_long)
    end_at_sigterm()
    is_fine = True
    with tempfile.TemporaryDirectory(prefix="kit-vllm-") as work, ExitStack() as stack:
        folders = [Path(work) / model.name for model in models]
        for folder in folders:
            folder.mkdir()
        # All of them start at once, since most of a start is importing on one core.
        started = [
            stack.enter_context(engines(device, model, folder))
            for model, folder in zip(models, folders, strict=True)
        ]
        for model, folder, three in zip(models, folders, started, strict=True):
            signal.alarm(MODEL_S[device.kind])
            seen: dict[str, Any] = {"ok": False}
            try:
                look_at(device, three, seen, partial(found.add, model.name, seen))
            except Exception as error:  # noqa: BLE001 - of vLLM, among others; the next model runs
                seen["error"] = repr(error)[-400:]
                print(model.name, error, flush=True)  # whole, into the log of the step
            finally:
                signal.alarm(0)
            found.add(model.name, seen)
            is_fine = is_fine and seen["ok"]
            found.keep_logs("engines", folder)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
