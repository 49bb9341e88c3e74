"""What the readers of a rank begin first: what requests wait for, and tenants in turn."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from pdconn.lifecycle import turns
from pdconn.lifecycle.turns import MOST_WAIT_S, Urgency
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.rank_commands import Fetch, SaveRow, SaveRows
from tests.store.rank.engines import PATIENCE_S, Shape, StoredEngine, fa
from tests.store.rank.shelves import Rows


def row(number: int, tenant: bytes = b"") -> RowName:
    """A row that is not there; rows are noted before they are looked for."""
    return RowName(RowKind.FA, bytes([number]) * 16, b"p" * 16, 1, tenant)


PREFETCHED = [row(number) for number in range(3)]


@dataclass
class Gate:
    """Holds all readers in their first read until it is opened."""

    rows: Rows
    is_open: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.rows.before_read = lambda *_: self.is_open.wait(PATIENCE_S)

    def await_readers(self, count: int) -> None:
        """Wait until so many rows were begun."""
        give_up = time.monotonic() + PATIENCE_S
        while len(self.rows.reads) < count:
            assert time.monotonic() < give_up
            time.sleep(0.001)


def of(tenant: bytes, index: int) -> RowName:
    return row(index, tenant.ljust(8, b"."))


def begun(fetches: list[tuple[list[RowName], Urgency]]) -> list[RowName]:
    """The order in which rows of ``fetches`` are begun by one reader, while another is held."""
    rows = Rows()
    gate = Gate(rows)
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        engine.start_fetch([row(9)])  # makes the second reader start
        gate.await_readers(1)
        gate.is_open.set()
        engine.answer(0, engine._number)
        gate.is_open.clear()
        held = [engine.start_fetch([row(8)]), engine.start_fetch([row(7)])]
        gate.await_readers(3)
        numbers = []
        for names, urgency in fetches:
            engine._number += 1
            numbers.append(engine._number)
            engine.post(Fetch(engine._number, 0, tuple(names), urgency))
        gate.is_open.set()
        for number in (*held, *numbers):
            engine.answer(0, number)
    return rows.reads[3:]


def places(reads: list[RowName], names: list[RowName]) -> list[int]:
    return [reads.index(name) for name in names]


def test_rows_that_a_request_waits_for_are_read_before_those_of_a_prefetch() -> None:
    waited = [row(4), row(5)]
    reads = begun([(PREFETCHED, Urgency.PREFETCH), (waited, Urgency.LOAD)])
    assert max(places(reads, waited)) < min(places(reads, PREFETCHED))


def test_rows_that_a_pull_waits_for_are_read_before_both() -> None:
    loaded, beside = [row(3)], [row(4), row(5)]
    reads = begun([(loaded, Urgency.LOAD), (beside, Urgency.PULL)])
    assert max(places(reads, beside)) < places(reads, loaded)[0]


def test_one_tenants_row_does_not_wait_for_all_of_anothers() -> None:
    many = [[of(b"a", index)] for index in range(6)]
    reads = begun([*((names, Urgency.LOAD) for names in many), ([of(b"b", 0)], Urgency.LOAD)])
    assert reads.index(of(b"b", 0)) <= 3


def test_those_laws_notice_a_queue_without_classes_and_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""
    monkeypatch.setattr(
        "pdconn.store.rank.store.turn_of_read", lambda task: turns.TurnKey(Urgency.LOAD)
    )
    waited = [row(4), row(5)]
    reads = begun([(PREFETCHED, Urgency.PREFETCH), (waited, Urgency.LOAD)])
    assert max(places(reads, waited)) > min(places(reads, PREFETCHED))
    many = [[of(b"a", index)] for index in range(6)]
    reads = begun([*((names, Urgency.LOAD) for names in many), ([of(b"b", 0)], Urgency.LOAD)])
    assert reads.index(of(b"b", 0)) > 3


@pytest.mark.parametrize("most_s", [0.05, PATIENCE_S])
def test_a_prefetch_waits_for_pulls_as_long_as_it_may(
    most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOST_WAIT_S, Urgency.PREFETCH, most_s)
    rows = Rows()
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        engine.fetch([row(9)])
        [store] = engine.stores
        store.set_waiting(Urgency.PULL, is_loading=True)
        engine._number += 1
        engine.post(Fetch(engine._number, 0, tuple(PREFETCHED), Urgency.PREFETCH))
        engine.fetch([row(8)])  # a load does not wait for pulls
        if most_s < 1.0:
            engine.answer(0, engine._number - 1)
            assert store.take_rank_counts()["turns_overdue"] >= 3
            return
        time.sleep(0.2)
        assert rows.reads == [row(9), row(8)]
        store.set_waiting(Urgency.PREFETCH, is_loading=True)
        engine.answer(0, engine._number - 1)
        assert "turns_overdue" not in store.take_rank_counts()


def written(tenants: list[bytes]) -> list[bytes]:
    """Tenants in the order in which saves of theirs are written, each of one row."""
    rows, gate = Rows(), threading.Event()
    order: list[bytes] = []

    def note(writer: str, part: str) -> None:
        order.append(tenants[int(part)])
        assert gate.wait(PATIENCE_S)

    rows.before_begin = note
    with StoredEngine(Shape(), rows, filled=True).opened() as engine:
        saves = []
        for number, tenant in enumerate(tenants):
            part = SaveRow(replace(fa(0), tenant=tenant), str(number))
            saves.append(SaveRows(number, engine.side.tables, (part,)))
            engine.post(saves[-1])
            engine.stores[0].after_pass()
        gate.set()
        for save in saves:
            engine.noted(save)
    return order


def test_tenants_take_turns_in_being_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the control: a writer to which all are one tenant."""
    a, b = b"a.......", b"b......."
    tenants = [*[a] * 8, b]
    assert written(tenants).index(b) <= 2
    monkeypatch.setattr(
        "pdconn.store.rank.store.turn_of_save", lambda task: turns.TurnKey(Urgency.SAVE)
    )
    assert written(tenants).index(b) == 8
