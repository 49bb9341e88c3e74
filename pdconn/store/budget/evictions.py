"""Eviction: one process of all those on a root removes rows when there is too little room.

The process that holds ``ROOT/budget/evictor`` keeps the tree of rows, from a listing every now
and then and from the names of new rows that all processes leave beside the accounts; the others
only note the use of rows, in the shelf.  It frees until there is headroom for what writers will
ask for next, so that they seldom wait::

    listing, new rows ─► tree ─► leaf used longest ago ─► used meanwhile? ─► remove
                                  ▲                         │ yes     rows are new: ask again
                                  └─────────────────────────┴─────────────┘
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from pdconn.store.budget.accounts import Accounts, Usage
from pdconn.store.budget.row_tree import Place, RowTree
from pdconn.store.errors import StoreError
from pdconn.store.format.names import RowKind
from pdconn.store.shelf.base import Shelf

log = logging.getLogger(__name__)

LISTING_S = 120.0
"""Between listings, while rows have to go."""

_SOON_S = 5.0
"""Between listings that found nothing to remove."""

_STEP_S = 0.2
_WARN_S = 60.0
HEADROOM = 16
"""One byte of so many is kept free."""


@dataclass(slots=True)
class _Freeing:
    """One step: until when, and what has gone."""

    until: float
    places: list[Place] = field(default_factory=list)
    nbytes: int = 0
    wa: int = 0


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
        self._tree: RowTree | None = None
        self._listed_at = self._warned_at = float("-inf")
        self._num_failed = 0
        self._has_met_gone = False
        self.evicted_nbytes = self.num_evicted = 0

    @property
    def is_ours(self) -> bool:
        """Whether this process evicts."""
        return self._lock is not None

    def step(self, shelf: Shelf) -> list[Place]:
        """Free what is missing, for a fifth of a second at most; the rows that were removed.

        Raises:
            StoreError: the accounts or the listing fail; a row that cannot be removed is passed
                over instead.
        """
        if not self._is_evictor():
            return []
        self._learn()
        usage = self._accounts.usage()
        if not usage.is_known or (self._missing(usage) <= 0 and self._wa_excess(usage) <= 0):
            return []
        now = self._clock()
        if self._tree is None or self._is_due(self._tree, now):
            self._tree = RowTree(self._accounts.list_rows(shelf))
            self._listed_at = now
            usage = self._accounts.usage()
        done = _Freeing(now + _STEP_S)
        try:
            self._free(
                shelf, self._tree, done, lambda: self._wa_excess(usage) - done.wa, is_wa=True
            )
            self._free(shelf, self._tree, done, lambda: self._missing(usage) - done.nbytes)
        finally:
            self.evicted_nbytes += done.nbytes
            self.num_evicted += len(done.places)
        return done.places

    def close(self) -> None:
        """Let another process evict."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._tree = None

    def take_met_gone(self) -> bool:
        """Whether a row was gone before it was evicted, since the last call: a recount is due."""
        met, self._has_met_gone = self._has_met_gone, False
        return met

    def _is_evictor(self) -> bool:
        """Become the evictor, unless another is; our lock counts no more once its file is gone."""
        if self._lock is not None and not self._accounts.is_evictor(self._lock):
            self.close()
        if self._lock is None:
            self._lock = self._accounts.try_evictor()
        return self._lock is not None

    def _learn(self) -> None:
        """Take the names of new rows; before the first listing they are of no use."""
        for row in self._accounts.take_news():
            if self._tree is not None:
                self._tree.add(row)

    def _is_due(self, tree: RowTree, now: float) -> bool:
        pause_s = _SOON_S if tree.victim() is None else LISTING_S
        return now - self._listed_at >= pause_s

    def _missing(self, usage: Usage) -> int:
        wanted = max(usage.capacity // HEADROOM, min(usage.wanted, usage.capacity // 2))
        return wanted - (usage.capacity - usage.committed - usage.reserved)

    def _wa_excess(self, usage: Usage) -> int:
        if self._wa_share is None:
            return 0
        return usage.wa - int(self._wa_share * usage.capacity)

    def _free(
        self,
        shelf: Shelf,
        tree: RowTree,
        done: _Freeing,
        left: Callable[[], int],
        *,
        is_wa: bool = False,
    ) -> None:
        """Remove victims until nothing is left to free; one that cannot be is passed over."""
        kind = RowKind.WA if is_wa else None
        while left() > 0 and self._clock() < done.until:
            place = tree.victim(kind)
            if place is None:
                return
            try:
                used_at = shelf.used_at(*place)
                if used_at is not None and used_at > tree.used_at(place):
                    tree.touched(place, used_at)
                    continue
                nbytes = self._accounts.evict(shelf, *place)
                if nbytes is None:
                    self._learn()
                    continue
            except StoreError as error:
                tree.passed_over(place)
                self._failed(place, error)
                continue
            tree.removed(place)
            # Somebody else removed a row of no bytes, and the count still has it.
            self._has_met_gone = self._has_met_gone or not nbytes
            done.places.append(place)
            done.nbytes += nbytes
            done.wa += nbytes if place[1].kind is RowKind.WA else 0

    def _failed(self, place: Place, error: StoreError) -> None:
        """Log that a row was not removed, once a minute."""
        self._num_failed += 1
        now = self._clock()
        if now - self._warned_at < _WARN_S:
            return
        log.warning(
            "pdconn: store: not evicted: row=%s rows=%d: %s",
            place[1].file_name,
            self._num_failed,
            error,
        )
        self._warned_at, self._num_failed = now, 0
