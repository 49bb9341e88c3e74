"""A save that fails costs a row, and never a request: blocks are freed, and a note says why."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

import pytest

from pdconn.lifecycle.turns import MOST_WAIT_S, Urgency
from pdconn.protocol.ticket import BlockList
from pdconn.store.format.footer import decode_note
from pdconn.store.rank import row_writer
from pdconn.store.rank.copies import HostCopies
from pdconn.store.rank.store import WRITER, RankStore
from pdconn.store.rank_commands import SaveFailed, SaveResult, SaveRow, SaveRows
from pdconn.store.store_errors import RowDamaged, ShelfFailure
from pdconn.threads import RightOfWay
from tests.store.rank.engines import PATIENCE_S, Shape, StoredEngine, fa, wa
from tests.store.rank.shelves import Rows, RowsShelf, ok
from transport import Spans

SHAPE = Shape(tp=2, heads=2)
CHUNK = 12 << 10
"""Of a save here: a row has some."""


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


@dataclass
class Pieces:
    """Pieces of a save as the writer begins them: bytes copied, or 0 for a write."""

    store: RankStore
    waits_at: int
    begun: list[int] = field(default_factory=list)

    def begin(self, nbytes: int) -> None:
        """A pull begins to wait while piece ``waits_at`` is moved."""
        self.begun.append(nbytes)
        if len(self.begun) == self.waits_at:
            self.store.set_waiting(Urgency.PULL, is_loading=False)


def pieces_while_a_pull_waits(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, waits_at: int
) -> tuple[list[int], int, list[int]]:
    """Pieces begun while a pull waits, how many there are in all, and the bytes of each."""
    monkeypatch.setitem(MOST_WAIT_S, Urgency.SAVE, PATIENCE_S)
    monkeypatch.setattr(row_writer, "CHUNK_NBYTES", CHUNK)
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        [store] = engine.stores
        pieces = Pieces(store, waits_at)
        copy_out = HostCopies.copy_out

        def copies(self: HostCopies, spans: Spans) -> None:
            pieces.begin(spans.total_bytes)
            copy_out(self, spans)

        monkeypatch.setattr(HostCopies, "copy_out", copies)
        rows.before_write = lambda *_: pieces.begin(0)
        save = engine.start_save([fa(0), wa(0), fa(1)])
        give_up = time.monotonic() + PATIENCE_S
        while len(pieces.begun) < waits_at and time.monotonic() < give_up:
            time.sleep(0.001)
        time.sleep(0.2)
        during = pieces.begun[waits_at:]
        store.set_waiting(None, is_loading=False)
        engine.noted(save)
        written = [nbytes for _, _, nbytes in rows.written]
        for row in save.rows:
            rows.commit(engine.opening, row, 1)
        return during, len(pieces.begun), [*pieces.begun, *written]


@pytest.mark.parametrize("waits_at", [1, 2, 7, 12])
def test_a_save_delays_a_pull_by_one_chunk(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, waits_at: int
) -> None:
    during, num_pieces, nbytes = pieces_while_a_pull_waits(rows, monkeypatch, waits_at)
    assert during == []
    assert num_pieces > waits_at
    assert max(nbytes) <= CHUNK


@pytest.mark.parametrize("broken", ["never gives way", "whole rows"])
def test_that_law_notices(broken: str, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: a writer that does not give way, and one that cuts nothing."""
    if broken == "never gives way":
        monkeypatch.setattr(RightOfWay, "give_way", lambda self, urgency: True)
    else:
        monkeypatch.setattr(Spans, "chunks", lambda self, nbytes: iter([self]))
    during, _, nbytes = pieces_while_a_pull_waits(rows, monkeypatch, 1)
    assert during or max(nbytes) > CHUNK


def test_an_object_is_written_at_once(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_writer, "CHUNK_NBYTES", CHUNK)
    monkeypatch.setattr(RowsShelf, "cuts_writes", False)
    count = []
    rows.before_write = lambda *_: count.append(1)
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        engine.noted(engine.save([fa(0), fa(1)]))
    assert len(count) == 2


def test_saves_go_on_where_requests_always_wait(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are never read out would stay pinned."""
    monkeypatch.setitem(MOST_WAIT_S, Urgency.SAVE, 0.01)
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        engine.stores[0].set_waiting(Urgency.PULL, is_loading=False)
        engine.noted(engine.save([fa(0), fa(1)]))
        assert engine.stores[0].take_rank_counts()["turns_overdue"] >= 2
