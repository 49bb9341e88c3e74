"""Whatever is wrong with a row, its fetch reports it and its bytes are not served."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pdconn.store.format.footer import decode_footer, encode_footer
from pdconn.store.format.row import RowName
from pdconn.store.rank.copies import HostCopies
from pdconn.store.rank.shares import RowShare
from pdconn.store.rank_commands import DropFetch, FailLoad, Fetch, FetchResult, LoadRows
from pdconn.store.store_errors import RowMissing, ShelfFailure
from tests.store.rank.engines import (
    BLANK,
    OTHER,
    PATIENCE_S,
    Shape,
    StoredEngine,
    fa,
    wa,
)
from tests.store.rank.shelves import Rows

SHAPE = Shape(tp=2, heads=2)


@pytest.fixture
def rows() -> Rows:
    """The prompt's rows, saved by one rank."""
    rows = Rows()
    with StoredEngine(Shape(heads=2), rows, filled=True).opened() as engine:
        engine.saved(engine.names())
        rows.reads.clear()
    return rows


@pytest.fixture
def ours(rows: Rows) -> Iterator[StoredEngine]:
    """Two ranks that hold nothing yet."""
    with StoredEngine(SHAPE, rows, filled=False, seed=2).opened() as engine:
        yield engine


def the(rows: Rows, name: RowName) -> bytearray:
    """The bytes of a row."""
    return rows.rows["ns", name]


def refused(ours: StoredEngine) -> None:
    """A load of the last fetch fails on ranks with bad rows, and writes nothing there."""
    ours.post(LoadRows(ours._number, "r", ours.need()))
    for rank, store in enumerate(ours.stores):
        ours.wait(store.has_results)
        assert (store.take_load_failures(), store.take_loaded()) == (["r"], [])
        for base, labels in ours.side.labels(rank, False).items():
            assert np.all(ours.bytes(base, len(labels)) == BLANK)


def test_a_flipped_byte_of_any_slab_is_found_by_the_rank_that_holds_it(
    rows: Rows, ours: StoredEngine
) -> None:
    layout = ours.layout.fa
    for slab in layout.slabs:
        for at in (slab.offset, slab.offset + slab.nbytes - 1):
            the(rows, fa(2))[at] ^= 1
            results = ours.fetch([fa(1), fa(2), fa(3)])
            assert [r.damaged for r in results] == [
                (fa(2),) if rank == slab.head else () for rank in range(2)
            ]
            assert all(not r.missing for r in results)
            the(rows, fa(2))[at] ^= 1
    assert all(not r.damaged for r in ours.fetch([fa(2)]))


@pytest.mark.parametrize("from_end", [1, 20, 1000, 4096])
def test_a_flipped_byte_of_the_footer_is_found_by_every_rank(
    rows: Rows, ours: StoredEngine, from_end: int
) -> None:
    the(rows, wa(3))[-from_end] ^= 0x10
    assert [r.damaged for r in ours.fetch(ours.names())] == [(wa(3),)] * 2
    refused(ours)


def test_a_cut_row_is_damaged(rows: Rows, ours: StoredEngine) -> None:
    for nbytes in (0, 4096, len(the(rows, fa(0))) - 1):
        whole = bytes(the(rows, fa(0)))
        del the(rows, fa(0))[nbytes:]
        assert [r.damaged for r in ours.fetch([fa(0), fa(1)])] == [(fa(0),)] * 2
        the(rows, fa(0))[:] = whole


def test_swapped_rows_are_both_damaged(rows: Rows, ours: StoredEngine) -> None:
    one, two = bytes(the(rows, fa(0))), bytes(the(rows, fa(1)))
    the(rows, fa(0))[:], the(rows, fa(1))[:] = two, one
    assert [r.damaged for r in ours.fetch(ours.names())] == [(fa(0), fa(1))] * 2
    refused(ours)


def test_data_under_the_footer_of_another_row_is_damaged(rows: Rows, ours: StoredEngine) -> None:
    size = ours.layout.fa.data_nbytes
    the(rows, fa(0))[size:] = the(rows, fa(1))[size:]
    assert [r.damaged for r in ours.fetch([fa(0)])] == [(fa(0),)] * 2


def test_swapped_slabs_are_damaged(rows: Rows, ours: StoredEngine) -> None:
    row, slabs = the(rows, fa(0)), ours.layout.fa.slabs
    one, two = (slice(s.offset, s.offset + s.nbytes) for s in slabs[:2])
    row[one], row[two] = row[two], row[one]
    assert [r.damaged for r in ours.fetch([fa(0)])] == [(fa(0),), ()]


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": "another"},
        {"name": fa(0, OTHER)},
        {"name": wa(0)},
        {"data_nbytes": 4096},
        {"checksums": np.zeros(3, dtype=np.uint64)},
    ],
)
def test_a_whole_footer_that_says_something_else_is_damage(
    rows: Rows, ours: StoredEngine, change: dict[str, object]
) -> None:
    size = ours.layout.fa.data_nbytes
    row = the(rows, fa(0))
    row[size:] = encode_footer(replace(decode_footer(memoryview(row)), **change))  # type: ignore[arg-type]
    assert [r.damaged for r in ours.fetch([fa(0)])] == [(fa(0),)] * 2


