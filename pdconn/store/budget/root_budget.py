"""One engine's share of a root's bytes, on the keeper's thread: what it may write, what it evicts.

::

    RootBudget.make_room ─► recount if due ─► Evictor frees what is missing ─► Allowance reserves
    engine's thread ── takes bytes, without a system call ──► Allowance.room

The allowance is reserved in advance, up to a target that doubles when it was too small for a row,
and falls back slowly while it is large enough::

    share of the capacity, a few rows  <=  target  <=  a quarter of the capacity, by writers

Of all processes on a root, the one that holds ``ROOT/budget/evictor`` removes rows when there is
too little room.  It keeps the tree of rows, from a listing every now and then and from the names
of new rows that all processes leave beside the accounts; the others only note the use of rows, in
the shelf.  It frees until there is headroom for what writers will ask for next, so that they
seldom wait.  Quotas of tenants say of whose rows it takes (:mod:`pdconn.store.budget.quotas`)::

    listing, new rows ─► tree ─► leaf used longest ago ─► used meanwhile? ─► remove
                                  ▲                         │ yes     rows are new: ask again
                                  └─────────────────────────┴─────────────┘

A row that is kept for a session is one whose use lies ahead
(:mod:`pdconn.store.engine.row_uses`), so it goes after all others, and of those that are kept the
one goes first whose time is up first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdconn.lifecycle.promises import PromiseLimits
from pdconn.store.budget.accounts import Accounts, Usage
from pdconn.store.budget.quotas import TenantQuota, tenants_above
from pdconn.store.budget.row_tree import Place, RowTree
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.folders import FolderId, folder_id
from pdconn.store.shelf.interface import Shelf, StoredPart, StoredRow, believed_use
from pdconn.store.store_errors import StoreError
from pdconn.threads import AmountBox

log = logging.getLogger(__name__)

_SHARE = 16
"""The usual target is this fraction of the capacity, divided by the number of writers."""

_MOST = 4
"""The largest target is this fraction of the capacity, divided likewise."""

_FALL = 32
"""Each step lowers the demand by this fraction: to half in 10 s of an idle engine."""


class Allowance:
    """Reserved bytes that the engine's thread takes from without a system call.

    Args:
        least: bytes that are kept ready where the capacity has room for them.

    Attributes:
        room: the box, of which another thread takes.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self.room = AmountBox()
        self._demand = self._target = 0

    @property
    def ready(self) -> int:
        """Bytes that can be taken now."""
        return self.room.amount

    def give_back(self, nbytes: int) -> None:
        """Return taken bytes that were not written."""
        self.room.add_amount(nbytes)

    def lose(self, nbytes: int) -> None:
        """Subtract bytes whose reserve was lost."""
        # They may be taken already: the amount is negative until their rows are given up.
        self.room.add_amount(-nbytes)

    def top_up(self, accounts: Accounts) -> None:
        """Reserve up to the target, and return what is far above it.  May wait for the accounts.

        Raises:
            ShelfFailure: neither was done.
        """
        target = self._next_target(accounts.usage())
        lacking = target - self.ready
        if lacking > 0:
            self.give_back(accounts.reserve(lacking))
        elif excess := self.room.take_above(target, slack=target // 4):
            try:
                accounts.release_reserved(excess)
            except StoreError:
                self.give_back(excess)
                raise

    def _next_target(self, usage: Usage) -> int:
        if self.room.take_missed():
            self._demand = 2 * self._target
        else:
            self._demand -= self._demand // _FALL
        num_writers = max(1, usage.num_writers)
        usual = max(usage.capacity // (_SHARE * num_writers), self._least)
        most = usage.capacity // (_MOST * num_writers)
        most = max(most, min(self._least, usage.capacity // (2 * num_writers)))
        self._target = min(max(usual, self._demand), most)
        return self._target


LISTING_S = 120.0
"""Between listings, while rows have to go."""

_SOON_S = 5.0
_OF_LISTING = 4
"""Between listings that found nothing to remove but what is kept: seconds at least, and how many
times what a listing takes, as nobody saves anything meanwhile."""

_STEP_S = 0.2
_WARN_S = 60.0
HEADROOM = 16
"""This fraction of the capacity is kept free."""


@dataclass(slots=True)
class _Freeing:
    """One step of the evictor: its end, and what it has removed."""

    until: float
    places: list[Place] = field(default_factory=list)
    nbytes: int = 0
    wa: int = 0


class Evictor:
    """Evicts rows of a root, if this process is the root's evictor.

    Args:
        wa_share: WA bytes at most, as a share of the capacity; None for no limit.
        clock: seconds that never go back; ``now`` gives the time of day, as uses of rows do.
        tenant_quota: bytes that no tenant loses to others; None if whose rows they are is nothing
            to go by.
    """

    def __init__(
        self,
        accounts: Accounts,
        wa_share: float | None,
        clock: Callable[[], float],
        now: Callable[[], float],
        tenant_quota: int | None = None,
    ) -> None:
        self._accounts, self._wa_share = accounts, wa_share
        self._clock, self._now = clock, now
        self._quota = None if tenant_quota is None else TenantQuota(tenant_quota)
        self._lock: int | None = None
        self._tree: RowTree | None = None
        self._listed_at = self._warned_at = float("-inf")
        self._fresh_s = _SOON_S
        self._num_failed = 0
        self._has_met_gone = False
        self.evicted_nbytes = self.num_evicted = 0

    @property
    def is_ours(self) -> bool:
        """Whether this process evicts."""
        return self._lock is not None

    def evict_rows(self, shelf: Shelf) -> list[Place]:
        """Free what is missing, for a fifth of a second at most.  Returns the rows removed.

        Raises:
            StoreError: the accounts or the listing fail.  A row that cannot be removed is skipped
                instead.
        """
        if not self._is_evictor():
            return []
        self._learn()
        usage = self._accounts.usage()
        is_full = self._missing(usage) > 0 or self._wa_excess(usage) > 0
        # With quotas the tree is made at once: it says what each tenant holds.
        if not usage.is_known or not (is_full or (self._quota and self._tree is None)):
            return []
        now = self._clock()
        if self._tree is None or self._is_due(self._tree, now):
            self._tree = self._tree_of(self._accounts.list_rows(shelf))
            # Its end: one that takes long would never be fresh enough to remove what is kept.
            self._listed_at = self._clock()
            self._fresh_s = min(max(_SOON_S, _OF_LISTING * (self._listed_at - now)), LISTING_S)
            usage = self._accounts.usage()
        done, tree = _Freeing(self._clock() + _STEP_S), self._tree
        wa_excess, missing = self._wa_excess(usage), self._missing(usage)
        try:
            self._free(shelf, tree, done, lambda: wa_excess - done.wa, is_wa=True)
            self._free(shelf, tree, done, lambda: missing - done.nbytes)
        finally:
            self.evicted_nbytes += done.nbytes
            self.num_evicted += len(done.places)
        return done.places

    def _tree_of(self, rows: list[StoredRow]) -> RowTree:
        now = self._now()
        return RowTree((row.believed(now) for row in rows), by_tenant=self._quota is not None)

    def bytes_by_label(self) -> dict[str, int]:
        """Bytes of rows by tenant; none without quotas, or where another process evicts."""
        if self._quota is None or self._tree is None:
            return {}
        return self._quota.bytes_by_label(self._tree.held_bytes())

    def close(self) -> None:
        """Let another process evict."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._tree = None

    def take_met_gone(self) -> bool:
        """Whether a row to be evicted was gone already, since the last call: a recount is due."""
        met, self._has_met_gone = self._has_met_gone, False
        return met

    def _is_evictor(self) -> bool:
        """Whether this process is the evictor; it becomes so if no other is."""
        # A lock of a file that was removed excludes no other process.
        if self._lock is not None and not self._accounts.is_evictor(self._lock):
            self.close()
        if self._lock is None:
            self._lock = self._accounts.try_evictor()
        return self._lock is not None

    def _learn(self) -> None:
        """Add new rows to the tree; before the first listing there is none."""
        for row in self._accounts.take_news():
            if self._tree is not None:
                self._tree.add_row(row)

    def _is_due(self, tree: RowTree, now: float) -> bool:
        pause_s = self._fresh_s if tree.victim() is None else LISTING_S
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
        """Remove victims until nothing is left to free; one that cannot be removed is skipped."""
        kind = RowKind.WA if is_wa else None
        kept = self._kept(tree, kind, left())
        while left() > 0 and self._clock() < done.until:
            held = tree.held_bytes(kind)
            place = tree.victim(kind, None if kept is None else tenants_above(held, kept))
            if place is None or not self._may_go(tree, place):
                return
            try:
                used_at = shelf.used_at(*place)
                if used_at is not None and believed_use(used_at, self._now()) > tree.last_use(
                    place
                ):
                    tree.note_use(place, used_at)
                    continue
                nbytes = self._accounts.evict_row(shelf, *place)
                if nbytes is None:
                    self._learn()
                    continue
            except StoreError as error:
                tree.skip_row(place)
                self._failed(place, error)
                continue
            tree.drop_row(place)
            # No bytes: another process has removed the row, and the count still has it.
            self._has_met_gone = self._has_met_gone or not nbytes
            done.places.append(place)
            done.nbytes += nbytes
            done.wa += nbytes if place[1].kind is RowKind.WA else 0

    def _may_go(self, tree: RowTree, place: Place) -> bool:
        """Whether a victim may go: a kept one only by a listing that is fresh."""
        # A promise may have ended since the listing, and its rows go before others that are kept.
        if tree.last_use(place) <= self._now() or self._clock() - self._listed_at < self._fresh_s:
            return True
        self._listed_at = float("-inf")
        return False

    def _kept(self, tree: RowTree, kind: RowKind | None, freed: int) -> int | None:
        """Bytes that each tenant keeps while so many are freed; None without a quota."""
        if self._quota is None:
            return None
        return self._quota.kept_by_each(tree.held_bytes(kind), freed)

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


_RECOUNT_S = 600.0
_RECOUNT_SOON_S = 60.0
"""Until the recount after one that followed lost accounts: parts under way are over then."""
_LOOK_S = 5.0
"""Between checks for dead writers, a count that cannot be read, and replaced folders."""
LEAST_ROWS = 4
"""The least allowance, in rows of each kind."""


class RootBudget:
    """One engine's share of a root's bytes, on the keeper's thread.

    Args:
        writer: the engine's name among those on the root.
        each_nbytes: bytes of a row of each kind, together.
        clock: seconds that never go back; ``now`` gives the time of day, for uses of rows.
    """

    def __init__(
        self,
        settings: StoreSettings,
        writer: str,
        each_nbytes: int,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._settings, self._writer = settings, writer
        self._clock, self._now = clock, now
        self._allowance = Allowance(LEAST_ROWS * each_nbytes)
        self._accounts: Accounts | None = None
        self._evictor: Evictor | None = None
        self._count_at = self._looked_at = float("-inf")
        self._is_wrong = False
        self._folders: dict[str, FolderId | None] = {}
        self._listing: list[StoredRow] | None = None

    @property
    def room(self) -> AmountBox:
        """Bytes that may be written; the engine's thread takes from it."""
        return self._allowance.room

    def open_accounts(self, shelf: Shelf) -> None:
        """Open the root's accounts."""
        settings = self._settings
        if self._accounts is None:
            self._accounts = Accounts(
                settings.root, self._writer, settings.capacity, lost=self._lost
            )
            self._evictor = Evictor(
                self._accounts,
                settings.wa_share,
                self._clock,
                self._now,
                settings.tenant_quota,
            )
        self.make_room(shelf, "")

    def make_room(self, shelf: Shelf, namespace: str) -> list[RowName]:
        """Recount if it is due, evict, top up.  Returns the evicted rows of ``namespace``."""
        accounts, evictor = self._opened()
        self._recount(accounts, shelf, namespace)
        gone = evictor.evict_rows(shelf)
        self._is_wrong = evictor.take_met_gone() or self._is_wrong
        self._allowance.top_up(accounts)
        return [name for where, name in gone if where == namespace]

    def _recount(self, accounts: Accounts, shelf: Shelf, namespace: str) -> None:
        """Recount every ten minutes, and when the count is known to be wrong."""
        now = self._clock()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        is_replaced = self._is_replaced(namespace)
        is_wrong = accounts.is_stale() or self._is_wrong or is_replaced
        if now < self._count_at and not is_wrong:
            return
        self._count_at = now + (_RECOUNT_SOON_S if self._is_wrong else _RECOUNT_S)
        self._listing = accounts.recount(shelf).rows
        self._is_wrong = False

    def _is_replaced(self, namespace: str) -> bool:
        """Whether a folder of rows is gone since the last call, or may be another one."""
        # A new namespace changes it as well: that is rare, and costs a recount.
        top = os.path.join(self._settings.root, "rows")
        paths = [top, os.path.join(top, namespace)] if namespace else [top]
        before, self._folders = self._folders, {path: folder_id(path) for path in paths}
        return any(
            seen is not None and self._folders.get(path, seen) != seen
            for path, seen in before.items()
        )

    def _lost(self, nbytes: int) -> None:
        """Note that the accounts were removed, and with them so much of our reserve."""
        self._allowance.lose(nbytes)
        self._is_wrong, self._looked_at = True, float("-inf")

    def take_listing(self) -> list[StoredRow] | None:
        """The rows of all namespaces that the last recount found, once."""
        listing, self._listing = self._listing, None
        return listing

    def commit_row(self, shelf: Shelf, part: StoredPart, namespace: str, name: RowName) -> bool:
        """Commit a part of taken bytes; False if the row was there: the bytes stay taken then."""
        row = StoredRow(namespace, name, part.nbytes, self._now())
        return self._opened()[0].commit_row(shelf, part, row)

    def release_bytes(self, nbytes: int) -> None:
        """Return taken bytes that no row has used."""
        self._allowance.give_back(nbytes)

    def remove_damaged(self, shelf: Shelf, namespace: str, name: RowName) -> int:
        """Remove a damaged row.  Returns its bytes."""
        return self._opened()[0].remove_row(shelf, namespace, name)

    def keep_limits(self) -> PromiseLimits | None:
        """The bounds of this engine's promises, in bytes; None if it keeps nothing.

        Those of all engines on the root together are within the share of the capacity.
        """
        shares, quota = self._settings.keep, self._settings.tenant_quota
        if shares is None:
            return None
        usage = self._opened()[0].usage()
        limits = shares.limits_of(usage.capacity // usage.num_writers)
        if quota is None:
            return limits
        # Rows above a tenant's quota are evicted before those of others, whatever is kept.
        return replace(limits, tenant_size=min(limits.tenant_size, quota // usage.num_writers))

    def usage_gauges(self) -> dict[str, int]:
        """Gauges for metrics, in bytes; by tenant where this process evicts by tenant."""
        accounts, evictor = self._opened()
        usage = accounts.usage()
        by_tenant = evictor.bytes_by_label()
        return {
            "store_capacity_bytes": usage.capacity,
            "store_committed_bytes": usage.committed,
            "store_window_bytes": usage.wa,
            "store_reserved_bytes": usage.reserved,
            **{f"store_tenant_bytes/{label}": nbytes for label, nbytes in by_tenant.items()},
        }

    def take_evicted(self) -> tuple[int, int]:
        """Rows of any namespace, and their bytes, evicted since the last call."""
        evictor = self._opened()[1]
        taken = evictor.num_evicted, evictor.evicted_nbytes
        evictor.num_evicted = evictor.evicted_nbytes = 0
        return taken

    def close(self) -> None:
        """Close the root's accounts; rows stay."""
        if self._evictor is not None:
            self._evictor.close()
        if self._accounts is not None:
            self._accounts.close()

    def _opened(self) -> tuple[Accounts, Evictor]:
        assert self._accounts is not None
        assert self._evictor is not None
        return self._accounts, self._evictor
