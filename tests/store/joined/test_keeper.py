"""The keeper's thread: its queue while the store cannot be opened, and its first step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pdconn.store.engine.keeper_thread import Committer, KeeperCommand, KeeperLoop, KeeperReport
from pdconn.store.engine.lookups import Catalogue, ShareSizes
from pdconn.store.engine.row_uses import RowUses
from pdconn.store.engine.saves import MAX_WAITING, Keeper
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.interface import Shelf
from pdconn.store.store_errors import ShelfFailure
from pdconn.threads import Box, ThreadDied, Worker
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, until_ready
from tests.store.joined.test_joined import SETTINGS
from tests.store.joined.test_joined import prompt as tokens_of
from tests.tools.cli.stored_rows import LAYOUT, prompt

NUM_FULL = 4
"""Rows of full attention of 300 tokens; as many of windows are saved behind them."""


def refused() -> Shelf:
    raise ShelfFailure("cannot open the root: EROFS")


def keeper_on(opens: Callable[[], Shelf]) -> tuple[Keeper, KeeperLoop]:
    """A keeper of a root without a budget."""
    inbox: Box[KeeperCommand] = Box()
    outbox: Box[KeeperReport | ThreadDied] = Box()
    catalogue = Catalogue("ns")
    loop = KeeperLoop(
        inbox,
        outbox,
        Box(),
        catalogue=catalogue,
        shelf=opens,
        budget=None,
        uses=RowUses(LAYOUT, {RowKind.FA: 1}, None, time.monotonic, time.time),
        committer=partial(
            Committer, LAYOUT, writer="w", num_ranks=1, catalogue=catalogue, budget=None
        ),
        clock=time.monotonic,
    )
    keeper = Keeper(
        Worker("pdconn-store-keeper", loop.run_keeper, inbox, outbox),
        sizes=ShareSizes(1, 1),
        row_nbytes={RowKind.FA: 1},
        room=None,
        lookups=Box(),
        namespace="ns",
        clock=time.monotonic,
    )
    return keeper, loop


ROW = prompt(1, 1).name(RowKind.FA, 0)


def test_uses_are_not_kept_while_the_root_cannot_be_opened() -> None:
    """Each hit adds its rows; a root that cannot be opened may stay so."""
    keeper, loop = keeper_on(refused)
    for _ in range(1000):
        keeper.rows_used([ROW])
    until = time.monotonic() + 20.0
    while keeper._worker.inbox.items:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not loop._kept
    keeper.close()


def test_uses_are_noted_where_it_can_be() -> None:
    """The control."""
    keeper, loop = keeper_on(lambda: MemoryShelf(MemoryRows()))
    keeper.rows_used([ROW])
    until = time.monotonic() + 20.0
    while ROW not in loop._uses:
        assert time.monotonic() < until
        time.sleep(0.01)
    keeper.close()


def test_uses_are_not_queued_for_ever_behind_a_shelf_that_hangs() -> None:
    go = threading.Event()

    def hangs() -> Shelf:
        assert go.wait(60.0)
        return MemoryShelf(MemoryRows())

    keeper, _ = keeper_on(hangs)
    for _ in range(MAX_WAITING + 1000):
        keeper.rows_used([ROW])
    assert len(keeper._worker.inbox.items) == MAX_WAITING
    go.set()
    keeper.close()


def test_an_engine_that_takes_no_step_is_owed_a_few_reports_whatever_goes() -> None:
    keeper, loop = keeper_on(lambda: MemoryShelf(MemoryRows()))
    keeper.close()
    rows = [prompt(number, 1).name(RowKind.FA, 0) for number in range(2)]
    for _ in range(100):
        loop._owed.gone += rows
        loop._report()
    assert len(loop._outbox.items) == 16
    seen: list[RowName] = []
    keeper._note_rows = lambda new, gone: seen.extend(gone)
    for _ in range(100):
        keeper.take_reports()
        loop._report()
    assert seen == rows * 100


def test_reports_of_before_a_reset_make_no_row_known() -> None:
    keeper, loop = keeper_on(lambda: MemoryShelf(MemoryRows()))
    keeper.close()
    keeper._saving.add(ROW)
    loop._owed.committed.append(ROW)
    loop._owed.settled.append(ROW)
    loop._report()
    keeper.change_namespace("after")
    assert not keeper.is_saving()
    assert keeper.is_wanted(ROW)
    loop._owed.in_namespace("after").committed.append(ROW)
    loop._report()
    keeper.take_reports()
    assert not keeper.is_wanted(ROW), "the control"


def test_a_keeper_that_died_ends_saving_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def dies() -> Shelf:
        raise SystemExit

    keeper, _ = keeper_on(dies)
    keeper._saving.add(ROW)
    until = time.monotonic() + 20.0
    while keeper.is_saving():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert keeper.admit_rows([ROW]) == []
    assert "the store-keeper thread stopped" in caplog.text


def test_rows_that_are_saved_before_the_first_step_stay_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing of the start is without them, and a window is saved only behind a known row."""
    engine_ready, num_steps = threading.Event(), 0
    take, step, notes = KeeperLoop._take_commands, KeeperLoop._step, FilesShelf.notes

    def late(self: KeeperLoop, shelf: Shelf) -> bool:
        engine_ready.wait(20.0)
        return take(self, shelf)

    def counted(self: KeeperLoop, shelf: Shelf) -> None:
        nonlocal num_steps
        step(self, shelf)
        num_steps += 1

    def of_first_rows(self: FilesShelf, writer: str, part: str) -> Mapping[int, bytes]:
        is_seen = num_steps > 0 or int(part.partition("-")[2]) < NUM_FULL
        return notes(self, writer, part) if is_seen else {}

    monkeypatch.setattr(KeeperLoop, "_take_commands", late)
    monkeypatch.setattr(KeeperLoop, "_step", counted)
    monkeypatch.setattr(FilesShelf, "notes", of_first_rows)
    root = tmp_path / "root"
    engine = FakeEngine(replace(SETTINGS, root=str(root)), budget=None, pass_tokens=300)
    try:
        until_ready(engine)
        engine.run(tokens_of(3, 300))
        until = time.monotonic() + 20.0
        while len(set(root.rglob("*.note0"))) < 2 * NUM_FULL:
            assert time.monotonic() < until
            time.sleep(0.01)
        engine_ready.set()
        engine.settle()
        outcome = engine.run(tokens_of(3, 300))
        assert (outcome.loaded, outcome.saves) == (256, 0)
        engine.settle()
    finally:
        engine_ready.set()
        engine.close()