def test_without_verification_a_flipped_byte_is_served(
    rows: Rows, ours: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowShare, "verify_row", lambda *_: None)
    the(rows, fa(2))[5] ^= 1
    assert all(r == FetchResult(r.number) for r in ours.fetch(ours.names()))
    ours.load(ours.need())
    with pytest.raises(AssertionError, match="1 wrong bytes"):
        ours.check(ours.need())


@pytest.mark.parametrize("error", [ShelfFailure("EIO"), RowMissing("gone")])
def test_rows_that_cannot_be_read_are_missing_and_all_others_are_tried(
    rows: Rows, ours: StoredEngine, error: Exception
) -> None:
    def fail(name: RowName) -> None:
        if name in (fa(1), wa(2)):
            raise error

    rows.before_read = fail
    assert [r.missing for r in ours.fetch(ours.names())] == [(fa(1), wa(2))] * 2
    assert set(rows.reads) == set(ours.names())
    refused(ours)
    counts = ours.stores[0].take_rank_counts()
    assert counts["rows_missing"] == 2
    assert counts.get("read_failures", 0) == (2 if isinstance(error, ShelfFailure) else 0)


def test_a_row_unlinked_during_a_fetch_is_missing(rows: Rows, ours: StoredEngine) -> None:
    def unlink(name: RowName) -> None:
        if name == fa(3):
            rows.rows.pop(("ns", name), None)

    rows.before_read = unlink
    assert [r.missing for r in ours.fetch([fa(0), fa(3)])] == [(fa(3),)] * 2


def test_a_fetch_after_a_bad_one_is_served(rows: Rows, ours: StoredEngine) -> None:
    the(rows, fa(2))[5] ^= 1
    ours.fetch(ours.names())
    ours.post(DropFetch(ours._number))
    the(rows, fa(2))[5] ^= 1
    assert all(not r.damaged for r in ours.fetch(ours.names()))
    ours.load(ours.need())
    ours.check(ours.need())
    assert all(not len(store._fetches) for store in ours.stores)


@pytest.mark.parametrize("offset", [-4096, 1, 4 << 20, (4 << 20) - 4096])
def test_a_fetch_outside_of_the_staging_area_is_missing(ours: StoredEngine, offset: int) -> None:
    assert [r.missing for r in ours.fetch(ours.names(), offset)] == [tuple(ours.names())] * 2
    assert not ours.rows.reads


def test_a_fetch_of_no_rows_is_answered(ours: StoredEngine) -> None:
    assert ours.fetch([]) == [FetchResult(1)] * 2


def test_a_fetch_before_the_store_is_open_is_missing(rows: Rows) -> None:
    with StoredEngine(SHAPE, rows, filled=False) as ours:
        assert [r.missing for r in ours.fetch([fa(0)])] == [(fa(0),)] * 2


def test_another_namespace_holds_other_rows(rows: Rows, ours: StoredEngine) -> None:
    ours.post(replace(ours.opening, namespace="later"))
    assert [r.missing for r in ours.fetch([fa(0)])] == [(fa(0),)] * 2
    ours.post(ours.opening)
    assert ours.fetch([fa(0)]) == [FetchResult(2)] * 2


def test_a_store_opened_again_with_another_layout_stays_as_it_was(ours: StoredEngine) -> None:
    ours.post(replace(ours.opening, writer="other", namespace="later"))
    assert ours.fetch([fa(0)]) == [FetchResult(1)] * 2


# Dropped fetches


class Gate:
    """Holds reads back, and signals that one has begun."""

    def __init__(self, rows: Rows) -> None:
        self.came, self.go = threading.Semaphore(0), threading.Event()
        rows.before_read = self

    def __call__(self, _: RowName) -> None:
        self.came.release()
        assert self.go.wait(PATIENCE_S)


def test_a_dropped_fetch_reads_no_more_rows_and_answers_when_its_reads_have_ended(
    rows: Rows,
) -> None:
    with StoredEngine(Shape(heads=2), rows, filled=False).opened() as ours:
        gate = Gate(rows)
        first = ours.start_fetch(ours.names())
        second = ours.start_fetch(ours.names(), 1 << 20)
        for _ in range(2):  # the second reader begins with a step of the engine
            ours.wait(lambda: not ours.stores[0].has_results() and gate.came.acquire(timeout=0.01))
        under_way = len(rows.reads)
        ours.post(DropFetch(first))
        ours.post(DropFetch(second))
        assert ours.results_of(0) == [FetchResult(second)], (
            "bytes that are still written to were given up, or those that are not were kept"
        )
        gate.go.set()
        assert ours.answer(0, first) == FetchResult(first), "left out is not missing"
        assert len(rows.reads) == under_way
        assert not len(ours.stores[0]._fetches)


