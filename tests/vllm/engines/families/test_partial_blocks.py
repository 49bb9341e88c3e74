"""Hits within blocks of states: vLLM copies such a block while reads come in beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.lab_client import prefill_then_decode
from tests.vllm.engines.families.handover import NUM_TOKENS, Handover, Prompt, engine, handing_over
from tests.vllm.engines.families.models import GRANITE_4_H

pytestmark = pytest.mark.matrix

UNIT = 32
"""Tokens between places where a hit may end; vLLM makes blocks twice as long here."""
FINE = replace(GRANITE_4_H, args=("--prefix-match-unit", str(UNIT)))


def branches(seed: int) -> list[Prompt]:
    """Prompts that go on, each in its own way, behind ends of others within a block."""
    stems = make_prompts([70, 200, 333, 700], seed)
    ends = make_prompts([5, UNIT, 90], seed + 1)
    cut = [stem[: len(stem) - 7] for stem in stems]
    return [*stems, *((*stem, *end) for stem in (*stems, *cut) for end in ends)]


def wrong_at_once(made: Handover, prompts: list[Prompt]) -> list[int]:
    """Tokens of prompts whose answers differ, all of them asked at once."""
    clients, asked = made.clients, [made.expected(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        seen = pool.map(
            lambda one: prefill_then_decode(
                clients["prefill"], clients["decode"], one[0], NUM_TOKENS
            ),
            asked,
        )
        return [
            len(longer)
            for (longer, want), answer in zip(asked, seen, strict=True)
            if compare(want, answer) is not None
        ]


def hits_of(made: Handover, engine: str, prompts: list[Prompt]) -> float:
    """Tokens of prompts that an engine had cached, as vLLM counts them."""

    def hits() -> float:
        return made.clients[engine].metrics()["vllm:prefix_cache_hits_total"]

    before = hits()
    assert made.mismatches(prompts) == []
    return hits() - before


def test_hits_that_end_within_blocks(tmp_path: Path) -> None:
    model = FINE.write(tmp_path / "model")
    caching = {"prefix_caching": True}
    specs = [
        engine("prefill", FINE, model, "kv_producer", **caching),
        engine("decode", FINE, model, "kv_consumer", **caching),
        engine("flipped", FINE, model, "kv_consumer", connector="FlippedState", verify="off"),
    ]
    with handing_over(FINE, tmp_path, specs, model, **caching) as made:
        first, second = branches(31), branches(41)
        assert made.mismatches(first) == []
        assert made.mismatches(first) == []
        assert wrong_at_once(made, second) == []
        assert wrong_at_once(made, second[::-1]) == []
        assert made.metric("saved_by_hits_bytes_total") > 0
        assert hits_of(made, "prefill", [*make_prompts([3 * UNIT + 5], 51)] * 2) == 3 * UNIT
        assert len(made.mismatches(second[4:8], decode="flipped")) == 4
