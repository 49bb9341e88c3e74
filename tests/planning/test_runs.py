"""What a plan costs: counted in steps that do not depend on the machine."""

from __future__ import annotations

import pytest

from pdconn.planning.plan import Need, Pairing, Plan
from pdconn.planning.plan_runs import FEW_RUNS, AlikeTemplates, alike
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    build_kv_cache_references,
)
from tests.fakes.layouts import layout_memory
from tests.throughput.planning import BLOCK, tables
from transport import Spans

BLOCKS = 4096


def hybrid(at: int, heads: tuple[int, ...] = (2, 2, 2)) -> KVCacheReferences:
    """Groups that overlay each other in one allocation; the last has full attention."""
    groups = []
    for number, count in enumerate(heads):
        memory = layout_memory(
            "BHLNC",
            base=at << 40,
            num_blocks=BLOCKS,
            layers=[f"{number}.{layer}" for layer in range(2)],
            num_heads=count,
            block_tokens=BLOCK,
            token_nbytes=64 // count,
        )
        is_full = number == len(heads) - 1
        kind = AttentionKind.FULL if is_full else AttentionKind.SLIDING_WINDOW
        groups.append(GroupMemory(kind, None if is_full else 64, BLOCK, memory))
    return build_kv_cache_references(groups)


def planned(num_blocks: int) -> Plan:
    """A prompt of so many blocks, in two engines with three groups."""
    ours, theirs = hybrid(1), hybrid(2)
    tokens = num_blocks * BLOCK
    need = Need.for_range(0, tokens, tables(ours, tokens, BLOCKS, seed=1))
    return Pairing.between(ours, [theirs]).plan(need, tables(theirs, tokens, BLOCKS, seed=2))


def test_groups_that_overlay_each_other_are_laid_out_at_once() -> None:
    assert len(alike(Pairing.between(hybrid(1), [hybrid(2)]).templates)) == 1


def test_groups_whose_blocks_differ_are_not() -> None:
    """Negative control: other heads, hence other bytes of a head."""
    [first, second] = alike(Pairing.between(hybrid(1), [hybrid(2)]).templates[:1]) + alike(
        Pairing.between(hybrid(1, (2, 2, 1)), [hybrid(2, (2, 2, 1))]).templates[2:]
    )
    assert first.rows != second.rows
    assert len(alike((first.template, second.template))) == 2


def test_a_short_prompt_is_planned_without_arrays_and_a_long_one_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("laid out in arrays")

    monkeypatch.setattr(AlikeTemplates, "columns", refuse)
    assert planned(FEW_RUNS // 2).num_runs > 100
    with pytest.raises(AssertionError, match="laid out in arrays"):
        planned(FEW_RUNS + 1)


@pytest.mark.parametrize("num_blocks", [FEW_RUNS // 2, FEW_RUNS + 1])
def test_a_plan_is_merged_once_and_no_transport_merges_it_again(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(_, spans)] = planned(num_blocks).reads
    anew = Spans(spans.local, spans.remote, spans.nbytes).coalesced()
    assert len(anew) == len(spans)
    monkeypatch.setattr("transport.types.merge_runs", None)  # would raise when called
    assert spans.coalesced() is spans
    with pytest.raises(TypeError):
        Spans(spans.local, spans.remote, spans.nbytes).coalesced()
