"""Which rows may be evicted, and which first: the rows of a root as trees of prefixes.

::

    FA 0 ── FA 1 ── FA 2 ── FA 3        a *leaf* has no FA row after it and no WA row of its own
               └─── FA 2'   └ WA 3      key; WA rows are leaves

Leaves go first, the one that was used longest ago before others, so no row ever loses one that
it needs to be reached; of one boundary the WA row goes before the FA row.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdconn.store.format.names import RowKind, RowName
from pdconn.store.shelf.base import StoredRow

Place = tuple[str, RowName]


@dataclass(slots=True)
class _KeptRow:
    nbytes: int
    used_at: float


class RowTree:
    """Rows of all namespaces of a root.  One thread."""

    def __init__(self) -> None:
        self._rows: dict[Place, _KeptRow] = {}
        self._after: Counter[tuple[str, bytes]] = Counter()
        self._windows: set[tuple[str, bytes]] = set()
        self._full: dict[tuple[str, bytes], Place] = {}
        self._heap: list[tuple[float, int, int, str, RowName]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, place: Place) -> bool:
        return place in self._rows

    def add(self, rows: Iterable[StoredRow]) -> None:
        """Rows are there."""
        for row in rows:
            place = row.namespace, row.name
            if place in self._rows:
                self._rows[place].used_at = max(row.used_at, self._rows[place].used_at)
                continue
            self._rows[place] = _KeptRow(row.nbytes, row.used_at)
            if row.name.kind is RowKind.WA:
                self._windows.add((row.namespace, row.name.key))
            else:
                self._after[row.namespace, row.name.parent] += 1
                self._full[row.namespace, row.name.key] = place
            self._offer(place)

    def touched(self, places: Iterable[Place], now: float) -> None:
        """Rows were used."""
        for place in places:
            if place in self._rows:
                self._rows[place].used_at = now

    def removed(self, place: Place) -> None:
        """A row is gone."""
        if self._rows.pop(place, None) is None:
            return
        namespace, name = place
        if name.kind is RowKind.WA:
            self._windows.discard((namespace, name.key))
            freed = self._full.get((namespace, name.key))
        else:
            del self._full[namespace, name.key]
            self._after[namespace, name.parent] -= 1
            freed = self._full.get((namespace, name.parent))
        if freed is not None:
            self._offer(freed)

    def victims(self, kind: RowKind | None = None) -> Iterator[Place]:
        """Leaves, the next to go first; rows that the caller removes meanwhile free others.

        ``kind``: of that one alone.
        """
        passed = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                place = entry[3], entry[4]
                kept = self._rows.get(place)
                if kept is None or not self._is_leaf(place):
                    continue
                if kept.used_at > entry[0]:
                    self._offer(place)
                    continue
                passed.append(entry)
                if kind is None or place[1].kind is kind:
                    yield place
        finally:
            for entry in passed:
                if (entry[3], entry[4]) in self._rows:
                    heapq.heappush(self._heap, entry)

    def keep(self, found: Iterable[StoredRow]) -> None:
        """A new listing: rows that are not in it are gone."""
        listed = list(found)
        there = {(row.namespace, row.name) for row in listed}
        for place in [place for place in self._rows if place not in there]:
            self.removed(place)
        self.add(listed)

    def _is_leaf(self, place: Place) -> bool:
        namespace, name = place
        if name.kind is RowKind.WA:
            return True
        key = namespace, name.key
        return not self._after[key] and key not in self._windows

    def _offer(self, place: Place) -> None:
        kept = self._rows.get(place)
        if kept is not None and self._is_leaf(place):
            namespace, name = place
            is_fa = int(name.kind is RowKind.FA)
            heapq.heappush(self._heap, (kept.used_at, -name.index, is_fa, namespace, name))
