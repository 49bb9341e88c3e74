"""A save that fails costs a row, and never a request: blocks are freed, and a note says why."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from pdconn.protocol.ticket import BlockList
from pdconn.store.format.footer import decode_note
from pdconn.store.rank import row_writer
from pdconn.store.rank.store import WRITER
from pdconn.store.rank_commands import SaveFailed, SaveResult, SaveRow, SaveRows
from pdconn.store.store_errors import RowDamaged, ShelfFailure
from pdconn.threads import RightOfWay
from tests.store.rank.engines import PATIENCE_S, Shape, StoredEngine, fa, wa
from tests.store.rank.shelves import Rows, ok

SHAPE = Shape(tp=2, heads=2)


@pytest.fixture
def rows() -> Rows:
    return Rows()


def kinds(rows: Rows, save: SaveRows) -> list[bool]:
    """By row, whether all notes say that it was written."""
    return [ok(rows.notes[row.part]) for row in save.rows]


def test_a_save_begins_after_the_pass(rows: Rows) -> None:
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        engine.post(SaveRows(7, engine.side.tables, (SaveRow(fa(0), "p"),)))
        engine.fetch([fa(0)])  # the writer has had all the time that it takes to fetch
        assert not rows.parts
        assert not engine.stores[0].has_results()
        engine.stores[0].after_pass()
        assert engine.answer(0, 7) == SaveResult(7)


def test_blocks_are_free_before_the_last_row_is_written(rows: Rows) -> None:
    go = threading.Event()

    def hold(_: str, part: str) -> None:
        if part == "p1":
            assert go.wait(PATIENCE_S)

    rows.before_write = hold
    with StoredEngine(SHAPE, rows, filled=True).opened() as engine:
        save = engine.save([fa(0), fa(1)])
        engine.forget()
        assert len(rows.notes["p1"]) == 0
        go.set()
        engine.noted(save)
        for row in save.rows:
            rows.commit(engine.opening, row, 2)
        names = [fa(2), fa(3), *(wa(index) for index in range(4))]
        late = engine.saved(names, "q")
    assert len(late.rows) == 6
    with StoredEngine(Shape(heads=2), rows, filled=False, seed=2).opened() as ours:
        ours.fetch([fa(0), fa(1), wa(0), wa(1)])
        ours.load(ours.need(until=128))
        wrong = ours.wrong_bytes(ours.need(until=128), full=True)
        assert wrong == 0
        assert ours.wrong_bytes(ours.need(until=128), full=False) > 0, "those were saved too late"


@pytest.mark.parametrize("step", ["before_begin", "before_write"])
@pytest.mark.parametrize("error", [ShelfFailure("ENOSPC"), ZeroDivisionError("a bug")])
def test_a_row_that_cannot_be_written_is_noted_and_the_next_is_saved(
    rows: Rows, error: Exception, step: str
) -> None:
    def fail(_: str, part: str) -> None:
        if part == "p1":
            raise error

    setattr(rows, step, fail)
    with StoredEngine(SHAPE, rows, filled=True).opened() as engine:
        save = engine.save([fa(0), fa(1), fa(2)])
        engine.noted(save)
        assert kinds(rows, save) == [True, False, isinstance(error, ShelfFailure)]
        with pytest.raises(RowDamaged, match="could not write"):
            decode_note(rows.notes["p1"][0])
        assert engine.stores[0].take_rank_counts()["write_failures"] >= 1
        setattr(rows, step, lambda *_: None)
        engine.saved([fa(3), wa(3)], "q")
        assert ("ns", wa(3)) in rows.rows


def test_a_row_without_its_blocks_is_noted_and_the_next_is_saved(rows: Rows) -> None:
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        full, windowed = engine.side.tables
        holes = BlockList(0, (*full.ids[:4], 0, *full.ids[5:]))
        parts = tuple(SaveRow(fa(n), f"p{n}") for n in range(3))
        save = SaveRows(7, (holes, windowed), parts)
        engine.post(save)
        engine.stores[0].after_pass()
        assert engine.answer(0, 7) == SaveResult(7)
        engine.noted(save)
        assert kinds(rows, save) == [True, False, True]


def test_a_note_that_cannot_be_left_holds_nothing_up(rows: Rows) -> None:
    def fail(_: str, part: str) -> None:
        if part == "p0":
            raise ShelfFailure("EIO")

    rows.before_note = fail
    with StoredEngine(SHAPE, rows, filled=True).opened() as engine:
        engine.save([fa(0), fa(1)])
        while len(rows.notes["p1"]) < 2:
            assert not threading.Event().wait(0.002)
        assert not rows.notes["p0"]
        for rank in range(2):  # so that no one waits for the note
            engine.wait(lambda rank=rank: SaveFailed("p0") in engine.results_of(rank))
            assert SaveFailed("p1") not in engine.results_of(rank)


@pytest.mark.parametrize("error", [SystemExit, ZeroDivisionError])
def test_saves_after_a_thread_has_failed_are_answered_and_noted(
    rows: Rows, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error

    rows.before_write = fail
    with StoredEngine(SHAPE, rows, filled=True).opened() as engine:
        for label in "abcdef":
            save = engine.save([fa(0), fa(1)], label)
            engine.noted(save)
            assert kinds(rows, save) == [False, False]
        assert all(
            store._workers[WRITER]._work.__self__._errors_left == 0 for store in engine.stores
        )
        assert engine.fetch([fa(0)])[0].missing == (fa(0),), "reads go on"


def test_a_save_before_the_store_is_open_is_answered(rows: Rows) -> None:
    with StoredEngine(SHAPE, rows, filled=True) as engine:
        engine.save([fa(0)])
        assert not rows.parts


def test_a_save_of_no_rows_is_answered(rows: Rows) -> None:
    with StoredEngine(SHAPE, rows, filled=True).opened() as engine:
        engine.save([])


def test_a_rank_whose_replicas_are_unknown_is_off_and_answers(rows: Rows) -> None:
    with StoredEngine(Shape(), rows, filled=True) as engine:
        engine.opening = replace(engine.opening, replicas=({},))
        engine.opened()
        save = engine.save([fa(0)])
        engine.noted(save)
        assert kinds(rows, save) == [False]
        assert engine.fetch([fa(0)])[0].missing == (fa(0),)


def rows_while_requests_wait(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Rows saved while requests wait for pulls, and then."""
    monkeypatch.setattr(row_writer, "YIELD_S", 30.0)
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        [store] = engine.stores
        began, goes_on = threading.Event(), threading.Event()

        def before_begin(*_: object) -> None:
            began.set()
            goes_on.wait(PATIENCE_S)

        rows.before_begin = before_begin
        save = engine.start_save([fa(0), fa(1), fa(2)])
        assert began.wait(PATIENCE_S)
        store.set_waiting(True)
        goes_on.set()
        give_up = time.monotonic() + PATIENCE_S
        while not rows.notes[save.rows[0].part] and time.monotonic() < give_up:
            time.sleep(0.005)
        time.sleep(0.3)
        during = sum(bool(rows.notes[row.part]) for row in save.rows)
        store.set_waiting(False)
        engine.noted(save)
        return during, len(save.rows)


def test_a_save_delays_pulls_and_loads_by_one_row(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows_while_requests_wait(rows, monkeypatch) == (1, 3)


def test_that_law_notices_a_writer_that_does_not_give_way(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(RightOfWay, "give_way", lambda self, most_s: None)
    assert rows_while_requests_wait(rows, monkeypatch) == (3, 3)


def test_saves_go_on_where_requests_always_wait(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are never read out would stay pinned."""
    monkeypatch.setattr(row_writer, "YIELD_S", 0.01)
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        engine.stores[0].set_waiting(True)
        engine.noted(engine.save([fa(0), fa(1)]))
