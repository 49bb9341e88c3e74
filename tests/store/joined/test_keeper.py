"""The keeper's queue while the store cannot be opened."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pdconn.store.engine.catalogue import Catalogue
from pdconn.store.engine.commits import Committer
from pdconn.store.engine.keeper import Keeper
from pdconn.store.engine.lookups import ShareSizes
from pdconn.store.errors import ShelfFailure
from pdconn.store.format.names import RowKind
from pdconn.store.shelf.base import Shelf
from pdconn.store.shelf.memory import MemoryRows, MemoryShelf
from tests.cli.stored_rows import LAYOUT, prompt


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