def test_a_load_of_a_dropped_fetch_fails(ours: StoredEngine) -> None:
    ours.fetch(ours.names())
    ours.post(DropFetch(ours._number))
    refused(ours)


def test_a_load_whose_rows_do_not_cover_it_fails(ours: StoredEngine) -> None:
    ours.fetch(ours.names()[1:])
    refused(ours)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), MemoryError()])
def test_loads_that_find_no_memory_fail_and_switch_nothing_off(
    ours: StoredEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A GPU's memory is vLLM's, and comes and goes; a third such load ended the store for ever."""

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(HostCopies, "copy_in", fail)
        for _ in range(4):
            ours.fetch(ours.names())
            refused(ours)
    assert all(store._reads for store in ours.stores)
    ours.fetch(ours.names())
    ours.load(ours.need())
    ours.check(ours.need())


def test_a_load_that_the_scheduler_gives_up_is_reported_by_every_rank(ours: StoredEngine) -> None:
    ours.post(FailLoad("gone"))
    assert [store.take_load_failures() for store in ours.stores] == [["gone"]] * 2
    assert all(store.take_rank_counts()["load_failures"] == 1 for store in ours.stores)


# Errors that no shelf should raise


def answered(ours: StoredEngine, count: int) -> None:
    for number in range(1, count + 1):
        for rank in range(2):
            result = ours.answer(rank, number)
            assert isinstance(result, FetchResult)
            assert set(result.missing) == {fa(0), fa(1)}


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, SystemExit, KeyboardInterrupt])
def test_reads_that_fail_unexpectedly_are_answered_and_so_is_all_after_them(
    rows: Rows, ours: StoredEngine, error: type[BaseException]
) -> None:
    def fail(_: RowName) -> None:
        raise error

    rows.before_read = fail
    for _ in range(4):
        ours.start_fetch([fa(0), fa(1)])
    answered(ours, 4)
    ours.wait(lambda: not any(store.has_results() or store._reads for store in ours.stores))
    ours.start_fetch([fa(0), fa(1)])
    answered(ours, 5)
    refused(ours)


def test_one_unexpected_error_is_survived(rows: Rows, ours: StoredEngine) -> None:
    errors = {name: threading.Semaphore(1) for name in (fa(0),)}

    def fail(name: RowName) -> None:
        if name in errors and errors[name].acquire(blocking=False):
            raise ZeroDivisionError

    rows.before_read = fail
    assert sorted(r.missing for r in ours.fetch([fa(0), fa(1)])) == [(), (fa(0),)]
    assert ours.fetch([fa(0), fa(1)]) == [FetchResult(2)] * 2


@pytest.mark.parametrize("place", ["shelf", "layout", "threads"])
def test_a_rank_that_cannot_begin_answers_everything(
    rows: Rows, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ShelfFailure("EACCES") if place == "shelf" else RuntimeError("no")

    with StoredEngine(SHAPE, rows, filled=False) as ours:
        if place == "shelf":
            rows.before_open = fail
        elif place == "layout":
            monkeypatch.setattr(RowShare, "from_layouts", fail)
        else:
            monkeypatch.setattr(threading.Thread, "start", fail)
        ours.opened()
        ours.start_fetch([fa(0), fa(1)])
        answered(ours, 1)
        save = ours.save([fa(0)])
        assert len(save.rows) == 1


def test_a_shelf_that_opens_late_is_used_from_then_on(rows: Rows, ours: StoredEngine) -> None:
    def fail() -> None:
        raise ShelfFailure("not mounted yet")

    rows.before_open = fail
    assert [r.missing for r in ours.fetch([fa(0)])] == [(fa(0),)] * 2
    rows.before_open = lambda: None
    assert ours.fetch([fa(0)]) == [FetchResult(2)] * 2


def test_close_ends_the_threads_and_shelves_twice_without_harm(rows: Rows) -> None:
    before = threading.active_count()
    with StoredEngine(SHAPE, rows, filled=False).opened() as ours:
        ours.fetch(ours.names())
        ours.close()
        assert threading.active_count() == before
        assert rows.num_open == 0
        ours.post(Fetch(99, 0, (fa(0),)))
        assert not ours.stores[0].has_results()


def test_close_before_the_store_is_open_is_quiet(rows: Rows) -> None:
    with StoredEngine(SHAPE, rows, filled=False) as ours:
        assert not ours.stores[0].has_results()
