"""The keeper's thread: its queue while the store cannot be opened, and its first step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.store.engine.catalogue import Catalogue
from pdconn.store.engine.commits import Committer
from pdconn.store.engine.keeper import Keeper
from pdconn.store.engine.lookups import ShareSizes
from pdconn.store.errors import ShelfFailure
from pdconn.store.format.names import RowKind
from pdconn.store.shelf.base import Shelf
from pdconn.store.shelf.files import FilesShelf
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, until_ready
from tests.store.joined.test_joined import SETTINGS
from tests.store.joined.test_joined import prompt as tokens_of
from tests.tools.cli.stored_rows import LAYOUT, prompt

NUM_FULL = 4
"""Rows of full attention of 300 tokens; as many of windows are saved behind them."""


def refused() -> Shelf:
    raise ShelfFailure("cannot open the root: EROFS")


@pytest.mark.parametrize(
    ("opens", "queued"),
    [(refused, 0), (lambda: MemoryShelf(MemoryRows()), None)],
    ids=["not opened", "control"],
)
def test_uses_are_not_queued_for_ever(opens: Callable[[], Shelf], queued: int | None) -> None:
    """Each hit adds its rows; a root that cannot be opened may stay so."""
    catalogue = Catalogue()
    keeper = Keeper(
        "ns",
        catalogue=catalogue,
        sizes=ShareSizes(1, 1),
        shelf=opens,
        budget=None,
        committer=lambda settled: Committer(
            LAYOUT, writer="w", num_ranks=1, catalogue=catalogue, budget=None, settled=settled
        ),
        clock=time.monotonic,
        told=None,
    )
    keeper.start()
    until = time.monotonic() + 20.0
    while not keeper._is_open and queued is None and time.monotonic() < until:
        time.sleep(0.01)
    row = prompt(1, 1).name(RowKind.FA, 0)
    for _ in range(1000):
        keeper.touch([row])
    if queued is None:
        while row not in keeper._touched and time.monotonic() < until:
            time.sleep(0.01)
        assert row in keeper._touched
    else:
        assert keeper._queue.qsize() == queued
    keeper.close()


def test_rows_that_are_saved_before_the_first_step_stay_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing of the start is without them, and a window is saved only behind a known row."""
    engine_ready, num_steps = threading.Event(), 0
    take, step, notes = Keeper._take, Keeper._step, FilesShelf.notes

    def late(self: Keeper, shelf: Shelf) -> bool:
        engine_ready.wait(20.0)
        return take(self, shelf)

    def counted(self: Keeper, shelf: Shelf) -> None:
        nonlocal num_steps
        step(self, shelf)
        num_steps += 1

    def of_first_rows(self: FilesShelf, writer: str, part: str) -> Mapping[int, bytes]:
        is_seen = num_steps > 0 or int(part.partition("-")[2]) < NUM_FULL
        return notes(self, writer, part) if is_seen else {}

    monkeypatch.setattr(Keeper, "_take", late)
    monkeypatch.setattr(Keeper, "_step", counted)
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
