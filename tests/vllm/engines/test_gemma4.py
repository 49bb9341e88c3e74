"""Gemma 4: full-attention layers with fewer and larger heads than the others.

A small one is made here.  One and two ranks on each side, so each layer's heads must be known.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdconn.tools.lab.compare_answers import make_prompts
from tests.vllm.engines.families.handover import STEPS, Handover, engine, handing_over
from tests.vllm.engines.families.models import GEMMA_4

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handover]:
    """One alone, one and two ranks on each side, and a decode engine whose pulls are corrupted."""
    work = tmp_path_factory.mktemp("gemma4")
    family, model = GEMMA_4, GEMMA_4.write(work / "model")
    faults = {"reads": {"corrupt": 1.0}}
    caching = {"prefix_caching": True}
    specs = [
        engine("prefill", family, model, "kv_producer", args=STEPS, **caching),
        engine("wide-prefill", family, model, "kv_producer", ranks=2, args=STEPS, **caching),
        engine("decode", family, model, "kv_consumer", **caching),
        engine("wide-decode", family, model, "kv_consumer", ranks=2, **caching),
        engine("corrupted", family, model, "kv_consumer", verify="off", debug_faults=faults),
    ]
    with handing_over(family, work, specs, model) as made:
        yield made


@pytest.mark.parametrize(
    ("prefill", "decode", "seed"),
    [
        ("prefill", "decode", 5),
        ("prefill", "wide-decode", 6),
        ("wide-prefill", "decode", 7),
        ("wide-prefill", "wide-decode", 8),
    ],
)
def test_its_answers_are_those_of_one_engine(
    engines: Handover, prefill: str, decode: str, seed: int
) -> None:
    """It did not start: its configuration names no one number of heads."""
    prompts = make_prompts(GEMMA_4.lengths(), seed)
    ranks = 2 if decode.startswith("wide") else 1
    verified = engines.metric("pulls_verified_total", decode)
    assert engines.mismatches(prompts, prefill, decode) == []
    assert engines.metric("pulls_verified_total", decode) - verified == ranks * len(prompts)
    assert len({engines.expected(prompt)[1].tokens for prompt in prompts}) == len(prompts)
    saved = engines.metric("saved_by_hits_bytes_total", decode)
    assert engines.mismatches(prompts, prefill, decode) == []
    assert engines.metric("saved_by_hits_bytes_total", decode) > saved
    engines.follow(seed + 10, prefill, decode, ranks=ranks)


def test_a_corrupted_pull_is_noticed(engines: Handover) -> None:
    """Negative control; the tokens pulled fill their blocks, so that every byte matters."""
    prompts = make_prompts([8 * GEMMA_4.block_tokens] * 4, seed=9)
    assert len(engines.mismatches(prompts, decode="corrupted")) == 4
    assert len(engines.mismatches(prompts, decode="corrupted", like=engines.like())) == 4
