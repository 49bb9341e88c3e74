"""The order of what moves: which class goes first, and which tenant's within a class.  Pure.

::

    class       what                                        before others of its class
    PULL        pulls that a request waits for, and copies  the tenant that was served
                of loads that have their blocks             the fewest bytes
    LOAD        rows that a request waits for
    PREFETCH    pulls and loads of prefetches
    SAVE        rows that are saved

A class waits while a more urgent one does, but for :data:`MOST_WAIT_S` at most: then it gets one
piece (a chunk, a row), and waits again.  So nothing starves, and the pieces are counted.

Within a class tenants take turns by bytes, as in start-time fair queueing (Goyal, Vin and Cheng,
SIGCOMM 1996): each has a level, the bytes that it was served, and the lowest is served.  One that
comes, or comes back, starts at the level that is being served, so that it is owed nothing for the
time in which it asked for nothing.  Pulls have an order of their own
(:mod:`pdconn.puller.fair_queue`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

T = TypeVar("T")


class Urgency(IntEnum):
    """The classes, the most urgent first."""

    PULL = 0
    LOAD = 1
    PREFETCH = 2
    SAVE = 3


MOST_WAIT_S = {
    Urgency.PULL: 0.0,
    Urgency.LOAD: 1.0,
    Urgency.PREFETCH: 1.0,
    Urgency.SAVE: 0.05,
}
"""How long a piece of each class waits for more urgent ones.  A chunk of a prefetch's pull takes a
link a tenth of a second.  A save's is short: its blocks are pinned meanwhile."""

MOST_LEVELS = 1024
"""Tenants without anything that waits of which a queue remembers the level."""


@dataclass(frozen=True, slots=True)
class TurnKey:
    """What an item is served by: its class, its tenant's label, and its size in bytes."""

    urgency: Urgency
    tenant: bytes = b""
    nbytes: int = 0


class ClassOrder:
    """Decides which class is served next."""

    def __init__(self) -> None:
        self._since: dict[Urgency, float] = {}
        self._num_overdue = 0

    def choose(
        self, waiting: Collection[Urgency], now: float, elsewhere: Urgency | None = None
    ) -> Urgency | None:
        """The class to serve now; None if those that wait have to wait on.

        Args:
            waiting: the classes of which something waits.
            elsewhere: the most urgent class that others move.  Prefetches and saves give way to
                it, and loads do not: they have threads and a device of their own.
        """
        for urgency in [known for known in self._since if known not in waiting]:
            del self._since[urgency]
        first = None
        for urgency in sorted(waiting):
            since = self._since.setdefault(urgency, now)
            if first is None and not _gives_way(urgency, elsewhere):
                first = urgency
            elif now - since >= MOST_WAIT_S[urgency]:
                return urgency
        return first

    def note_served(
        self,
        urgency: Urgency,
        now: float,
        waiting: Collection[Urgency],
        elsewhere: Urgency | None = None,
    ) -> None:
        """Note that a piece of the class is served; the others as of :meth:`choose`."""
        self._since[urgency] = now
        first = min(waiting, default=urgency)
        self._num_overdue += first < urgency or _gives_way(urgency, elsewhere)

    def take_overdue(self) -> int:
        """Pieces served while something more urgent waited, since the last call."""
        taken, self._num_overdue = self._num_overdue, 0
        return taken

    def due_at(self) -> float | None:
        """When the first class has waited as long as it may; None if none waits."""
        due = (since + MOST_WAIT_S[urgency] for urgency, since in self._since.items())
        return min(due, default=None)


def _gives_way(urgency: Urgency, elsewhere: Urgency | None) -> bool:
    return elsewhere is not None and urgency > Urgency.LOAD and elsewhere < urgency


