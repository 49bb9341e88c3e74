"""(f) Both legs at once: decode follows prefill's request, whose prompt takes many steps.

What a step wrote may be read when the step's output was processed.  On a card a step is launched
and left to run, so this is where that law could be wrong.  Each prompt is asked twice, in turns:
with an early ticket for decode, and prefill first.  Every pull is verified by checksums.
"""

from __future__ import annotations

import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdconn.protocol.early import EarlyTicket
from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.model import TINY, ModelSpec, write_model
from tests.gpu.kit.engine_process import EngineProcess, end_at_sigterm
from tests.gpu.kit.engines import options_on, started
from tests.gpu.kit.found import Found, step_arguments
from tests.gpu.kit.steps.handover import KV_LARGE
from tests.gpu.kit.steps.vllm import PREFILL, TOLERANCE, answer_of, transfer_config
from transport import Device

LENGTHS = {"cuda": (300, 1500, 3000), "cpu": (90,)}
STEP_TOKENS = {"cuda": 256, "cpu": 32}
ROUNDS = {"cuda": 4, "cpu": 1}
TOKENS = 3
MODELS = {"cuda": (KV_LARGE, TINY), "cpu": (TINY,)}


def options_of(device: Device, role: str | None) -> dict[str, Any]:
    """Options of an engine; without a role it is alone, and computes each prompt in one step."""
    options = {**options_on(device), "block_size": 32}
    if role == "kv_producer":
        options["max_num_batched_tokens"] = STEP_TOKENS[device.kind]
    if role is not None:
        options["kv_transfer_config"] = transfer_config(role, {"verify": "always"})
    return options


@dataclass(frozen=True)
class Pair:
    """Prefill and decode."""

    prefill: EngineProcess
    decode: EngineProcess

    def hand_over(self, prompt: list[int]) -> tuple[float, dict[str, Any], Mapping[str, Any]]:
        """Prefill first: seconds until decode's first token, its answer, and the ticket."""
        began = time.monotonic()
        lent = self.prefill.ask(prompt, 1, PREFILL)["kv_transfer_params"]
        prefilled_s = time.monotonic() - began
        seen = self.decode.ask(prompt, TOKENS, lent)
        return prefilled_s + seen["first_s"], seen, lent

    def follow(self, prompt: list[int], like: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """Both at once: seconds until decode's first token, and its answer."""
        early = EarlyTicket.like(like, secrets.token_hex(16))
        self.prefill.begin(prompt, 1, {**PREFILL, "pdconn": {"stream": early.stream}})
        self.decode.begin(prompt, TOKENS, early.to_params())
        self.prefill.ended(1)
        seen = self.decode.ended(TOKENS)
        return seen["first_s"], seen


def compared(device: Device, model: ModelSpec, folder: Path, found: Found) -> bool:
    """Whether every answer is the one of the engine alone; what was found is added by length."""
    folder.mkdir()
    written = write_model(folder / "model", model)
    is_right = True
    with ExitStack() as stack:
        stack.callback(found.keep_logs, "follow-engines", folder)
        roles = {"alone": None, "prefill": "kv_producer", "decode": "kv_consumer"}
        options = {name: options_of(device, role) for name, role in roles.items()}
        alone, prefill, decode = started(stack, written, folder, options)
        pair = Pair(prefill, decode)
        for length in LENGTHS[device.kind]:
            row: dict[str, Any] = {"followed": 0, "differs": []}
            times: dict[str, list[float]] = {"prefill first": [], "both at once": []}
            # The first prompt of a length compiles kernels, connects and maps memory.
            for prompt in make_prompts((length,) * (ROUNDS[device.kind] + 1), seed=length):
                right = answer_of(alone.ask(prompt, TOKENS))
                first_s, serial, lent = pair.hand_over(list(prompt))
                times["prefill first"].append(first_s)
                first_s, followed = pair.follow(list(prompt), lent)
                times["both at once"].append(first_s)
                for name, seen in (("prefill first", serial), ("both at once", followed)):
                    wrong = compare(right, answer_of(seen), TOLERANCE[device.kind])
                    row["differs"] += [f"{name}: {wrong}"] if wrong else []
                row["followed"] = followed["counts"].get("pdconn:pulls_followed_total", 0)
                row["counts"] = followed["counts"]
                row["median ms"] = {
                    name: round(statistics.median(each[1:] or each) * 1000, 2)
                    for name, each in times.items()
                }
                found.add(f"{model.name}, {length} tokens", row)
            is_right = is_right and not row["differs"] and row["followed"] > 0
    return is_right


def main() -> int:
    """Exit status 1: an answer is not the one of the engine alone, or no pull followed."""
    device, found = step_arguments(__doc__)
    end_at_sigterm()
    is_right = True
    with tempfile.TemporaryDirectory(prefix="kit-follow-") as work:
        for model in MODELS[device.kind]:
            is_right = compared(device, model, Path(work) / model.name, found) and is_right
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
