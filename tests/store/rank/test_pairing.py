"""Rows as a prefill peer; tests/property/stores/test_stored.py shows that every byte goes right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from pdconn.planning.plan import Need
from pdconn.planning.planning_errors import BlockOutOfRange, Incompatible, MissingBlock
from pdconn.protocol.ticket import BlockList
from pdconn.store.format.row import ALIGNMENT, RowLayout, StoreLayout, share_layout
from pdconn.store.rank import row_pairing as pairing_module
from pdconn.store.rank.row_pairing import RowPairing
from pdconn.store.store_errors import FormatError
from registration.references import AttentionKind
from tests.property.oracle import Group, Layers, Side
from transport import Spans

SIZE = 64
STAGING = 1 << 44
FULL = Layers((0, 1), AttentionKind.FULL, None, 4, 256)
SLIDING = Layers((2, 3), AttentionKind.SLIDING_WINDOW, 33, 4, 256)
BLOCKS = (BlockList(0, tuple(range(1, 17))), BlockList(0, tuple(range(17, 33))))


def engine(*sorts: Layers, block: int = 16, tp: int = 1) -> Side:
    groups = tuple(Group(sort, sort.numbers, block) for sort in sorts)
    numbers = tuple(number for sort in sorts for number in sort.numbers)
    return Side(groups, "LBHNC", tp, (numbers,), 40, BLOCKS[: len(sorts)], 1 << 40, 0)


def shares(side: Side, rank: int = 0) -> StoreLayout:
    return share_layout([side.ranks[rank]], SIZE)


def full_pairing(side: Side) -> RowPairing:
    return RowPairing(side.ranks[0], shares(side).fa)


def window_pairing(side: Side) -> RowPairing:
    wa = shares(side).wa
    assert wa is not None
    return RowPairing(side.ranks[0], wa)


def runs(parts: Iterable[Spans]) -> set[tuple[int, int, int]]:
    return {
        (local, remote, nbytes)
        for spans in parts
        for local, remote, nbytes in zip(
            spans.local.tolist(), spans.remote.tolist(), spans.nbytes.tolist(), strict=True
        )
    }


ENGINE = engine(FULL, SLIDING)


def test_a_save_is_the_load_of_the_same_row_backwards() -> None:
    pairing = full_pairing(ENGINE)
    saved = runs(pairing.spans_to_save(2, BLOCKS, STAGING))
    loaded = runs(pairing.spans_to_load(Need.for_range(128, 192, BLOCKS), [(2, STAGING)]))
    assert saved == loaded
    assert sum(nbytes for _, _, nbytes in saved) == pairing.share.data_nbytes


def test_a_row_lies_in_slabs_of_its_share() -> None:
    """Head 1 of layer 1: the fourth slab."""
    pairing = full_pairing(ENGINE)
    slab = pairing.share.slabs[3]
    assert (slab.layer, slab.head, slab.nbytes) == ("1", 1, SIZE * 256)
    here = {
        local: nbytes
        for local, remote, nbytes in runs(pairing.spans_to_save(0, BLOCKS, STAGING))
        if STAGING + slab.offset <= remote < STAGING + slab.offset + slab.nbytes
    }
    page = 4 * 16 * 256
    base = ENGINE.start(0) + 40 * page + 16 * 256
    assert here == {base + block * page: 16 * 256 for block in (1, 2, 3, 4)}


def test_rows_may_lie_anywhere_and_in_any_order() -> None:
    pairing = full_pairing(ENGINE)
    apart = [(1, STAGING + 10 * pairing.stride), (0, STAGING), (2, STAGING + (1 << 30) + 1)]
    together = runs(pairing.spans_to_load(Need.for_range(0, 192, BLOCKS), apart))
    alone = [
        runs(
            pairing.spans_to_load(
                Need.for_range(64 * index, 64 * index + 64, BLOCKS), [(index, at)]
            )
        )
        for index, at in apart
    ]
    assert together == set.union(*alone)


def test_runs_do_not_join_across_rows_that_lie_apart() -> None:
    """One head in one layer, blocks in order: rows continue each other wherever they can."""
    side = engine(replace(FULL, numbers=(0,), heads=1))
    pairing = full_pairing(side)
    assert pairing.share.data_nbytes == pairing.stride
    rows = [(0, STAGING), (1, STAGING + 3 * pairing.stride)]
    parts = pairing.spans_to_load(Need.for_range(0, 128, side.tables), rows)
    assert sorted(nbytes for _, _, nbytes in runs(parts)) == [pairing.stride] * 2


def test_a_long_load_is_planned_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    pairing = full_pairing(ENGINE)
    rows = [(index, STAGING + index * pairing.stride) for index in range(4)]
    need = Need.for_range(24, 256, BLOCKS)
    whole = list(pairing.spans_to_load(need, rows))
    monkeypatch.setattr(pairing_module, "_BATCH_RUNS", 1)
    batched = list(pairing.spans_to_load(need, rows))
    assert (len(whole), len(batched)) == (1, 4)
    assert runs(whole) == runs(batched)


def test_a_windows_row_is_the_end_of_its_block() -> None:
    pairing = window_pairing(ENGINE)
    assert pairing.share.sections[0].tokens == 32
    spans = pairing.spans_to_save(1, BLOCKS, STAGING)
    assert sum(nbytes for _, _, nbytes in runs(spans)) == pairing.share.data_nbytes
    references = ENGINE.ranks[0]
    base = references.tensors[references.groups[1].data[0].tensor].base
    blocks = {(local - base) // (4 * 16 * 256) % 40 for local, _, _ in runs(spans)}
    assert blocks == {17 + 6, 17 + 7}, "the last two of four blocks"


@pytest.mark.parametrize("window", [2, 20, 32, 33])
def test_a_window_saves_exactly_what_the_next_token_reaches(window: int) -> None:
    """With blocks of one token nothing is rounded: ``window - 1`` tokens."""
    side = engine(FULL, replace(SLIDING, window=window), block=1)
    blocks = (BLOCKS[0], BlockList(64 - 39, tuple(range(1, 40))))
    saved = runs(window_pairing(side).spans_to_save(0, blocks, STAGING))
    assert sum(nbytes for _, _, nbytes in saved) == (window - 1) * 2 * 4 * 256


@pytest.mark.parametrize(
    ("window", "ratio", "kept"), [(8, 4, 4), (8, 2, 6), (32, 16, 16), (24, 1, 23), (40, 64, None)]
)
def test_a_compressor_saves_exactly_what_the_next_output_reads(
    window: int, ratio: int, kept: int | None
) -> None:
    """Of one whose window is no longer than the ratio nothing, and there is no row of windows."""
    side = engine(FULL, replace(SLIDING, window=window, compress_ratio=ratio), block=1)
    if kept is None:
        assert shares(side).wa is None
        return
    blocks = (BLOCKS[0], BlockList(64 - 39, tuple(range(1, 40))))
    saved = runs(window_pairing(side).spans_to_save(0, blocks, STAGING))
    assert sum(nbytes for _, _, nbytes in saved) == kept * 2 * 4 * 256


def test_a_layer_that_keeps_nothing_is_left_alone_beside_one_that_keeps_some() -> None:
    other = Layers((4,), AttentionKind.SLIDING_WINDOW, 16, 1, 256, compress_ratio=16)
    side = engine(FULL, SLIDING, other)
    with_it, without = window_pairing(side), window_pairing(engine(FULL, SLIDING))
    assert with_it.share == without.share
    holes = (*BLOCKS, BlockList(0, ()))
    assert len(runs(with_it.spans_to_save(1, holes, STAGING))) == len(
        runs(without.spans_to_save(1, BLOCKS, STAGING))
    )


def test_a_window_needs_no_block_that_it_has_left() -> None:
    pairing = window_pairing(ENGINE)
    left = BlockList(6, BLOCKS[1].ids[6:])
    assert runs(pairing.spans_to_save(1, (BLOCKS[0], left), STAGING)) == runs(
        pairing.spans_to_save(1, BLOCKS, STAGING)
    )


def test_a_hole_where_tokens_are_needed_is_refused() -> None:
    holed = (replace(BLOCKS[0], ids=(1, 0, *range(3, 17))), BLOCKS[1])
    pairing = full_pairing(ENGINE)
    with pytest.raises(MissingBlock, match="tokens from 16 on have no block of ours"):
        pairing.spans_to_save(0, holed, STAGING)
    assert pairing.spans_to_save(1, holed, STAGING)
    gone = (BLOCKS[0], BlockList(7, BLOCKS[1].ids[7:]))
    with pytest.raises(MissingBlock):
        window_pairing(ENGINE).spans_to_save(1, gone, STAGING)


def test_a_row_that_was_not_fetched_is_refused() -> None:
    with pytest.raises(MissingBlock, match="tokens from 64 on are needed and not lent"):
        runs(
            full_pairing(ENGINE).spans_to_load(
                Need.for_range(0, 192, BLOCKS), [(0, STAGING), (2, STAGING + (1 << 20))]
            )
        )
    with pytest.raises(MissingBlock):
        runs(full_pairing(ENGINE).spans_to_load(Need.for_range(0, 64, BLOCKS), []))


def test_a_block_beyond_the_cache_is_refused() -> None:
    beyond = (BlockList(0, (40, 41, 42, 43)), BLOCKS[1])
    with pytest.raises(BlockOutOfRange):
        full_pairing(ENGINE).spans_to_save(0, beyond, STAGING)


def test_nothing_is_copied_where_all_is_held() -> None:
    assert runs(full_pairing(ENGINE).spans_to_load(Need.for_range(128, 128, BLOCKS), [])) == set()


def test_a_rank_without_layers_of_a_kind_copies_nothing() -> None:
    side = engine(FULL)
    pairing = RowPairing(side.ranks[0], RowLayout(pairing_module.RowKind.WA, SIZE, ()))
    assert pairing.stride == 0
    assert pairing.spans_to_save(0, BLOCKS[:1], STAGING) == []
    assert list(pairing.spans_to_load(Need.for_range(0, 64, BLOCKS[:1]), [(0, STAGING)])) == []


def test_the_share_of_another_rank_is_refused() -> None:
    side = engine(FULL, SLIDING, tp=2)
    with pytest.raises(Incompatible):
        RowPairing(side.ranks[0], shares(side, 1).fa)


def test_an_opaque_chunk_must_end_with_a_block() -> None:
    chunk = Layers((2,), AttentionKind.CHUNKED_LOCAL, 32, 1, 256, opaque=True)
    assert window_pairing(engine(FULL, chunk)).stride
    with pytest.raises(FormatError, match="attention chunk: expected a multiple"):
        window_pairing(engine(FULL, replace(chunk, window=24)))


def test_an_opaque_block_moves_whole() -> None:
    side = engine(FULL, replace(SLIDING, opaque=True, window=18))
    spans = window_pairing(side).spans_to_save(0, BLOCKS, STAGING)
    heads_of_two_blocks_and_layers = 4 * 2 * 2
    nbytes = {local: count for local, _, count in runs(spans)}
    assert len(nbytes) == heads_of_two_blocks_and_layers, "17 tokens reach into a second block"
    assert set(nbytes.values()) == {16 * 256}


@pytest.mark.parametrize("row_nbytes", [256, 250])
def test_a_save_covers_every_slab_and_nothing_between(row_nbytes: int) -> None:
    pairing = full_pairing(engine(replace(FULL, row_nbytes=row_nbytes)))
    covered = np.zeros(pairing.stride, dtype=np.int64)
    for _, remote, nbytes in runs(pairing.spans_to_save(0, BLOCKS[:1], STAGING)):
        covered[remote - STAGING : remote - STAGING + nbytes] += 1
    for slab in pairing.share.slabs:
        assert (covered[slab.offset : slab.offset + slab.nbytes] == 1).all()
    assert covered.sum() == sum(slab.nbytes for slab in pairing.share.slabs)
    assert pairing.stride % ALIGNMENT == 0
