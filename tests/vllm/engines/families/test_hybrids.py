"""Models of attention and states: prefill to decode, with real vLLM and NIXL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import make_prompts
from tests.vllm.engines.families.handover import Handover, boundaries, engine, handing_over
from tests.vllm.engines.families.models import (
    FALCON_H1,
    GRANITE_4_H,
    LFM2,
    QWEN3_NEXT,
    Family,
)

PROMPTS = make_prompts(boundaries(32, 64, 128, 544), seed=5)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handover]:
    """A pair, an engine of two ranks, and engines that are wrong about states."""
    work = tmp_path_factory.mktemp("granite")
    family, model = GRANITE_4_H, GRANITE_4_H.write(work / "model")
    caching = {"prefix_caching": True}
    specs = [
        engine("prefill", family, model, "kv_producer", **caching),
        engine("decode", family, model, "kv_consumer", **caching),
        engine("wide", family, model, "kv_consumer", ranks=2),
        engine("whole-prefill", family, model, "kv_producer", connector="WholePrompt"),
        engine("whole-decode", family, model, "kv_consumer", connector="WholePrompt"),
        engine("flipped", family, model, "kv_consumer", connector="FlippedState", verify="off"),
    ]
    with handing_over(family, work, specs, model, **caching) as made:
        yield made


def test_answers_are_those_of_one_engine(granite: Handover) -> None:
    assert granite.mismatches(PROMPTS) == []
    pulls = granite.metric("pulls_total")
    assert pulls == granite.metric("pulls_verified_total") == len(PROMPTS)
    # Again: both hold prefixes, and the state of their end.
    assert granite.mismatches(PROMPTS) == []
    assert granite.metric("saved_by_hits_bytes_total") > 0
    granite.follow(seed=15)


def test_states_are_divided_among_ranks(granite: Handover) -> None:
    assert granite.mismatches(PROMPTS, decode="wide") == []
    assert granite.metric("pulls_verified_total", "wide") == 2 * len(PROMPTS)


def test_a_state_that_has_seen_the_last_token_is_noticed(granite: Handover) -> None:
    """Negative control: prefill computes the whole prompt, as without states."""
    wrong = granite.mismatches(PROMPTS[2:8], "whole-prefill", "whole-decode")
    assert len(wrong) == 6


def test_a_decode_engine_refuses_states_of_the_whole_prompt_and_computes(
    granite: Handover,
) -> None:
    before = granite.metric("tickets_mistaken_total")
    assert granite.mismatches([PROMPTS[5]], "whole-prefill", "decode") == []
    assert granite.metric("tickets_mistaken_total") == before + 1


def test_a_flipped_bit_of_a_state_is_noticed(granite: Handover) -> None:
    """Negative control."""
    assert len(granite.mismatches(PROMPTS[2:8], decode="flipped")) == 6
    assert len(granite.mismatches(PROMPTS[2:8], decode="flipped", like=granite.like())) == 6


@pytest.mark.matrix
@pytest.mark.parametrize("family", [FALCON_H1, QWEN3_NEXT, LFM2], ids=lambda family: family.name)
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "caching"])
def test_other_families(family: Family, prefix_caching: bool, tmp_path: Path) -> None:
    model, prompts = family.write(tmp_path / "model"), make_prompts(family.lengths(), seed=5)
    caching = {"prefix_caching": prefix_caching}
    specs = [
        engine("prefill", family, model, "kv_producer", **caching),
        engine("decode", family, model, "kv_consumer", **caching),
        engine("flipped", family, model, "kv_consumer", connector="FlippedState", verify="off"),
    ]
    with handing_over(family, tmp_path, specs, model, **caching) as made:
        assert made.mismatches(prompts) == []
        assert made.metric("pulls_verified_total") == len(prompts)
        if prefix_caching:
            assert made.mismatches(prompts) == []
            assert made.metric("saved_by_hits_bytes_total") > 0
        else:
            assert len(made.mismatches(PROMPTS[2:6], decode="flipped")) == 4
        made.follow(seed=15, in_steps=prefix_caching)  # which ends steps where states are kept


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handover]:
    """Two ranks lend to one and to two; and a pair of one rank without prefix caching."""
    work = tmp_path_factory.mktemp("granite-ranks")
    family, model = GRANITE_4_H, GRANITE_4_H.write(work / "model")
    specs = [
        engine("prefill", family, model, "kv_producer", ranks=2, prefix_caching=True),
        engine("decode", family, model, "kv_consumer", prefix_caching=True),
        engine("wide", family, model, "kv_consumer", ranks=2),
        engine("plain-prefill", family, model, "kv_producer"),
        engine("plain", family, model, "kv_consumer"),
    ]
    with handing_over(family, work, specs, model) as made:
        yield made


@pytest.mark.matrix
def test_ranks_divide_and_join_states(ranks: Handover) -> None:
    """Two ranks to one, and to two; one to two is above."""
    assert ranks.mismatches(PROMPTS) == []
    assert ranks.mismatches(PROMPTS, decode="wide") == []
    assert ranks.metric("pulls_verified_total", "wide") == 2 * len(PROMPTS)
    ranks.follow(seed=15)
    ranks.follow(16, decode="wide", ranks=2)


@pytest.mark.matrix
def test_states_without_prefix_caching(ranks: Handover) -> None:
    """On neither side; the other families are above."""
    assert ranks.mismatches(PROMPTS, "plain-prefill", "plain") == []
    assert ranks.metric("pulls_verified_total", "plain") == len(PROMPTS)
