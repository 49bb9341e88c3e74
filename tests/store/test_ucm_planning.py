"""The planning cases of UCM's FA/WA connector, and where ours differs on purpose.

Agreed: which groups are windowed, the blocks of a plain window's tail and of a compressor's, the
range of blocks dumped at a boundary, the look-up's step back from a full hit.

Different:

* A tail counts ``window - 1`` tokens, not ``window``: the next token is one of its own window.
  With blocks of a window's divisor both give the same; else UCM keeps a block more.
* A tail is rounded up to what divides the canonical block, so that it is a block to the planner.
* A compressor's tail (``window - ratio``) is valid only where the ratio divides the boundary.
  Ours is ``window - gcd(ratio, canonical block)``: the same where the ratio divides canonical
  blocks, and else as much longer as it takes to be valid at every boundary.
* Windows above a canonical block are cut in pieces that neighbours share; UCM cannot hold them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from pdconn.store.format.prompt_rows import find_boundary, pieces, rows_needed
from pdconn.store.format.row import RowKind, Section, StoreLayout, store_layout
from registration.references import AttentionKind
from tests.property.oracle import Group, Layers, Side

CANONICAL = 256


def ucm_tail(block: int, window: int | None, ratio: int | None = None) -> int | None:
    """Blocks of a group's tail at a canonical boundary, from the facts; None: no window."""
    if window is None:
        return None
    if ratio is None:
        return max(1, math.ceil(window / block))
    return 0 if window <= ratio else math.ceil((window - ratio) / block)


def rows_of(
    *groups: tuple[int, int | None, AttentionKind], ratios: Sequence[int] = ()
) -> StoreLayout:
    """Rows of an engine with one layer for each (block, window, kind), and ratio of compressors."""
    ratios = ratios or (1,) * len(groups)
    made = tuple(
        Group(Layers((number,), kind, window, 1, 8, compress_ratio=ratio), (number,), block)
        for number, ((block, window, kind), ratio) in enumerate(zip(groups, ratios, strict=True))
    )
    side = Side(made, "LBHNC", 1, (tuple(range(len(made))),), 2, (), 1 << 40, 0)
    return store_layout(side.ranks, CANONICAL)


def windows(block: int, window: int | None) -> tuple[int, int | None, AttentionKind]:
    return block, window, AttentionKind.SLIDING_WINDOW if window else AttentionKind.FULL


def section_of(layout: StoreLayout, number: int) -> Section:
    rows = (layout.fa, layout.wa) if layout.wa else (layout.fa,)
    return next(
        s for row in rows for s in row.sections if str(number) in {layer.name for layer in s.layers}
    )


def tokens_kept(layout: StoreLayout, number: int) -> int:
    """Of windowed layer ``number`` in a row; 0 if it is in no section."""
    wa = layout.wa.sections if layout.wa is not None else ()
    return sum(s.tokens for s in wa for layer in s.layers if layer.name == str(number))


FULL = windows(CANONICAL, None)


def test_groups_are_partitioned_by_window_or_chunk() -> None:
    layout = rows_of(
        FULL, windows(64, 128), (64, 64, AttentionKind.CHUNKED_LOCAL), windows(16, None)
    )
    assert layout.wa is not None
    full, windowed = (
        sorted(layer.name for section in rows.sections for layer in section.layers)
        for rows in (layout.fa, layout.wa)
    )
    assert (full, windowed) == (["0", "3"], ["1", "2"])


DEEPSEEK_V4 = tuple(
    zip((256, 64, 64, 4, 8), (None, 128, 128, 8, 128), (1, 1, 1, 4, 128), strict=True)
)
"""Block, window and ratio of its groups."""


