"""Which rows may be evicted, and which first: the rows of a root as trees of prefixes.

::

    FA 0 ── FA 1 ── FA 2 ── FA 3        a *leaf* has no FA row after it and no WA row of its own
               └─── FA 2'   └ WA 3      key; WA rows are leaves

Leaves are evicted first, the one that was used longest ago before others, so no row loses one that
it needs to be reached; of one boundary the WA row goes before the FA row.  A prompt's rows are of
one tenant, so this holds also where rows of some tenants alone are taken.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.interface import StoredRow

Place = tuple[str, RowName]
_Key = tuple[str, bytes]
_Order = tuple[float, int, bool]
_Heap = tuple[bytes, RowKind]


@dataclass(slots=True)
class _KeptRow:
    nbytes: int
    used_at: float


class RowTree:
    """Rows of all namespaces of a root.  One thread.

    Args:
        by_tenant: a victim may be asked of some tenants alone, at the cost of a look at each.
    """

    # Candidates of each kind (and tenant) are in a heap, whose entries may be stale: one that is
    # not a leaf's present place in the order is replaced or dropped when it is the first.

    def __init__(self, rows: Iterable[StoredRow] = (), *, by_tenant: bool = False) -> None:
        self._by_tenant = by_tenant
        self._held: dict[bytes, int] = {}
        self._held_wa: dict[bytes, int] = {}
        self._rows: dict[Place, _KeptRow] = {}
        self._after: Counter[_Key] = Counter()
        self._full: dict[_Key, Place] = {}
        self._windows: Counter[_Key] = Counter()
        self._passed: set[Place] = set()
        self._heaps: dict[_Heap, list[tuple[_Order, Place]]] = defaultdict(list)
        for row in rows:
            self._insert(row)
        for place in self._rows:
            self._offer(place)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, place: Place) -> bool:
        return place in self._rows

    def last_use(self, place: Place) -> float:
        """The last known use of a row of the tree."""
        return self._rows[place].used_at

    def add_row(self, row: StoredRow) -> None:
        """Add a row."""
        place = row.namespace, row.name
        if place in self._rows:
            self.note_use(place, row.used_at)
        else:
            self._insert(row)
            self._offer(place)

    def note_use(self, place: Place, used_at: float) -> None:
        """Note that a row was used; a time before the last known one is ignored."""
        kept = self._rows.get(place)
        if kept is not None and used_at > kept.used_at:
            kept.used_at = used_at

    def drop_row(self, place: Place) -> None:
        """Drop a row that is gone."""
        dropped = self._rows.pop(place, None)
        if dropped is None:
            return
        self._passed.discard(place)
        namespace, name = place
        self._count_bytes(name, -dropped.nbytes)
        key = namespace, name.key
        if name.kind is RowKind.WA:
            _count_down(self._windows, key)
            before = self._full.get(key)
        else:
            self._full.pop(key, None)
            before = self._full.get((namespace, name.parent))
            _count_down(self._after, (namespace, name.parent))
        if before is not None:
            self._offer(before)

    def skip_row(self, place: Place) -> None:
        """Note that a row cannot be removed: it is not evicted until another tree is made."""
        self._passed.add(place)

    def held_bytes(self, kind: RowKind | None = None) -> Mapping[bytes, int]:
        """Bytes of rows by tenant: of all, or of windows alone for WA; none where it is 0."""
        return self._held_wa if kind is RowKind.WA else self._held

    def victim(
        self, kind: RowKind | None = None, tenants: Collection[bytes] | None = None
    ) -> Place | None:
        """The leaf to evict next, or the next of one kind, of some tenants; None without one."""
        kinds = list(RowKind) if kind is None else [kind]
        among: Collection[bytes] = [b""]
        if self._by_tenant:
            among = self._held if tenants is None else tenants
        tops = [top for of in among for kind in kinds if (top := self._top((of, kind))) is not None]
        return min(tops)[1] if tops else None

    def _top(self, which: _Heap) -> tuple[_Order, Place] | None:
        heap = self._heaps.get(which, [])
        while heap:
            order, place = heap[0]
            if place not in self._rows or place in self._passed or not self._is_leaf(place):
                heapq.heappop(heap)
            elif (now := self._order(place)) != order:
                heapq.heapreplace(heap, (now, place))
            else:
                return heap[0]
        return None

    def _insert(self, row: StoredRow) -> None:
        place = row.namespace, row.name
        self._rows[place] = _KeptRow(row.nbytes, row.used_at)
        self._count_bytes(row.name, row.nbytes)
        key = row.namespace, row.name.key
        if row.name.kind is RowKind.WA:
            self._windows[key] += 1
        else:
            self._full[key] = place
            self._after[row.namespace, row.name.parent] += 1

    def _offer(self, place: Place) -> None:
        if self._is_leaf(place):
            name = place[1]
            which = name.tenant if self._by_tenant else b"", name.kind
            heapq.heappush(self._heaps[which], (self._order(place), place))

    def _count_bytes(self, name: RowName, nbytes: int) -> None:
        counts = [self._held, self._held_wa] if name.kind is RowKind.WA else [self._held]
        for held in counts:
            held[name.tenant] = held.get(name.tenant, 0) + nbytes
            if not held[name.tenant]:
                del held[name.tenant]
        if self._by_tenant and name.tenant not in self._held:
            for kind in RowKind:
                self._heaps.pop((name.tenant, kind), None)

    def _is_leaf(self, place: Place) -> bool:
        namespace, name = place
        if name.kind is RowKind.WA:
            return True
        key = namespace, name.key
        return key not in self._after and key not in self._windows

    def _order(self, place: Place) -> _Order:
        """By use; at one time from the end of a prefix, WA first.  Never goes down."""
        _, name = place
        return self._rows[place].used_at, -name.index, name.kind is RowKind.FA


def _count_down(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


_TOUCH_S = 60.0
"""The least time between two notes of a row's use."""
_MOST_TOUCHED = 1 << 17


class TouchedRows:
    """Which uses of rows are noted: one a minute of each row."""

    def __init__(self) -> None:
        self._touched: dict[RowName, float] = {}

    def __contains__(self, row: RowName) -> bool:
        return row in self._touched

    def last_use(self, row: RowName) -> float:
        """When a use of the row was to be noted last; minus infinity if none was, or long ago."""
        return self._touched.get(row, -math.inf)

    def take_due(self, rows: Sequence[RowName], now: float) -> list[RowName]:
        """Those of ``rows`` whose use is to be noted now."""
        touched = self._touched
        due = [row for row in rows if now - touched.get(row, -_TOUCH_S) >= _TOUCH_S]
        if len(touched) > _MOST_TOUCHED:
            touched.clear()
        touched.update(dict.fromkeys(due, now))
        return due
