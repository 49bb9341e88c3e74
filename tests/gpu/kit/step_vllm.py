"""(c) Real vLLM without its compiled kernels: prefill and decode beside one engine alone, one card.

For each model three engines run, in processes of their own.  Decode's answer must be the one of the
engine alone, and pdconn must have counted a pull.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdconn.lab.compare import Answer, compare, make_prompts
from pdconn.lab.model import TINY, write_model
from pdconn.lab.ports import free_ports
from tests.gpu.kit.found import Found, step_arguments
from tests.vllm.engines.families.models import GRANITE_4_H
from transport import Device

MODEL_S = {"cuda": 105, "cpu": 600}
"""A model takes no longer, so that an engine that hangs leaves time to the next model."""
LENGTHS = {"cuda": (5, 33, 64, 200, 700, 1500), "cpu": (40, 70)}
TOKENS = {"cuda": 8, "cpu": 3}
TOLERANCE = {"cuda": 0.02, "cpu": 1e-3}
"""In nats, between right answers: kernels for one token and for many sum in another order.
Changing the first of 3000 tokens moves an answer by more than 0.1 (``pdconn.lab.model``)."""
LOGPROBS = 5
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class EngineEnded(Exception):
    """An engine's process ended, or did not start in time."""


class WrongLength(Exception):
    """An answer has another number of tokens than was asked for: the request failed."""


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


class EngineProcess:
    """One engine; its log is a file beside the model."""

    def __init__(self, name: str, model: Path, options: dict[str, Any], log: Path) -> None:
        self._name, self._log = name, log
        self._said: deque[str] = deque(maxlen=25)
        command = [sys.executable, "-m", "tests.gpu.kit.engine_process", str(model)]
        self._process = subprocess.Popen(
            [*command, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            text=True,
        )

    def answered(self) -> dict[str, Any]:
        """Its next line of JSON.

        Raises:
            EngineEnded: with the end of its log.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                found: dict[str, Any] = json.loads(line[1:])
                return found
            self._said.append(line)  # vLLM logs to standard output
        raise EngineEnded(f"{self._name}: {self._tail()}")

    def ask(self, prompt: Sequence[int], tokens: int, transfer: Any = None) -> dict[str, Any]:
        """Its answer to a prompt."""
        request = {"prompt": list(prompt), "tokens": tokens, "logprobs": LOGPROBS}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request | {"kv_transfer_params": transfer}) + "\n")
        self._process.stdin.flush()
        answered = self.answered()
        if len(answered["tokens"]) != tokens:
            said = f"{len(answered['tokens'])} tokens, {answered['finish_reason']}"
            raise WrongLength(f"{self._name}: expected {tokens} tokens, got {said}: {self._tail()}")
        return answered

    def _tail(self) -> str:
        errors = self._log.read_text(errors="replace")[-1200:]
        return errors + "".join(line[:300] for line in self._said)

    def end(self) -> None:
        """SIGKILL after a moment: an engine that hangs must not cost the next model."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


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
        extra: dict[str, Any] = {"verify": "always"}
        if role == "kv_producer":
            extra |= {"side_channel_host": "127.0.0.1", "side_channel_port": free_ports(1)[0]}
        options["kv_transfer_config"] = {
            "kv_connector": "PdconnConnector",
            "kv_connector_module_path": "pdconn.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }
    return options


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


def looked_at(device: Device, model: Model, folder: Path) -> dict[str, Any]:
    """Start three engines of a model, and compare answers prompt by prompt."""
    found: dict[str, Any] = {}
    with engines(device, model, folder) as (alone, prefill, decode):
        found["engines"] = [one.answered() for one in (alone, prefill, decode)]
        prompts = make_prompts(LENGTHS[device.kind], seed=5)
        tokens, rows, right = TOKENS[device.kind], [], []
        pulls = 0
        [warming] = make_prompts([48], seed=6)  # kernels are compiled at their first use
        for prompt in (warming, *prompts):
            whole = alone.ask(prompt, tokens)
            lent = prefill.ask(prompt, 1, PREFILL)
            began = time.monotonic()
            seen = decode.ask(prompt, tokens, lent["kv_transfer_params"])
            taken_s = time.monotonic() - began
            differs = compare(answer_of(whole), answer_of(seen), TOLERANCE[device.kind])
            right.append(whole)
            pulls, before = seen["pulls"], pulls
            rows.append(
                {
                    "tokens": len(prompt),
                    "pulls": pulls - before,
                    "hand-over, ms": _ms(seen["first_s"]),
                    "alone, ms": _ms(whole["first_s"]),
                    "whole answer, ms": _ms(taken_s),
                    "differs": str(differs) if differs else None,
                }
            )
    found["prompts"] = rows[1:]
    timed = [row["hand-over, ms"] for row in rows[1:]]
    found["hand-over, median ms"] = statistics.median(timed)
    control = compare(answer_of(right[1]), answer_of(right[-1]), TOLERANCE[device.kind])
    found["control: another prompt's answer differs"] = control is not None
    found["ok"] = is_right(found)
    return found


def is_right(found: dict[str, Any]) -> bool:
    """Whether every answer is the one of the engine alone, and was pulled, by runner V2."""
    return (
        all(row["differs"] is None and row["pulls"] == 1 for row in found["prompts"])
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
    is_fine = True
    with tempfile.TemporaryDirectory(prefix="kit-vllm-") as work:
        for model in models:
            folder = Path(work) / model.name
            folder.mkdir()
            signal.alarm(MODEL_S[device.kind])
            try:
                seen = looked_at(device, model, folder)
            except Exception as error:  # noqa: BLE001 - of vLLM, among others; the next model runs
                seen = {"ok": False, "error": repr(error)[-400:]}
                print(model.name, error, flush=True)  # whole, into the log of the step
            finally:
                signal.alarm(0)
            found.add(model.name, seen)
            is_fine = is_fine and bool(seen["ok"])
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
