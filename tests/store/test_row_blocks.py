"""Rows are saved only of blocks that were filled, also after a load that filled few of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import gcd

import pytest

from pdconn.planning.plan import window_start
from pdconn.store.engine.saves import RowBlocks
from pdconn.store.format.row import RowKind, RowName, as_kept
from registration.references import AttentionKind, KVCacheGroupReference
from tests.property.oracle import Group, Layers, Side

ROW = 64
CASES = list(product((8, 40, 64, 65, 66, 100, 150, 300), (1, 4, 32, 64, 96, 128), (4, 16, 64)))
"""Windows, ratios and tokens of a block."""

AsKept = Callable[[KVCacheGroupReference, int], KVCacheGroupReference]


def group_of(window: int, ratio: int, block: int) -> KVCacheGroupReference:
    sort = Layers((0,), AttentionKind.SLIDING_WINDOW, window, 1, 8, compress_ratio=ratio)
    side = Side((Group(sort, (0,), block),), "LBHNC", 1, ((0,),), 2, (), 1 << 40, 0)
    return side.ranks[0].groups[0]


def unfilled(window: int, ratio: int, block: int, rule: AsKept) -> list[tuple[int, int]]:
    """Rows that a request saves after its load, and their first token that was never filled.

    The engine holds blocks for all of its window then; a load fills the part of it that rows
    keep, and a window that is kept whole by blocks.
    """
    group, found = group_of(window, ratio, block), []
    kept = rule(group, ROW)
    rows = RowBlocks(ROW, (kept,))
    for blocks in range(1, 9):
        boundary = blocks * ROW
        held = window_start(group, boundary) // block
        ids = [0] * held + [1] * (boundary // block - held)
        filled = held * block if kept.window == window else window_start(kept, boundary)
        for index in range(blocks):
            name = RowName(RowKind.WA, bytes(16), bytes(16), index)
            end = name.index * ROW + ROW
            first = max(index * ROW, window_start(kept, end))
            if rows.has_all(name, (ids,)) and first < min(end, filled):
                found.append((index, first))
    return found


@pytest.mark.parametrize(("window", "ratio", "block"), CASES)
def test_no_row_is_saved_of_blocks_that_a_load_left_unfilled(
    window: int, ratio: int, block: int
) -> None:
    assert unfilled(window, ratio, block, as_kept) == []


def test_a_long_window_that_is_trimmed_is_noticed() -> None:
    """Negative control: without the exception for windows past the boundary before."""

    def trimmed(group: KVCacheGroupReference, block_tokens: int) -> KVCacheGroupReference:
        assert group.window is not None
        kept = max(0, group.window - gcd(group.compress_ratio, block_tokens))
        return replace(group, window=kept + 1, compress_ratio=1)

    wrong = {case for case in CASES if unfilled(*case, trimmed)}
    assert (150, 64, 16) in wrong
    assert all(window > ROW + 1 for window, _, _ in wrong)


def test_a_compressor_pins_the_blocks_of_its_tail_alone() -> None:
    """Of 32 tokens and a ratio of 16 the last block of 16; of one that keeps nothing none."""
    name = RowName(RowKind.WA, bytes(16), bytes(16), 2)
    for ratio, blocks in ((1, range(10, 12)), (16, range(11, 12)), (32, range(12, 12))):
        rows = RowBlocks(ROW, (as_kept(group_of(32, ratio, 16), ROW),))
        assert rows.positions(name) == [blocks]
        assert rows.has_all(name, ([0] * blocks.start + [1] * len(blocks),))
        assert not blocks or not rows.has_all(name, ([0] * 12,))
