"""Engines with a store over one root, and what they must find there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdconn.tools.lab.compare_answers import Answer, make_prompts
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.spec import EngineSpec
from tests.vllm.engines.engines import Configuration, Prompt, engine

TOKENS = 128
"""Of a canonical block; a window of 64 tokens is within one."""
NUM_TOKENS = 6
_PATIENCE_S = 60.0


def store_engine(
    name: str,
    model: Path,
    root: Path,
    *,
    layout: str = "BHLNC",
    caching: bool = False,
    ranks: int = 1,
    role: str = "kv_both",
    policy: str = "fail",
    connector: str | None = None,
    **store: Any,
) -> EngineSpec:
    """An engine with a store; ``store`` are further settings.  ``policy`` is vLLM's default.

    ``connector`` is a class of :mod:`tests.vllm.engines.families.controls`.
    """
    configuration = Configuration(layout, caching, one_process=True, policy=policy)
    settings = {
        "root": str(root), "capacity": "512MiB", "block_tokens": TOKENS, "min_tokens": 1,
        "staging": "64MiB", **store,
    }  # fmt: skip
    spec = engine(name, model, configuration, role, 0, ranks=ranks, store=settings)
    if connector is None:
        return spec
    module = "tests.vllm.engines.families.controls"
    named = {"kv_connector": connector, "kv_connector_module_path": module}
    return replace(spec, kv_transfer_config={**(spec.kv_transfer_config or {}), **named})


def prompts(seed: int, lengths: Sequence[int]) -> list[Prompt]:
    """One of each length, sharing nothing."""
    return make_prompts(list(lengths), seed=seed)


def asked(client: Client, wanted: Sequence[Prompt]) -> dict[Prompt, Answer]:
    """The engine's answers."""
    return {prompt: client.complete(prompt, NUM_TOKENS) for prompt in wanted}


def hit_tokens(client: Client) -> int:
    """Tokens that the engine had from its connector and did not compute, as vLLM counts them."""
    return int(client.metrics().get("vllm:external_prefix_cache_hits_total", 0))


def load_failures(client: Client) -> int:
    """Loads that failed, by rank."""
    return int(client.metrics().get("pdconn:store_load_failures_total", 0))


def breaks(root: Path) -> Path:
    """A file here makes a load from the store at ``root`` fail once: see ``BreakableLoads``."""
    return root.with_name(f"{root.name}.breaks")


def hangs(root: Path) -> Path:
    """A file here has the number of a row whose reads hang: see ``HangingReads``."""
    return root.with_name(f"{root.name}.hangs")


def rows(root: Path, kind: str) -> list[Path]:
    """Files of committed rows."""
    return sorted(root.glob(f"rows/*/{kind}/*/*"))


def parts(root: Path) -> list[Path]:
    """Files of rows that are being saved."""
    return [path for path in root.glob("parts/*/*") if path.is_file()]


def wait_for_rows(root: Path, full: int) -> None:
    """Until so many FA rows are committed, and nothing is being saved."""
    give_up = time.monotonic() + _PATIENCE_S
    while len(rows(root, "fa")) < full or parts(root):
        seen = len(rows(root, "fa"))
        assert time.monotonic() < give_up, f"{seen} of {full} rows, {len(parts(root))} parts"
        time.sleep(0.05)


def resumable(prompt: Prompt) -> int:
    """Tokens of a prompt that was saved whole which its next run loads."""
    return (len(prompt) - 1) // TOKENS * TOKENS


def num_rows(wanted: Sequence[Prompt]) -> int:
    """FA rows of prompts that share nothing."""
    return sum(len(prompt) // TOKENS for prompt in wanted)
