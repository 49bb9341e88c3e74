"""Eviction: one process of all those on a root removes rows when there is too little room.

The process that holds ``ROOT/budget/evictor`` keeps the tree of rows, from a listing every now
and then and from its own commits; the others only note the use of rows, in the shelf.  It frees
until there is headroom for what writers will ask for next, so that they seldom wait.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

from pdconn.store.budget.accounts import Accounts, Usage, try_lock
from pdconn.store.budget.row_tree import Place, RowTree
from pdconn.store.errors import StoreError
from pdconn.store.format.names import RowKind
from pdconn.store.shelf.base import Shelf, StoredRow

log = logging.getLogger(__name__)

LISTING_S = 120.0
_STEP_S = 0.2
HEADROOM = 16
"""One byte of so many is kept free."""


class Evictor:
    """Removes rows of a root, if this process is the one that does.

    Args:
        wa_share: WA bytes at most, as a share of the capacity; None for no limit.
        clock: seconds that never go back.
    """

    def __init__(
        self, accounts: Accounts, wa_share: float | None, clock: Callable[[], float]
    ) -> None:
        self._accounts, self._wa_share, self._clock = accounts, wa_share, clock
        self._lock: int | None = None
        self._tree = RowTree()
        self._listed_at = float("-inf")
        self.evicted_nbytes = 0

    @property
    def is_ours(self) -> bool:
        """Whether this process evicts."""
        return self._lock is not None

    def added(self, row: StoredRow) -> None:
        """We committed a row."""
        if self.is_ours:
            self._tree.add((row,))

    def step(self, shelf: Shelf) -> list[Place]:
        """Free what is missing, for a fifth of a second at most; the rows that were removed."""
        if self._lock is None:
            self._lock = try_lock(self._accounts.folder / "evictor")
            if self._lock is None:
                return []
        usage = self._accounts.usage()
        missing, wa_excess = self._missing(usage), self._wa_excess(usage)
        if missing <= 0 and wa_excess <= 0:
            return []
        began = self._clock()
        if began - self._listed_at >= LISTING_S or not len(self._tree):
            self._accounts.recount(shelf)
            self._tree.keep(shelf.rows())
            self._listed_at = began
            usage = self._accounts.usage()
        gone = self._evict(shelf, self._tree.victims(RowKind.WA), self._wa_excess(usage), began)
        freed = sum(nbytes for _, nbytes in gone)
        left = self._missing(usage) - freed
        gone += self._evict(shelf, self._tree.victims(), left, began)
        self.evicted_nbytes += sum(nbytes for _, nbytes in gone)
        return [place for place, _ in gone]

    def close(self) -> None:
        """Let another process evict."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _missing(self, usage: Usage) -> int:
        wanted = max(usage.capacity // HEADROOM, min(usage.wanted, usage.capacity // 2))
        return wanted - usage.free

    def _wa_excess(self, usage: Usage) -> int:
        if self._wa_share is None:
            return 0
        return usage.wa - int(self._wa_share * usage.capacity)

    def _evict(
        self, shelf: Shelf, victims: Iterator[Place], nbytes: int, began: float
    ) -> list[tuple[Place, int]]:
        """Remove victims until ``nbytes`` are free; one that cannot be removed is passed over."""
        gone: list[tuple[Place, int]] = []
        freed = 0
        if nbytes <= 0:
            return gone
        for place in victims:
            try:
                removed = self._accounts.remove(shelf, *place)
            except StoreError as error:
                log.warning("pdconn: store: not evicted: row=%s: %s", place[1].file_name, error)
                continue
            self._tree.removed(place)
            gone.append((place, removed))
            freed += removed
            if freed >= nbytes or self._clock() - began > _STEP_S:
                break
        return gone
