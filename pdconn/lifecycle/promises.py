"""Promises: what is kept for sessions whose next turn is to come, blocks of a cache or rows.

::

    KEPT ──replaced, released, expired────────────► OVER
     │                                               ▲
     └──broken──► BROKEN ──replaced, released,───────┘
                           expired, told

*Replaced*: a later turn of the session is kept instead.  *Expired*: the time is up.  *Broken*: what
is kept is given up early, and the session's next answer *tells* why.  A promise that was broken
holds nothing, and is remembered until it is told, or until its time would have been up.  Its
session may come back elsewhere, so each break is also *reported* once, to a router.

A promise is broken for one of these reasons::

    room     a request could not be admitted, or a running one needs blocks, or new rows need room
    share    the tenant's bound or that of all: the oldest promise of the tenant that keeps most
    reset    the cache was reset, or the weights have changed

Every table is bounded, by the size of what is kept and by the number of promises, and a tenant
within his share loses nothing to one that keeps more than he does.

Pure: time is an argument, effects are returned.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar


class Tenanted(Protocol):
    """The key of a session."""

    @property
    def tenant(self) -> str:
        """Whose session it is."""


Key = TypeVar("Key", bound=Tenanted)
Item = TypeVar("Item", bound=Hashable)
"""What is kept: the number of a block, or the name of a row."""


class PromiseState(StrEnum):
    """The state of a promise, as in the diagram above."""

    KEPT = "kept"
    BROKEN = "broken"
    OVER = "over"


TRANSITIONS: dict[tuple[PromiseState, str], PromiseState] = {
    (PromiseState.KEPT, "replaced"): PromiseState.OVER,
    (PromiseState.KEPT, "released"): PromiseState.OVER,
    (PromiseState.KEPT, "expired"): PromiseState.OVER,
    (PromiseState.KEPT, "broken"): PromiseState.BROKEN,
    (PromiseState.BROKEN, "replaced"): PromiseState.OVER,
    (PromiseState.BROKEN, "released"): PromiseState.OVER,
    (PromiseState.BROKEN, "expired"): PromiseState.OVER,
    (PromiseState.BROKEN, "told"): PromiseState.OVER,
}
"""All transitions of a promise; any other event leaves the state as it is."""


class BreakReason(StrEnum):
    """Why a promise was broken."""

    ROOM = "room"
    SHARE = "share"
    RESET = "reset"


_MOST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class KeepShares:
    """The setting ``keep``, of an engine's blocks or of a store's capacity.

    Attributes:
        share: that all promises may keep.
        tenant_share: that those of one tenant may keep.
        seconds: the longest promise.
    """

    share: float = 0.5
    tenant_share: float = 0.5
    seconds: float = 3600.0

    @classmethod
    def from_setting(cls, value: Any, of: str) -> KeepShares | None:
        """From what a user wrote; None where nothing is kept.

        Args:
            of: what shares are of, for errors.

        Raises:
            ValueError: with what was expected.
        """
        expected = 'true, false, or like {"share": 0.5, "tenant_share": 0.25, "seconds": 3600}'
        if isinstance(value, bool):
            return cls() if value else None
        if not isinstance(value, dict) or not set(value) <= {"share", "tenant_share", "seconds"}:
            raise ValueError(expected)
        given = cls(**value)
        for one in (given.share, given.tenant_share):
            if not _is_number(one) or not 0 < one <= _MOST_SHARE:
                raise ValueError(f"{expected}, with shares above 0 and at most 0.9 of {of}")
        if not _is_number(given.seconds) or not 0 < given.seconds < 86_400:
            raise ValueError(f"{expected}, with seconds above 0 and below 86400")
        share = float(given.share)
        return cls(share, min(share, float(given.tenant_share)), float(given.seconds))

    def cut_to_s(self, asked_s: float) -> float | None:
        """The seconds of a promise for which more are asked; None if they are not too many."""
        return self.seconds if asked_s > self.seconds else None

    def limits_of(self, total: int) -> PromiseLimits:
        """The bounds, where there is so much that could be kept."""
        return PromiseLimits(int(self.share * total), int(self.tenant_share * total), self.seconds)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class PromiseLimits:
    """Bounds of promises.

    Attributes:
        size: of what may be kept, in blocks or bytes; an item that several promises keep counts
            once.
        tenant_size: of what may be kept for one tenant.
        seconds: the longest promise.
        most: promises, with those that were broken and are to be told.
    """

    size: int
    tenant_size: int
    seconds: float
    most: int = 1024


@dataclass(frozen=True, slots=True)
class Pin(Generic[Item]):
    """Pin these items for a promise; before others are unpinned, which may be the same."""

    number: int
    items: tuple[Item, ...]
    until: float


@dataclass(frozen=True, slots=True)
class Unpin:
    """Unpin what is pinned for a promise."""

    number: int


@dataclass(frozen=True, slots=True)
class PromiseBroken:
    """A promise was broken."""

    why: BreakReason


@dataclass(frozen=True, slots=True)
class KeepRefused:
    """Nothing is kept: its size is above the bound.  An earlier promise stays."""

    size: int
    most: int


PromiseEffect = Pin[Item] | Unpin | PromiseBroken | KeepRefused


@dataclass(slots=True)
class Promise(Generic[Item]):
    """One promise.

    Attributes:
        number: identifies its pins.
        items: that are kept; none once it is broken.
        until: when its time is up, in seconds.
        why: it was broken.
        is_used: a later turn of its session has come.
    """

    number: int
    items: tuple[Item, ...]
    until: float
    state: PromiseState = PromiseState.KEPT
    why: BreakReason | None = None
    is_used: bool = False

    def enter(self, event: str) -> bool:
        """Note an event; returns whether it has changed the state."""
        entered = TRANSITIONS.get((self.state, event))
        if entered is None:
            return False
        self.state = entered
        return True


class _KeptItems(Generic[Item]):
    """Items that promises keep, and their size; an item that several keep counts once."""

    def __init__(self, size_of: Callable[[Item], int]) -> None:
        self._size_of = size_of
        self.counts: Counter[Item] = Counter()
        self.size = 0

    def add_items(self, items: Iterable[Item]) -> None:
        for item in items:
            self.counts[item] += 1
            if self.counts[item] == 1:
                self.size += self._size_of(item)

    def remove_items(self, items: Iterable[Item]) -> None:
        for item in items:
            self.counts[item] -= 1
            if not self.counts[item]:
                del self.counts[item]
                self.size -= self._size_of(item)


class Promises(Generic[Key, Item]):
    """The promises of one holder, oldest first.

    Args:
        limits: bounds; may be set anew, and hold from the next promise on.
        size_of: the size of an item; the default counts items.
    """

    def __init__(
        self, limits: PromiseLimits, size_of: Callable[[Item], int] = lambda item: 1
    ) -> None:
        self.limits = limits
        self._size_of = size_of
        self._promises: dict[Key, Promise[Item]] = {}
        self._numbers = 0
        self._due = math.inf  # no promise's time is up before
        self._kept: _KeptItems[Item] = _KeptItems(size_of)
        self._of_tenant: dict[str, _KeptItems[Item]] = {}
        self._unreported: dict[Key, BreakReason] = {}

    def __len__(self) -> int:
        """Promises, with those that are to be told."""
        return len(self._promises)

    def __iter__(self) -> Iterator[tuple[Key, Promise[Item]]]:
        return iter(self._promises.items())

    def __contains__(self, item: Item) -> bool:
        """Whether an item is kept."""
        return item in self._kept.counts

    @property
    def size(self) -> int:
        """Of what is kept; an item that several promises keep counts once."""
        return self._kept.size

    @property
    def num_kept(self) -> int:
        """Promises that hold something."""
        return sum(one.state is PromiseState.KEPT for one in self._promises.values())

    def size_of_tenant(self, tenant: str) -> int:
        """The size of what is kept for a tenant."""
        his = self._of_tenant.get(tenant)
        return 0 if his is None else his.size

    def items_of(self, key: Key) -> tuple[Item, ...]:
        """What is kept for a session."""
        promise = self._promises.get(key)
        return () if promise is None else promise.items

    # Events

    def keep(
        self, key: Key, items: Iterable[Item], seconds: float, now: float
    ) -> list[PromiseEffect[Item]]:
        """Keep what a session's turn leaves, instead of what an earlier turn left.

        Args:
            key: the session.
            items: of all groups, without holes; an earlier promise stays if there are none.
            seconds: above 0; at most those of the limits count.
            now: in seconds.
        """
        effects = self.expire(now)
        wanted = tuple(dict.fromkeys(items))
        most = min(self.limits.tenant_size, self.limits.size)
        if not wanted:
            return effects
        if (size := sum(map(self._size_of, wanted))) > most:
            return [*effects, KeepRefused(size, most)]
        self._numbers += 1
        until = now + min(seconds, self.limits.seconds)
        self._due = min(self._due, until)
        effects.append(Pin(self._numbers, wanted, until))
        effects += self._end(key, "replaced")
        self._unreported.pop(key, None)
        self._promises[key] = promise = Promise(self._numbers, wanted, until)
        self._count(key, promise)
        return effects + self._within_limits(key)

    def use(self, key: Key) -> bool:
        """Note that a later turn has come; returns whether anything is kept for it, once."""
        promise = self._promises.get(key)
        if promise is None or promise.state is not PromiseState.KEPT or promise.is_used:
            return False
        promise.is_used = True
        return True

    def release(self, key: Key) -> list[PromiseEffect[Item]]:
        """Keep nothing for a session any more."""
        return self._end(key, "released")

    def tell(self, key: Key) -> BreakReason | None:
        """Why the session's promise was broken; None if it was not, or was told already."""
        promise = self._promises.get(key)
        if promise is None or promise.state is not PromiseState.BROKEN:
            return None
        self._end(key, "told")
        return promise.why

    def take_unreported(self, most: int) -> list[tuple[Key, BreakReason]]:
        """Breaks that were neither reported nor told yet, the oldest first; each is taken once.

        The sessions are told all the same, should they come back here.
        """
        taken = list(itertools.islice(self._unreported.items(), most))
        for key, _ in taken:
            del self._unreported[key]
        return taken

    def expire(self, now: float) -> list[PromiseEffect[Item]]:
        """End the promises whose time is up."""
        if now < self._due:  # as in nearly every step
            return []
        due = [key for key, one in self._promises.items() if one.until <= now]
        effects = [effect for key in due for effect in self._end(key, "expired")]
        self._due = min((one.until for one in self._promises.values()), default=math.inf)
        return effects

    def make_room(self, size: int, spared: Collection[Key] = ()) -> list[PromiseEffect[Item]]:
        """Break promises, the oldest first, until so much is kept by none any more.

        At least one is broken, if there is one.  Those of ``spared`` sessions come last: their
        turns are here, and would miss what is kept.
        """
        least = self.size - max(1, size)
        kept = [key for key, one in self._promises.items() if one.state is PromiseState.KEPT]
        kept.sort(key=lambda key: key in spared)
        effects: list[PromiseEffect[Item]] = []
        for key in kept:
            if self.size <= least:
                break
            effects += self._break(key, BreakReason.ROOM)
        return effects

    def note_gone(self, items: Iterable[Item]) -> list[PromiseEffect[Item]]:
        """Break the promises that keep any of these items, which are gone all the same."""
        gone = {item for item in items if item in self._kept.counts}
        if not gone:  # nearly always
            return []
        hit = [key for key, one in self._promises.items() if not gone.isdisjoint(one.items)]
        return [effect for key in hit for effect in self._break(key, BreakReason.ROOM)]

    def drop_all(self) -> list[PromiseEffect[Item]]:
        """Break every promise: what is kept is not valid any more."""
        return [e for key in list(self._promises) for e in self._break(key, BreakReason.RESET)]

    # Bounds

    def _within_limits(self, new: Key) -> list[PromiseEffect[Item]]:
        """Break promises until every bound holds; never the new one, which is within each."""
        effects: list[PromiseEffect[Item]] = []
        limits = self.limits
        while self.size_of_tenant(new.tenant) > limits.tenant_size:
            effects += self._break_oldest(new.tenant, new)
        while self.size > limits.size:
            effects += self._break_oldest(self._who_keeps_most(new), new)
        while len(self._promises) > limits.most:
            effects += self._forget_one(new)
        return effects

    def _who_keeps_most(self, new: Key) -> str:
        """The tenant that keeps most, of those with a promise beside the new one."""
        others = {key.tenant for key, one in self._promises.items() if key != new and one.items}
        return max(others, key=lambda tenant: (self.size_of_tenant(tenant), tenant))

    def _break_oldest(self, tenant: str, new: Key) -> list[PromiseEffect[Item]]:
        oldest = next(
            key
            for key, one in self._promises.items()
            if key.tenant == tenant and key != new and one.items
        )
        return self._break(oldest, BreakReason.SHARE)

    def _forget_one(self, new: Key) -> list[PromiseEffect[Item]]:
        """End the oldest promise of the tenant that has most of them; one that is broken first."""
        numbers = Counter(key.tenant for key in self._promises if key != new)
        most = max(numbers, key=lambda tenant: (numbers[tenant], tenant))
        his = [key for key in self._promises if key.tenant == most and key != new]
        broken = (key for key in his if self._promises[key].state is PromiseState.BROKEN)
        key = next(broken, his[0])
        effects = self._break(key, BreakReason.SHARE)
        effects += self._end(key, "expired")
        if effects:  # nothing is left here to tell the session by
            self._owe_report(key, BreakReason.SHARE)
        return effects

    def _owe_report(self, key: Key, why: BreakReason) -> None:
        self._unreported[key] = why
        if len(self._unreported) > self.limits.most:
            # The oldest of those that are not remembered here; promises alone are fewer.
            forgotten = (each for each in self._unreported if each not in self._promises)
            del self._unreported[next(forgotten, key)]

    # Transitions

    def _break(self, key: Key, why: BreakReason) -> list[PromiseEffect[Item]]:
        promise = self._promises[key]
        if not promise.enter("broken"):
            return []
        promise.why = why
        self._owe_report(key, why)
        return [*self._unpin(key, promise), PromiseBroken(why)]

    def _end(self, key: Key, event: str) -> list[PromiseEffect[Item]]:
        promise = self._promises.get(key)
        if promise is None or not promise.enter(event):
            return []
        del self._promises[key]
        self._unreported.pop(key, None)
        return self._unpin(key, promise)

    def _unpin(self, key: Key, promise: Promise[Item]) -> list[PromiseEffect[Item]]:
        """Unpin what a promise keeps, if it has not been done."""
        if not promise.items:
            return []
        his = self._of_tenant[key.tenant]
        for kept in (self._kept, his):
            kept.remove_items(promise.items)
        if not his.counts:
            del self._of_tenant[key.tenant]
        promise.items = ()
        return [Unpin(promise.number)]

    def _count(self, key: Key, promise: Promise[Item]) -> None:
        self._kept.add_items(promise.items)
        his = self._of_tenant.setdefault(key.tenant, _KeptItems(self._size_of))
        his.add_items(promise.items)
