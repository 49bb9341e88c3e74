"""(d) Hand-over on one card: pdconn beside vLLM's in-tree connector, in turns.

Each contestant has a prefill and a decode engine of its own, all on one card, with one model whose
KV is as large as that of a model of 8 billion parameters.  Timed is decode's request until its
first token; prefill's is not in it.  ``in-tree, reads on`` is the in-tree connector with the
one setting of UCX that pdconn makes by itself (see ``transport.nixl.agent_options``).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.model import TINY, ModelSpec, write_model
from pdconn.tools.lab.ports import free_ports
from tests.gpu.kit.engine_process import EngineProcess, end_at_sigterm
from tests.gpu.kit.engines import options_on
from tests.gpu.kit.found import Found, step_arguments
from tests.gpu.kit.steps.vllm import PREFILL, TOLERANCE, answer_of, transfer_config
from transport import Device

KV_LARGE = ModelSpec(
    "kv-large", 512, 512, heads=16, kv_heads=16, head_dim=128, layers=12, full_every=1
)
"""196 608 bytes of KV a token, in float32, in one group of full attention."""
LENGTHS = {"cuda": (200, 1000, 3000), "cpu": (40,)}
ROUNDS = {"cuda": 6, "cpu": 1}
TOKENS = 3
IN_TREE_PREFILL = PREFILL | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)


@dataclass(frozen=True)
class Contestant:
    """A connector, and what its engines' environment has besides."""

    name: str
    connector: str
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether it is pdconn."""
        return self.connector == "PdconnConnector"


CONTESTANTS = (
    Contestant("pdconn", "PdconnConnector"),
    Contestant("in-tree", "NixlConnector"),
    Contestant("in-tree, reads on", "NixlConnector", {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}),
)


def options_of(device: Device, contestant: Contestant | None, role: str) -> dict[str, Any]:
    """Options of an engine; without a contestant it is alone."""
    options = options_on(device)
    if contestant is None:
        return options
    if contestant.is_ours:
        options["kv_transfer_config"] = transfer_config(role, {})
    else:
        options["kv_transfer_config"] = {
            "kv_connector": contestant.connector,
            "kv_role": "kv_both",
            "kv_buffer_device": device.kind,
            "kv_load_failure_policy": "fail",
        }
    return options


@contextmanager
def engines(
    device: Device, model: Path, folder: Path
) -> Iterator[tuple[EngineProcess, list[tuple[Contestant, EngineProcess, EngineProcess]]]]:
    """One alone, and a pair of each contestant."""
    with ExitStack() as stack:

        def made(name: str, contestant: Contestant | None, role: str) -> EngineProcess:
            env = dict(contestant.env) if contestant else {}
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(1)[0])
            log = folder / f"{name}.log".replace(" ", "-")
            one = EngineProcess(name, model, options_of(device, contestant, role), log, env)
            stack.callback(one.end)
            return one

        alone = made("alone", None, "")
        pairs = [
            (
                contestant,
                made(f"{contestant.name} prefill", contestant, "kv_producer"),
                made(f"{contestant.name} decode", contestant, "kv_consumer"),
            )
            for contestant in CONTESTANTS
            if device.kind == "cuda" or not contestant.env
        ]
        for one in (alone, *(engine for _, *pair in pairs for engine in pair)):
            one.answered()
        yield alone, pairs


def compared(device: Device, folder: Path, found: Found) -> bool:
    """Whether every answer is the one of the engine alone; what was found is added by length."""
    model = write_model(folder / "model", KV_LARGE if device.kind == "cuda" else TINY)
    is_right = True
    with engines(device, model, folder) as (alone, pairs):
        for length in LENGTHS[device.kind]:
            names = ("alone, prefill included", *(contestant.name for contestant, *_ in pairs))
            times: dict[str, list[float]] = {name: [] for name in names}
            differs: list[str] = []
            # The first prompt of a length compiles kernels, connects and maps memory.
            for prompt in make_prompts((length,) * (ROUNDS[device.kind] + 1), seed=length):
                whole = alone.ask(prompt, TOKENS)
                times[names[0]].append(whole["first_s"])
                for contestant, prefill, decode in pairs:
                    asked = PREFILL if contestant.is_ours else IN_TREE_PREFILL
                    lent = prefill.ask(prompt, 1, asked)["kv_transfer_params"]
                    seen = decode.ask(prompt, TOKENS, lent)
                    times[contestant.name].append(seen["first_s"])
                    wrong = compare(answer_of(whole), answer_of(seen), TOLERANCE[device.kind])
                    differs += [f"{contestant.name}: {wrong}"] if wrong else []
            medians = {name: _ms(statistics.median(each[1:])) for name, each in times.items()}
            worst = {name: _ms(max(each[1:])) for name, each in times.items()}
            row = {"median ms": medians, "worst ms": worst, "differs": differs}
            found.add(f"{length} tokens", row)
            is_right = is_right and not differs
    return is_right


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def main() -> int:
    """Exit status 1: an answer is not the one of the engine alone, or an engine ended."""
    device, found = step_arguments(__doc__)
    end_at_sigterm()
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="kit-handover-") as work:
        folder = Path(work)
        try:
            return 0 if compared(device, folder, found) else 1
        finally:
            found.keep_logs("engines", folder)


if __name__ == "__main__":
    sys.exit(main())
