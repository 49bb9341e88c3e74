"""Which rank reads from which: replicas share the load, several sources make one pull."""

from __future__ import annotations

from collections import Counter

import pytest

from pdconn.planning.template import match_pieces
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    build_kv_cache_references,
)
from tests.fakes.layouts import layout_memory
from tests.property.oracle import head_range


def rank(heads: int, tp: int, number: int) -> KVCacheReferences:
    first, count = head_range(heads, tp, number)
    memory = layout_memory(
        "BHLNC",
        base=4096,
        num_blocks=4,
        layers=["a", "b"],
        num_heads=count,
        first_head=first,
        block_tokens=4,
        token_nbytes=8,
    )
    return build_kv_cache_references([GroupMemory(AttentionKind.FULL, None, 4, memory)])


def sources(heads: int, tp: int, our_tp: int) -> list[set[int]]:
    """For each rank of ours, the ranks of theirs that it reads from."""
    theirs = [rank(heads, tp, number) for number in range(tp)]
    return [
        {piece.their_rank for piece in match_pieces(rank(heads, our_tp, number), theirs, number)}
        for number in range(our_tp)
    ]


@pytest.mark.parametrize(("heads", "tp", "our_tp"), [(2, 8, 8), (1, 4, 4), (1, 8, 8), (4, 16, 16)])
def test_readers_spread_over_replicas(heads: int, tp: int, our_tp: int) -> None:
    """As many readers as lenders, several of each per head: no rank is read twice."""
    counts = Counter(source for of_rank in sources(heads, tp, our_tp) for source in of_rank)
    assert len(counts) == tp
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("our_tp", [1, 2, 4])
def test_mla_is_read_from_one_replica_per_rank(our_tp: int) -> None:
    found = sources(1, 4, our_tp)
    assert all(len(of_rank) == 1 for of_rank in found)
    assert len(set.union(*found)) == our_tp


@pytest.mark.parametrize(
    ("heads", "tp", "our_tp", "expected"),
    [
        (8, 4, 1, [{0, 1, 2, 3}]),
        (8, 4, 2, [{0, 1}, {2, 3}]),
        (8, 2, 4, [{0}, {0}, {1}, {1}]),
        (8, 1, 8, [{0}] * 8),
    ],
)
def test_a_rank_reads_from_every_rank_that_holds_a_head_of_its(
    heads: int, tp: int, our_tp: int, expected: list[set[int]]
) -> None:
    assert sources(heads, tp, our_tp) == expected
