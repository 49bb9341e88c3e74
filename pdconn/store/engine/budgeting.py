"""The byte budget of a root as the keeper uses it: accounts, allowance and evictor in one."""

from __future__ import annotations

import os
from collections.abc import Callable

from pdconn.store.budget.accounts import Accounts
from pdconn.store.budget.allowance import Allowance
from pdconn.store.budget.evictions import Evictor
from pdconn.store.format.footer import row_nbytes
from pdconn.store.format.layout import StoreLayout
from pdconn.store.format.names import RowName
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.base import Shelf, StoredPart, StoredRow
from pdconn.store.shelf.folders import FolderId, folder_id
from pdconn.threads import AmountBox

_RECOUNT_S = 600.0
_SOON_S = 60.0
"""A recount after one that followed lost accounts: parts that were on their way are over then."""
_LOOK_S = 5.0
"""How often it is looked for dead writers, a count that cannot be read, and folders replaced."""
_ROWS = 4
"""Rows of each kind that an allowance is good for at least."""


class RootBudget:
    """One engine's share of a root's bytes, on the keeper's thread.

    Args:
        writer: the engine's name among those on the root.
        clock: seconds that never go back; ``now`` gives the time of day, for uses of rows.
    """

    def __init__(
        self,
        settings: StoreSettings,
        writer: str,
        layout: StoreLayout,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._settings, self._writer = settings, writer
        self._clock, self._now = clock, now
        each = row_nbytes(layout.fa) + (0 if layout.wa is None else row_nbytes(layout.wa))
        self._allowance = Allowance(_ROWS * each)
        self._accounts: Accounts | None = None
        self._evictor: Evictor | None = None
        self._count_at = self._looked_at = float("-inf")
        self._is_wrong = False
        self._folders: dict[str, FolderId | None] = {}
        self._listing: list[StoredRow] | None = None

    @property
    def room(self) -> AmountBox:
        """Bytes that may be written; the engine's thread takes of it."""
        return self._allowance.room

    def open(self, shelf: Shelf) -> None:
        """Take part in the root's accounts."""
        settings = self._settings
        if self._accounts is None:
            self._accounts = Accounts(
                settings.root, self._writer, settings.capacity, lost=self._lost
            )
            self._evictor = Evictor(self._accounts, settings.wa_share, self._clock)
        self.step(shelf, "")

    def step(self, shelf: Shelf, namespace: str) -> list[RowName]:
        """Recount if it is due, evict, top up; rows of ``namespace`` that were evicted."""
        accounts, evictor = self._opened()
        self._recount(accounts, shelf, namespace)
        gone = evictor.step(shelf)
        self._is_wrong = evictor.take_met_gone() or self._is_wrong
        self._allowance.top_up(accounts)
        return [name for where, name in gone if where == namespace]

    def _recount(self, accounts: Accounts, shelf: Shelf, namespace: str) -> None:
        """Recount now and then, and where a look shows that the count is wrong."""
        now = self._clock()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        is_replaced = self._is_replaced(namespace)
        is_wrong = accounts.is_stale() or self._is_wrong or is_replaced
        if now < self._count_at and not is_wrong:
            return
        self._count_at = now + (_SOON_S if self._is_wrong else _RECOUNT_S)
        self._listing = accounts.recount(shelf).rows
        self._is_wrong = False

    def _is_replaced(self, namespace: str) -> bool:
        """Whether a folder of rows that was there at the last look is gone, or may be another one.

        It may also be that a namespace was made in it, which is rare enough to count anew then.
        """
        top = os.path.join(self._settings.root, "rows")
        paths = [top, os.path.join(top, namespace)] if namespace else [top]
        before, self._folders = self._folders, {path: folder_id(path) for path in paths}
        return any(
            seen is not None and self._folders.get(path, seen) != seen
            for path, seen in before.items()
        )

    def _lost(self, nbytes: int) -> None:
        """The accounts were removed, and with them so much of our reserve."""
        self._allowance.lose(nbytes)
        self._is_wrong, self._looked_at = True, float("-inf")

    def take_listing(self) -> list[StoredRow] | None:
        """The rows of all namespaces as the last recount found them, once."""
        listing, self._listing = self._listing, None
        return listing

    def commit(self, shelf: Shelf, part: StoredPart, namespace: str, name: RowName) -> bool:
        """Commit a part of taken bytes; False, and they stay taken, if the row was there."""
        row = StoredRow(namespace, name, part.nbytes, self._now())
        return self._opened()[0].commit(shelf, part, row)

    def release(self, nbytes: int) -> None:
        """Taken bytes were not written, or the row was there already."""
        self._allowance.give_back(nbytes)

    def remove(self, shelf: Shelf, namespace: str, name: RowName) -> int:
        """Remove a damaged row; its bytes."""
        return self._opened()[0].remove(shelf, namespace, name)

    def usage(self) -> dict[str, int]:
        """Gauges for metrics, in bytes."""
        usage = self._opened()[0].usage()
        return {
            "store_capacity_bytes": usage.capacity,
            "store_committed_bytes": usage.committed,
            "store_window_bytes": usage.wa,
            "store_reserved_bytes": usage.reserved,
        }

    def take_evicted(self) -> tuple[int, int]:
        """Rows of any namespace, and their bytes, evicted since the last call."""
        evictor = self._opened()[1]
        taken = evictor.num_evicted, evictor.evicted_nbytes
        evictor.num_evicted = evictor.evicted_nbytes = 0
        return taken

    def close(self) -> None:
        """Leave the root's accounts; rows that are there stay."""
        if self._evictor is not None:
            self._evictor.close()
        if self._accounts is not None:
            self._accounts.close()

    def _opened(self) -> tuple[Accounts, Evictor]:
        assert self._accounts is not None
        assert self._evictor is not None
        return self._accounts, self._evictor
