"""What one engine's ranks saved, another's load, byte for byte."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from pdconn.store.format.footer import decode_note
from pdconn.store.format.row import store_layout
from pdconn.store.rank.copies import HostArea
from pdconn.store.rank.shares import OwnSlab, RowShare, joined_runs
from tests.store.rank.engines import TOKENS, Shape, StoredEngine, fa, wa
from tests.store.rank.shelves import Rows, ok

SHAPES = [
    Shape(),
    Shape(tp=2, layout="BLHNC", block_tokens=32),
    Shape(tp=4, layout="BHLNC", block_tokens=64),
    Shape(tp=2, layout="LBNHC", block_tokens=8),
]


@pytest.mark.parametrize(
    ("writer", "reader"), [*itertools.permutations(SHAPES[:3], 2), (SHAPES[3], SHAPES[3])]
)
def test_what_was_saved_is_loaded_whatever_the_ranks_layout_and_block_size(
    writer: Shape, reader: Shape
) -> None:
    rows = Rows()
    with StoredEngine(writer, rows, filled=True).opened() as theirs:
        theirs.saved(theirs.names())
    with StoredEngine(reader, rows, filled=False, seed=2).opened() as ours:
        assert all(not (r.missing or r.damaged) for r in ours.fetch(ours.names()))
        ours.load(ours.need())
        ours.check(ours.need())


@pytest.mark.parametrize(("tp", "row_nbytes", "window"), [(2, 24, 32), (4, 64, 96), (2, 64, 200)])
def test_ranks_that_hold_the_same_heads_write_each_slab_once(
    tp: int, row_nbytes: int, window: int
) -> None:
    shape = Shape(tp=tp, heads=tp // 2, row_nbytes=row_nbytes, window=window)
    rows = Rows()
    with StoredEngine(shape, rows, filled=True).opened() as theirs:
        names = theirs.names()
        save = theirs.saved(names)
        for row in save.rows:
            ranges = sorted((at, n) for part, at, n in rows.written if part == row.part)
            ends = [at + n for at, n in ranges]
            assert ends[-1] == theirs.layout.for_kind(row.name.kind).data_nbytes
            assert [at for at, _ in ranges] == [0, *ends[:-1]]
    with StoredEngine(Shape(heads=shape.heads, row_nbytes=row_nbytes, window=window), rows,
                      filled=False, seed=3).opened() as ours:  # fmt: skip
        ours.fetch(names)
        ours.load(ours.need())
        ours.check(ours.need())


@pytest.mark.parametrize("stages", [((0, 1), (2, 3)), ((1, 3), (0, 2)), ((0,), (1, 2, 3))])
@pytest.mark.parametrize("saves", [True, False])
def test_stages_that_lack_layers_or_a_kind_take_part(
    stages: tuple[tuple[int, ...], ...], saves: bool
) -> None:
    split, whole = Shape(stages=stages), Shape(tp=2, block_tokens=32)
    rows = Rows()
    with StoredEngine(split if saves else whole, rows, filled=True).opened() as theirs:
        theirs.saved(theirs.names())
    with StoredEngine(whole if saves else split, rows, filled=False, seed=2).opened() as ours:
        assert all(not (r.missing or r.damaged) for r in ours.fetch(ours.names()))
        ours.load(ours.need())
        ours.check(ours.need())


def staging_of(engine: StoredEngine) -> HostArea:
    area = engine.stores[0]._staging
    assert area is not None
    return area


def test_the_oracle_sees_a_swapped_head() -> None:
    rows = Rows()
    with StoredEngine(Shape(), rows, filled=True).opened() as theirs:
        theirs.saved(theirs.names())
    with StoredEngine(Shape(), rows, filled=False).opened() as ours:
        share = ours.layout.fa
        swapped = share.slabs[1].offset
        ours.fetch(ours.names())
        staging = staging_of(ours).bytes_at(0, share.data_nbytes)
        first, other = (staging[at : at + 4096] for at in (0, swapped))
        first[:], other[:] = bytes(other), bytes(first)
        ours.load(ours.need())
        with pytest.raises(AssertionError, match="wrong bytes"):
            ours.check(ours.need())


def test_only_tokens_that_are_not_held_are_loaded() -> None:
    rows = Rows()
    with StoredEngine(Shape(tp=2), rows, filled=True).opened() as theirs:
        theirs.saved(theirs.names())
    with StoredEngine(Shape(), rows, filled=False).opened() as ours:
        ours.fetch(ours.names(held=128), offset=4096 * 3)
        ours.load(ours.need(held=128))
        ours.check(ours.need(held=128))


def test_two_fetches_lie_side_by_side_in_staging() -> None:
    rows = Rows()
    with StoredEngine(Shape(), rows, filled=True).opened() as theirs:
        theirs.saved(theirs.names())
    with StoredEngine(Shape(), rows, filled=False).opened() as ours:
        number = ours.start_fetch(ours.names(), offset=0)
        ours.start_fetch(ours.names(), offset=1 << 20)
        ours.answer(0, number)
        ours.answer(0, number + 1)
        ours.load(ours.need(), number)
        ours.check(ours.need())
        ours.load(ours.need(), number + 1)
        assert not len(ours.stores[0]._fetches)


def rows_after_others() -> bool:
    """Whether rows are the same when they are saved alone and after others."""
    shape = Shape(row_nbytes=24, window=32)
    rows = [Rows(), Rows(), Rows()]
    orders = ([fa(1)], [wa(1)], [wa(2), fa(0), wa(0), fa(1), wa(1)])
    for into, order in zip(rows, orders, strict=True):
        with StoredEngine(shape, into, filled=True).opened() as engine:
            engine.noted(engine.save(order))
    return (rows[0].parts["p0"], rows[1].parts["p0"]) == (rows[2].parts["p3"], rows[2].parts["p4"])


def test_a_row_has_the_same_bytes_whatever_was_saved_before_it() -> None:
    assert rows_after_others()


def test_a_buffer_that_is_not_cleared_shows_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "memset", lambda *_: None)
    assert not rows_after_others()


def test_a_rank_that_writes_nothing_of_a_row_leaves_an_empty_note() -> None:
    rows = Rows()
    with StoredEngine(Shape(tp=2, heads=1), rows, filled=True).opened() as engine:
        save = engine.save([fa(0), fa(1)])
        engine.noted(save)
    empty = {
        part: [not decode_note(note).sums for _, note in sorted(rows.notes[part].items())]
        for part in ("p0", "p1")
    }
    assert empty == {"p0": [False, True], "p1": [True, False]}
    assert all(ok(notes) for notes in rows.notes.values())


def test_a_rank_alone_reads_one_range_of_a_row() -> None:
    with StoredEngine(Shape(), Rows(), filled=True) as engine:
        layout = engine.layout.fa
        share = RowShare.from_layouts(layout, layout, engine.opening.replicas[0])
    assert share.runs == ((0, 0, layout.data_nbytes),)
    assert share.nbytes == layout.data_nbytes


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_each_reads_its_heads_in_one_range(rank: int) -> None:
    with StoredEngine(Shape(tp=2), Rows(), filled=True) as engine:
        whole = engine.layout.fa
        layout = store_layout(engine.side.ranks[rank : rank + 1], 64).fa
        share = RowShare.from_layouts(whole, layout, engine.opening.replicas[rank])
    assert share.runs == ((rank * whole.data_nbytes // 2, 0, whole.data_nbytes // 2),)


def test_runs_are_joined_only_where_both_sides_continue() -> None:
    at = [(0, 0), (4096, 4096), (12288, 8192), (16384, 16384)]
    slabs = [OwnSlab(n, row, share, 100, 0, 1) for n, (row, share) in enumerate(at)]
    assert joined_runs(slabs) == ((0, 0, 8192), (12288, 8192, 4096), (16384, 16384, 4096))


def test_counts_tell_rows_and_bytes() -> None:
    rows = Rows()
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        names = engine.names()
        engine.saved(names)
        engine.fetch(names)
        engine.load(engine.need())
        counts = engine.stores[0].take_rank_counts()
        sizes = [engine.layout.for_kind(name.kind).data_nbytes for name in names]
        assert (counts["rows_written"], counts["bytes_written"]) == (len(names), sum(sizes))
        assert (counts["rows_read"], counts["loads"]) == (len(names), 1)
        assert counts["bytes_read"] == sum(map(len, rows.rows.values()))
        assert engine.stores[0].take_rank_counts() == {}
    assert np.all(np.array(sizes) > 0)
    assert len(names) >= TOKENS // 64