def test_the_facts_of_deepseek_v4() -> None:
    """Tails in blocks, by the rule of the facts and by our rows."""
    theirs = [ucm_tail(block, w, None if r == 1 else r) for block, w, r in DEEPSEEK_V4]
    assert theirs == [None, 2, 2, 1, 0]
    layout = rows_of(
        *(windows(block, w) for block, w, _ in DEEPSEEK_V4), ratios=[r for *_, r in DEEPSEEK_V4]
    )
    ours = [tokens_kept(layout, n) // block for n, (block, *_) in enumerate(DEEPSEEK_V4)]
    assert ours == [tail or 0 for tail in theirs]


@pytest.mark.parametrize(
    ("block", "window"), [(64, 128), (16, 128), (32, 64), (8, 32), (64, 64), (256, 256), (16, 16)]
)
def test_tails_of_plain_windows_agree(block: int, window: int) -> None:
    tail = ucm_tail(block, window)
    assert tail is not None
    section = section_of(rows_of(FULL, windows(block, window)), 1)
    assert -(-section.tokens // block) == tail


@pytest.mark.parametrize(
    ("block", "window", "theirs", "ours"), [(64, 129, 3, 2), (16, 65, 5, 4), (16, 100, 7, 8)]
)
def test_tails_that_differ(block: int, window: int, theirs: int, ours: int) -> None:
    """One token less is reached; and 99 tokens become 128, which divide 256."""
    assert ucm_tail(block, window) == theirs
    assert section_of(rows_of(FULL, windows(block, window)), 1).tokens // block == ours


@pytest.mark.parametrize(
    ("block", "window", "ratio"),
    [(4, 8, 4), (8, 128, 128), (8, 64, 32), (16, 32, 16), (4, 4, 4), (8, 64, 128)],
)
def test_tails_of_compressors_agree_where_the_ratio_divides_canonical_blocks(
    block: int, window: int, ratio: int
) -> None:
    tail = ucm_tail(block, window, ratio)
    layout = rows_of(FULL, windows(block, window), ratios=(1, ratio))
    assert tokens_kept(layout, 1) // block == tail
    plain = rows_of(FULL, windows(block, window))
    assert tokens_kept(plain, 1) > tokens_kept(layout, 1), "negative control"


@pytest.mark.parametrize(("window", "ratio"), [(6, 3), (24, 12), (12, 12), (200, 96), (7, 5)])
def test_a_tail_out_of_step_with_canonical_blocks_is_what_the_worst_boundary_needs(
    window: int, ratio: int
) -> None:
    """An output ends at token ``t`` where the ratio divides ``t + 1``, and reads its window."""
    needed = 0
    for boundary in range(CANONICAL, CANONICAL * (ratio + 1), CANONICAL):
        end = next(t for t in range(boundary, boundary + ratio) if (t + 1) % ratio == 0)
        needed = max(needed, boundary - (end - window + 1))
    kept = tokens_kept(rows_of(FULL, windows(1, window), ratios=(1, ratio)), 1)
    assert kept == next(n for n in range(max(1, needed), CANONICAL + 1) if CANONICAL % n == 0)
    assert needed > window - ratio, "negative control: the trimmed tail is too short"


def test_a_model_whose_compressors_keep_nothing_resumes_at_every_boundary_without_wa_rows() -> None:
    layout = rows_of(FULL, windows(8, 128), ratios=(1, 128))
    assert layout.wa is None
    assert find_boundary(layout, 1023, lambda kind, index: kind is RowKind.FA) == 768


def test_the_range_of_blocks_at_a_boundary_agrees() -> None:
    """Blocks ``b // block - tail + 1`` to ``b // block`` of the boundary's last token ``b``."""
    for block, window in ((64, 128), (16, 64), (32, 32)):
        layout = rows_of(FULL, windows(block, window))
        section, tail = section_of(layout, 1), ucm_tail(block, window)
        assert tail is not None
        for index in range(4):
            last = (index + 1) * CANONICAL - 1
            theirs = list(range(last // block - tail + 1, last // block + 1))
            first = (index + 1) * CANONICAL - section.tokens
            assert list(range(first // block, last // block + 1)) == theirs


def test_a_load_takes_all_full_rows_and_the_last_window_row() -> None:
    layout = rows_of(FULL, windows(64, 128))
    assert rows_needed(layout, CANONICAL, 4 * CANONICAL) == [
        *((RowKind.FA, index) for index in (1, 2, 3)),
        (RowKind.WA, 3),
    ]


def test_windows_above_a_canonical_block_take_pieces() -> None:
    """What UCM cannot hold."""
    layout = rows_of(FULL, windows(64, 600))
    assert pieces(layout.wa, 4 * CANONICAL) == range(1, 4)


@pytest.mark.parametrize("saved", [{3}, {1, 3}, {0, 1, 2}, {1}, set()])
def test_the_hit_ends_at_the_rightmost_window_row_in_the_full_prefix(saved: set[int]) -> None:
    layout = rows_of(FULL, windows(64, 128))
    for full in range(6):
        hit = find_boundary(
            layout,
            10 * CANONICAL,
            lambda kind, index, full=full: index < full if kind is RowKind.FA else index in saved,
        )
        assert hit == max((i + 1 for i in saved if i < full), default=0) * CANONICAL


def test_a_whole_hit_steps_back_a_canonical_block() -> None:
    """The last token is computed again, and needs the window before it."""
    layout = rows_of(FULL, windows(64, 128))
    for num_tokens, hit in ((1024, 768), (1025, 1024), (1023, 768), (256, 0), (257, 256)):
        assert find_boundary(layout, num_tokens - 1, lambda kind, index: True) == hit


@pytest.mark.parametrize(("keys", "tp"), [(10, 4), (3, 8), (256, 3), (0, 2)])
def test_ranks_that_hold_replicas_share_keys_evenly(keys: int, tp: int) -> None:
    """UCM gives rank r a range of keys; ours every tp-th.  Both: each key once, evenly."""
    theirs = [range(keys * r // tp, keys * (r + 1) // tp) for r in range(tp)]
    ours = [range(r, keys, tp) for r in range(tp)]
    for parts in (theirs, ours):
        assert sorted(key for part in parts for key in part) == list(range(keys))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