class TenantTurns(Generic[T]):
    """Items of one class: in order for each tenant, and the tenants in turn."""

    def __init__(self) -> None:
        self._items: dict[bytes, deque[tuple[T, int]]] = {}
        self._levels: dict[bytes, int] = {}
        self._served = 0

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[T]:
        for items in self._items.values():
            for item, _ in items:
                yield item

    def add_item(self, item: T, tenant: bytes, nbytes: int, *, is_first: bool = False) -> None:
        """Add an item after those of its tenant, or before them."""
        items = self._items.get(tenant)
        if items is None:
            items = self._items[tenant] = deque()
            self._levels[tenant] = max(self._levels.pop(tenant, 0), self._served)
            self._forget_levels()
        (items.appendleft if is_first else items.append)((item, nbytes))

    def first_item(self) -> T:
        """The item to serve next; there must be one."""
        return self._items[self._tenant()][0][0]

    def take_item(self) -> T:
        """Remove the item to serve next; there must be one."""
        tenant = self._tenant()
        items = self._items[tenant]
        item, nbytes = items.popleft()
        self._served = self._levels[tenant]
        self._levels[tenant] += nbytes
        if not items:
            del self._items[tenant]
        return item

    def remove_items(self, is_meant: Callable[[T], bool]) -> list[T]:
        """Remove the matching items; the others keep their order."""
        found = []
        for tenant, items in list(self._items.items()):
            found += [item for item, _ in items if is_meant(item)]
            left = deque(each for each in items if not is_meant(each[0]))
            if left:
                self._items[tenant] = left
            else:
                del self._items[tenant]
        return found

    def _tenant(self) -> bytes:
        return min(self._items, key=self._levels.__getitem__)

    def _forget_levels(self) -> None:
        """Forget levels of tenants without items: the passed ones, and the oldest of too many."""
        if len(self._levels) <= len(self._items) + MOST_LEVELS:
            return
        idle = [tenant for tenant in self._levels if tenant not in self._items]
        passed = [tenant for tenant in idle if self._levels[tenant] <= self._served]
        for tenant in passed or idle[: len(idle) // 2]:
            del self._levels[tenant]


class TurnQueue(Generic[T]):
    """Items of all classes, in the order in which they are to be served.

    Example:
        >>> queue = TurnQueue[str]()
        >>> for name in ("a1", "a2", "b1"):
        ...     queue.add_item(name, TurnKey(Urgency.LOAD, name[:1].encode(), 9))
        >>> queue.add_item("prefetch", TurnKey(Urgency.PREFETCH))
        >>> [queue.take_item(now=0.0) for _ in range(4)]
        ['a1', 'b1', 'a2', 'prefetch']
    """

    def __init__(self) -> None:
        self._classes: dict[Urgency, TenantTurns[T]] = {each: TenantTurns() for each in Urgency}
        self._order = ClassOrder()

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __bool__(self) -> bool:
        return any(self._classes.values())

    def __iter__(self) -> Iterator[T]:
        for items in self._classes.values():
            yield from items

    def take_overdue(self) -> int:
        """Items that were served while more urgent ones waited, since the last call."""
        return self._order.take_overdue()

    def add_item(self, item: T, turn: TurnKey) -> None:
        """Add an item, after those of its tenant and class."""
        self._classes[turn.urgency].add_item(item, turn.tenant, turn.nbytes)

    def add_first(self, items: Iterable[tuple[T, TurnKey]]) -> None:
        """Add items in order, before the others of their tenants and classes."""
        for item, turn in reversed(list(items)):
            self._classes[turn.urgency].add_item(item, turn.tenant, turn.nbytes, is_first=True)

    def take_item(self, now: float, elsewhere: Urgency | None = None) -> T | None:
        """Remove the item to serve at ``now`` seconds; None if there is none, or it has to wait.

        Args:
            elsewhere: as of :meth:`ClassOrder.choose`.
        """
        waiting = self._waiting()
        urgency = self._order.choose(waiting, now, elsewhere)
        if urgency is None:
            return None
        item = self._classes[urgency].take_item()
        self._order.note_served(urgency, now, waiting, elsewhere)
        return item

    def first_item(self, now: float, elsewhere: Urgency | None = None) -> T | None:
        """The item that :meth:`take_item` would remove."""
        urgency = self._order.choose(self._waiting(), now, elsewhere)
        return None if urgency is None else self._classes[urgency].first_item()

    def remove_items(self, is_meant: Callable[[T], bool]) -> list[T]:
        """Remove the matching items; the others keep their order."""
        return [item for each in self._classes.values() for item in each.remove_items(is_meant)]

    def due_at(self) -> float | None:
        """When an item that has to wait may be taken at the latest; None without items."""
        return self._order.due_at() if self else None

    def _waiting(self) -> list[Urgency]:
        return [urgency for urgency, items in self._classes.items() if items]
