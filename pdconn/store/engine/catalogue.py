"""Rows that an engine knows to be there, in memory, so that most look-ups need no shelf.

It may be wrong both ways: another engine has saved rows since it was listed, or evicted some.
Rows not known are asked of the shelf, and rows that are gone are found out when they are read.
Rows whose bytes were damaged are not offered again until they were saved anew; rows that were
missing when they should have been read are not offered for a minute.

Used by several threads: each method is one operation on a dict, or takes the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from pdconn.store.format.names import RowKind, RowName

_MISSING_S = 60.0


class Catalogue:
    """Keys of the rows of one namespace, by kind."""

    def __init__(self) -> None:
        self._known: dict[RowKind, dict[bytes, RowName]] = {kind: {} for kind in RowKind}
        self._not_offered: dict[tuple[RowKind, bytes], float] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._known.values())

    def has(self, kind: RowKind, key: bytes) -> bool:
        """Whether the row is known to be there."""
        return key in self._known[kind]

    def add(self, rows: Iterable[RowName]) -> None:
        """The rows are there: they were listed, found or committed."""
        for row in rows:
            self._known[row.kind][row.key] = row

    def listed(self, rows: Iterable[RowName]) -> list[RowName]:
        """These rows are there and no others; those that were known and are gone."""
        known = self._known
        found: dict[RowKind, dict[bytes, RowName]] = {kind: {} for kind in RowKind}
        for row in rows:
            found[row.kind][row.key] = row
        self._known = found
        return [
            row
            for kind in RowKind
            for key, row in list(known[kind].items())
            if key not in found[kind]
        ]

    def saved(self, row: RowName) -> None:
        """We committed the row ourselves: whatever was wrong with it is over."""
        self._known[row.kind][row.key] = row
        with self._lock:
            self._not_offered.pop((row.kind, row.key), None)

    def removed(self, rows: Iterable[RowName]) -> None:
        """The rows are gone."""
        for row in rows:
            self._known[row.kind].pop(row.key, None)

    def failed(self, rows: Iterable[RowName], now: float, *, damaged: bool) -> None:
        """The rows could not be read: do not offer them again."""
        until = float("inf") if damaged else now + _MISSING_S
        with self._lock:
            for row in rows:
                self._known[row.kind].pop(row.key, None)
                self._not_offered[row.kind, row.key] = until

    def is_offered(self, kind: RowKind, key: bytes, now: float) -> bool:
        """Whether the row may be promised to a request."""
        if not self._not_offered:
            return True
        with self._lock:
            until = self._not_offered.get((kind, key))
            if until is not None and until <= now:
                del self._not_offered[kind, key]
                return True
        return until is None

    def clear(self) -> None:
        """No row is known any more."""
        for kind in RowKind:
            self._known[kind] = {}
