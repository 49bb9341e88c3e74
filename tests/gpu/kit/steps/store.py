"""(g) A store behind engines on a card: rows are saved from its memory, and loaded into it.

Decode saves prompts and loads them again; then, with a ticket of a prefill engine, it loads what is
stored of a prompt, and pulls the rest.  No engine has a prefix cache of its own, so that every hit
is the store's.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.model import TINY, ModelSpec, write_model
from tests.gpu.kit.engine_process import end_at_sigterm
from tests.gpu.kit.engines import options_on, started
from tests.gpu.kit.found import Found, step_arguments
from tests.gpu.kit.steps.handover import KV_LARGE
from tests.gpu.kit.steps.vllm import PREFILL, TOLERANCE, answer_of, transfer_config
from transport import Device

BLOCK_TOKENS = 128
"""Tokens of a row."""
LENGTHS = {"cuda": (300, 1500, 3000, 2049), "cpu": (150,)}
STORED = {"cuda": 1024, "cpu": 128}
"""Tokens that the store has of a prompt whose rest is pulled."""
TOKENS = 3
MODELS = {"cuda": (KV_LARGE, TINY), "cpu": (TINY,)}
PATIENCE_S = 30.0
HITS, BESIDE = "vllm:external_prefix_cache_hits_total", "pdconn:store_beside_tokens_total"


def options_of(device: Device, role: str | None, store: Path | None) -> dict[str, Any]:
    """Options of an engine; without a role it is alone."""
    options = {**options_on(device), "block_size": 32}
    if role is not None:
        extra: dict[str, Any] = {"verify": "always"}
        if store is not None:
            extra["store"] = {
                "root": str(store), "capacity": "16GiB", "block_tokens": BLOCK_TOKENS,
                "min_tokens": 1, "staging": "4GiB", "beside": "always",
            }  # fmt: skip
        options["kv_transfer_config"] = transfer_config(role, extra)
    return options


def rows_of(store: Path) -> int:
    """Committed rows of full attention; -1 while some are being saved."""
    if any(path.is_file() for path in store.glob("parts/*/*")):
        return -1
    return len(list(store.glob("rows/*/fa/*/*")))


def wait_for_rows(store: Path, expected: int = 0) -> int:
    """Wait until so many rows are committed and none is being saved, some seconds at most.

    Returns:
        How many are committed.
    """
    give_up = time.monotonic() + PATIENCE_S
    while (seen := rows_of(store)) < expected and time.monotonic() < give_up:
        time.sleep(0.02)
    return seen


class Engines:
    """Of one model: alone, prefill, and decode with a store."""

    def __init__(self, stack: ExitStack, device: Device, model: ModelSpec, folder: Path) -> None:
        self.store = folder / "store"
        self._tolerance = TOLERANCE[device.kind]
        options = {
            "alone": options_of(device, None, None),
            "prefill": options_of(device, "kv_producer", None),
            "decode": options_of(device, "kv_both", self.store),
        }
        written = write_model(folder / "model", model)
        self._alone, self._prefill, self._decode = started(stack, written, folder, options)

    def saved(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Have decode compute a prompt; the rows that it should have then, and has."""
        # The request before this one may still be saved.
        expected = wait_for_rows(self.store) + len(prompt) // BLOCK_TOKENS
        self._decode.ask(prompt, 1)
        return expected, wait_for_rows(self.store, expected)

    def checked(self, prompt: Sequence[int], with_ticket: bool) -> dict[str, Any]:
        """Ask decode: what differs from the engine alone, what counted, times of first tokens."""
        right = self._alone.ask(prompt, TOKENS)
        lent = None
        if with_ticket:
            lent = self._prefill.ask(prompt, 1, PREFILL)["kv_transfer_params"]
        seen = self._decode.ask(prompt, TOKENS, lent)
        wrong = compare(answer_of(right), answer_of(seen), self._tolerance)
        return {
            "tokens": len(prompt),
            "differs": str(wrong) if wrong else None,
            "first token, ms": round(seen["first_s"] * 1000, 2),
            "alone, ms": round(right["first_s"] * 1000, 2),
            "counts": {name: seen["counts"].get(name, 0) for name in (HITS, BESIDE)},
        }


def looked_at(device: Device, model: ModelSpec, folder: Path, found: Found) -> bool:
    """Whether every answer is right and every hit as long as it should be."""
    folder.mkdir()
    is_right = True
    with ExitStack() as stack:
        stack.callback(found.keep_logs, "store-engines", folder)
        engines = Engines(stack, device, model, folder)
        hits = beside = 0
        for prompt in make_prompts(LENGTHS[device.kind], seed=77):
            rows = engines.saved(prompt)
            row = engines.checked(prompt, with_ticket=False)
            row["rows expected and saved"] = rows
            hits, gained = row["counts"][HITS], row["counts"][HITS] - hits
            resumable = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            row["loaded tokens, expected and seen"] = (resumable, gained)
            is_right = is_right and gained == resumable and row["differs"] is None
            found.add(f"{model.name}, loaded, {len(prompt)} tokens", row)
        stored = STORED[device.kind]
        for prompt in make_prompts(LENGTHS[device.kind], seed=78):
            if len(prompt) <= stored:
                continue
            rows = engines.saved(prompt[:stored])
            row = engines.checked(prompt, with_ticket=True)
            row["rows expected and saved"] = rows
            beside, gained = row["counts"][BESIDE], row["counts"][BESIDE] - beside
            row["loaded tokens, expected and seen"] = (stored, gained)
            is_right = is_right and gained == stored and row["differs"] is None
            found.add(f"{model.name}, loaded and pulled, {len(prompt)} tokens", row)
    return is_right


def main() -> int:
    """Exit status 1: an answer is not the one of the engine alone, or a hit is not as expected."""
    device, found = step_arguments(__doc__)
    end_at_sigterm()
    is_right = True
    with tempfile.TemporaryDirectory(prefix="kit-store-") as work:
        for model in MODELS[device.kind]:
            is_right = looked_at(device, model, Path(work) / model.name, found) and is_right
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
