"""The layout of rows is the model's, whatever the engine: any TP, PP, layout and block size."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from pdconn.store.format.row import (
    ALIGNMENT,
    RowKind,
    RowLayout,
    StoreLayout,
    aligned,
    share_layout,
    store_layout,
)
from pdconn.store.store_errors import FormatError
from registration.references import AttentionKind
from tests.property.oracle import Group, Layers, Side

SIZE = 64
FULL = Layers((0, 3, 10), AttentionKind.FULL, None, 4, 96)
MLA = Layers((1,), AttentionKind.FULL, None, 1, 24, ratio=4)
SLIDING = Layers((2, 5, 11), AttentionKind.SLIDING_WINDOW, 20, 4, 96)
WIDE = Layers((4,), AttentionKind.SLIDING_WINDOW, 150, 2, 96)
CHUNKS = Layers((6, 7), AttentionKind.CHUNKED_LOCAL, 32, 4, 96)
SORTS = (FULL, MLA, SLIDING, WIDE, CHUNKS)
ALL = tuple(sorted(number for sort in SORTS for number in sort.numbers))


def engine(
    tp: int = 1,
    layout: str = "LBHNC",
    block: int = 16,
    stages: tuple[tuple[int, ...], ...] = (ALL,),
    sorts: tuple[Layers, ...] = SORTS,
) -> Side:
    groups = tuple(Group(sort, sort.numbers, block) for sort in sorts)
    return Side(groups, layout, tp, stages, 3, (), 1 << 40, 0)


EVERY = [
    engine(tp, layout, block, stages)
    for tp, layout, block, stages in product(
        (1, 2, 4), ("LBHNC", "BLHNC", "BHLNC", "LBNHC"), (8, 16, 64), ((ALL,), (ALL[:5], ALL[5:]))
    )
]


def test_every_engine_of_a_model_has_the_same_rows() -> None:
    assert len({store_layout(side.ranks, SIZE).encoded() for side in EVERY}) == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(FULL, heads=8),
        replace(FULL, row_nbytes=48),
        replace(FULL, numbers=(0, 3, 12)),
        replace(FULL, opaque=True),
        replace(FULL, kind=AttentionKind.SLIDING_WINDOW, window=4096),
    ],
)
def test_another_model_has_other_rows(other: Layers) -> None:
    """Negative control of the law above."""
    sorts = (other, *SORTS[1:])
    numbers = tuple(sorted(number for sort in sorts for number in sort.numbers))
    theirs = engine(sorts=sorts, stages=(numbers,))
    assert (
        store_layout(theirs.ranks, SIZE).encoded() != store_layout(engine().ranks, SIZE).encoded()
    )


def test_an_opaque_block_is_a_unit_and_its_size_is_part_of_the_layout() -> None:
    opaque = replace(FULL, opaque=True)
    layouts = [
        store_layout(engine(sorts=(opaque,), stages=(opaque.numbers,), block=block).ranks, SIZE)
        for block in (16, 32)
    ]
    assert [one.fa.sections[0].unit_tokens for one in layouts] == [16, 32]
    assert [one.fa.sections[0].units for one in layouts] == [4, 2]
    assert layouts[0].fa.data_nbytes == layouts[1].fa.data_nbytes


def test_layers_are_in_the_order_of_their_numbers() -> None:
    fa = store_layout(engine().ranks, SIZE).fa
    assert [[layer.name for layer in s.layers] for s in fa.sections] == [["0", "3", "10"], ["1"]]


def test_a_window_keeps_what_its_boundary_reaches_and_no_more_than_divides() -> None:
    wa = store_layout(engine().ranks, SIZE).wa
    assert wa is not None
    kept = {section.layers[0].name: section.tokens for section in wa.sections}
    assert kept == {"2": 32, "4": 64, "6": 32}
    """19 tokens of 20 need 32 to divide 64; 149 of 150 need the whole block; a chunk its 32."""


def test_a_window_of_one_token_keeps_nothing() -> None:
    """The next token alone is in it."""
    one = replace(SLIDING, window=1)
    layout = store_layout(engine(sorts=(FULL, one)).ranks, SIZE)
    assert layout.wa is None
    both = store_layout(engine(sorts=(FULL, one, CHUNKS)).ranks, SIZE).wa
    assert both is not None
    assert [layer.name for s in both.sections for layer in s.layers] == ["6", "7"]


@pytest.mark.parametrize(
    ("ratio", "tokens"), [(1, 32), (4, 16), (16, 4), (20, 16), (24, 16), (32, 0)]
)
def test_a_compressor_keeps_what_the_next_output_reads(ratio: int, tokens: int) -> None:
    """Of a window of 20, rows of 64: 19; 16; 4; with steps of 20 always a multiple of 4 away, so
    16; with 24, of 8: 12; and what divides 64.
    """
    sorts = (FULL, replace(SLIDING, compress_ratio=ratio), CHUNKS)
    wa = store_layout(engine(sorts=sorts).ranks, SIZE).wa
    assert wa is not None
    kept = {layer.name: section.tokens for section in wa.sections for layer in section.layers}
    assert kept.get("2", 0) == tokens


def test_engines_that_keep_other_tails_share_no_rows() -> None:
    """The layout is part of the namespace: a tail is never read as a longer one."""
    ratios = (1, 4, 16, 32)
    layouts = [
        store_layout(engine(sorts=(FULL, replace(SLIDING, compress_ratio=n))).ranks, SIZE)
        for n in ratios
    ]
    assert len({one.encoded() for one in layouts}) == len(ratios)


def test_a_unit_of_compressed_layers_is_several_tokens() -> None:
    fa = store_layout(engine().ranks, SIZE).fa
    assert (fa.sections[1].unit_tokens, fa.sections[1].units) == (4, 16)


def check_slabs(layout: RowLayout) -> None:
    end = 0
    for slab in layout.slabs:
        assert slab.offset % ALIGNMENT == 0
        assert slab.offset == end, "slabs lie one after another"
        end = slab.offset + aligned(slab.nbytes)
    assert end == layout.data_nbytes


@pytest.mark.parametrize("side", EVERY[::7], ids=lambda side: f"{side.layout}-tp{side.tp}")
def test_the_ranks_shares_are_the_row(side: Side) -> None:
    whole = store_layout(side.ranks, SIZE)
    for kind in RowKind:
        check_slabs(whole.for_kind(kind))
        slabs = {(s.layer, s.chunk, s.head): s.nbytes for s in whole.for_kind(kind).slabs}
        shared = {}
        for references in side.ranks:
            share = of_kind(share_layout([references], SIZE), kind)
            check_slabs(share)
            shared |= {(s.layer, s.chunk, s.head): s.nbytes for s in share.slabs}
        assert shared == slabs


def of_kind(layout: StoreLayout, kind: RowKind) -> RowLayout:
    if kind is RowKind.WA and layout.wa is None:
        return RowLayout(kind, SIZE, ())
    return layout.for_kind(kind)


def test_the_heads_of_a_rank_are_one_range_of_a_section() -> None:
    side = engine(tp=2)
    whole = store_layout(side.ranks, SIZE).fa
    for rank, references in enumerate(side.ranks):
        share = share_layout([references], SIZE).fa
        heads = {(s.layer, s.head) for s in share.slabs if s.section == 0}
        mine = [s for s in whole.slabs if (s.layer, s.head) in heads]
        assert mine == list(whole.slabs[rank * 6 : rank * 6 + 6])


STATE = Layers((8, 9), AttentionKind.STATE, None, 4, 32, opaque=True, tail_nbytes=8)


def test_a_state_is_a_slab_of_each_part_and_piece_in_wa_rows() -> None:
    def made(**shape: Any) -> StoreLayout:
        side = engine(sorts=(*SORTS, STATE), stages=((*ALL, 8, 9),), **shape)
        return store_layout(side.ranks, SIZE)

    layout = made()
    [section] = [s for s in layout.for_kind(RowKind.WA).sections if s.kind is AttentionKind.STATE]
    assert (section.unit_tokens, section.units, section.num_heads) == (SIZE, 1, 4)
    sizes = {(layer.name, layer.chunk): section.slab_nbytes(layer) for layer in section.layers}
    assert sizes == {("8", 0): 24, ("8", 1): 8, ("9", 0): 24, ("9", 1): 8}
    assert made(tp=2) == made(tp=4) == made(block=16) == layout


# Refusals


def refused(field: str, side: Side, size: int = SIZE) -> FormatError:
    with pytest.raises(FormatError) as raised:
        store_layout(side.ranks, size)
    assert raised.value.field == field
    return raised.value


def test_blocks_that_do_not_divide_a_row_are_refused() -> None:
    assert refused("block_tokens", engine(block=48)).seen == SIZE


def test_heads_that_no_rank_holds_are_refused() -> None:
    side = engine(tp=4)
    side.ranks = [side.ranks[0], side.ranks[2]]
    assert refused("heads of 0", side).seen == {0, 2}


def test_windows_alone_are_refused() -> None:
    refused("layers", engine(sorts=(SLIDING,), stages=(SLIDING.numbers,)))


def test_there_are_no_window_rows_of_a_model_without_windows() -> None:
    layout = store_layout(engine(sorts=(FULL,), stages=(FULL.numbers,)).ranks, SIZE)
    assert layout.for_kind(RowKind.FA) is layout.fa
    with pytest.raises(FormatError) as raised:
        layout.for_kind(RowKind.WA)
    assert raised.value.field == "row kind"
