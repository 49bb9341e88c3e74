"""Promises of one engine: blocks that are kept for sessions whose next turn is to come.

::

    KEPT ──replaced, released, expired────────────► OVER
     │                                               ▲
     └──broken──► BROKEN ──replaced, released,───────┘
                           expired, told

*Replaced*: a later turn of the session is kept instead.  *Expired*: the time is up.  *Broken*: the
blocks are given up early, and the session's next answer *tells* why.  A promise that was broken
holds no blocks, and is remembered until it is told, or until its time would have been up.

A promise is broken for one of these reasons::

    room     a request could not be admitted, or a running one needs blocks: oldest promise first
    share    the tenant's or the engine's bound: the oldest promise of the tenant that keeps most
    reset    the cache was reset, or the weights have changed

Every table is bounded, by blocks and by their number, and a tenant within his share loses nothing
to one that keeps more than he does.

Pure: time is an argument, effects are returned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar


class Tenanted(Protocol):
    """The key of a session."""

    @property
    def tenant(self) -> str:
        """Whose session it is."""


Key = TypeVar("Key", bound=Tenanted)


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


@dataclass(frozen=True, slots=True)
class PromiseLimits:
    """Bounds of one engine's promises.

    Attributes:
        blocks: that may be kept; one that several promises keep counts once.
        tenant_blocks: of one tenant.
        seconds: the longest promise.
        most: promises, with those that were broken and are to be told.
    """

    blocks: int
    tenant_blocks: int
    seconds: float
    most: int = 1024


@dataclass(frozen=True, slots=True)
class PinBlocks:
    """Pin these blocks for a promise; before others are unpinned, which may be the same."""

    number: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnpinBlocks:
    """Unpin what is pinned for a promise."""

    number: int


@dataclass(frozen=True, slots=True)
class PromiseBroken:
    """A promise was broken."""

    why: BreakReason


@dataclass(frozen=True, slots=True)
class KeepRefused:
    """Nothing is kept: the blocks are more than the bound.  An earlier promise stays."""

    num_blocks: int
    most: int


PromiseEffect = PinBlocks | UnpinBlocks | PromiseBroken | KeepRefused


@dataclass(slots=True)
class Promise:
    """One promise.

    Attributes:
        number: identifies its pins.
        blocks: that are kept; none once it is broken.
        until: when its time is up, in seconds.
        why: it was broken.
        is_used: a later turn of its session has come.
    """

    number: int
    blocks: tuple[int, ...]
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


class Promises(Generic[Key]):
    """The promises of one engine, oldest first."""

    def __init__(self, limits: PromiseLimits) -> None:
        self._limits = limits
        self._promises: dict[Key, Promise] = {}
        self._numbers = 0
        self._due = math.inf  # no promise's time is up before
        self._kept: Counter[int] = Counter()
        self._of_tenant: dict[str, Counter[int]] = {}

    def __len__(self) -> int:
        """Promises, with those that are to be told."""
        return len(self._promises)

    def __iter__(self) -> Iterator[tuple[Key, Promise]]:
        return iter(self._promises.items())

    @property
    def num_blocks(self) -> int:
        """Kept blocks; one that several promises keep counts once."""
        return len(self._kept)

    @property
    def num_kept(self) -> int:
        """Promises that hold blocks."""
        return sum(one.state is PromiseState.KEPT for one in self._promises.values())

    def blocks_of_tenant(self, tenant: str) -> int:
        """Blocks that are kept for a tenant."""
        return len(self._of_tenant.get(tenant, ()))

    def blocks_of(self, key: Key) -> int:
        """Blocks that are kept for a session."""
        promise = self._promises.get(key)
        return 0 if promise is None else len(promise.blocks)

    # Events

    def keep(
        self, key: Key, blocks: Iterable[int], seconds: float, now: float
    ) -> list[PromiseEffect]:
        """Keep the blocks of a session's turn, instead of those of an earlier turn.

        Args:
            key: the session.
            blocks: of all groups, without holes; an earlier promise stays if there are none.
            seconds: above 0; at most those of the limits count.
            now: in seconds.
        """
        effects = self.expire(now)
        wanted = tuple(dict.fromkeys(blocks))
        most = min(self._limits.tenant_blocks, self._limits.blocks)
        if not wanted:
            return effects
        if len(wanted) > most:
            return [*effects, KeepRefused(len(wanted), most)]
        self._numbers += 1
        until = now + min(seconds, self._limits.seconds)
        self._due = min(self._due, until)
        effects.append(PinBlocks(self._numbers, wanted))
        effects += self._end(key, "replaced")
        self._promises[key] = promise = Promise(self._numbers, wanted, until)
        self._count(key, promise)
        return effects + self._within_limits(key)

    def use(self, key: Key) -> bool:
        """Note that a later turn has come; returns whether its blocks are kept, once."""
        promise = self._promises.get(key)
        if promise is None or promise.state is not PromiseState.KEPT or promise.is_used:
            return False
        promise.is_used = True
        return True

    def release(self, key: Key) -> list[PromiseEffect]:
        """Keep nothing for a session any more."""
        return self._end(key, "released")

    def tell(self, key: Key) -> BreakReason | None:
        """Why the session's promise was broken; None if it was not, or was told already."""
        promise = self._promises.get(key)
        if promise is None or promise.state is not PromiseState.BROKEN:
            return None
        self._end(key, "told")
        return promise.why

    def expire(self, now: float) -> list[PromiseEffect]:
        """End the promises whose time is up."""
        if now < self._due:  # as in nearly every step
            return []
        due = [key for key, one in self._promises.items() if one.until <= now]
        effects = [effect for key in due for effect in self._end(key, "expired")]
        self._due = min((one.until for one in self._promises.values()), default=math.inf)
        return effects

    def make_room(self, num_blocks: int, spared: Collection[Key] = ()) -> list[PromiseEffect]:
        """Break promises, the oldest first, until ``num_blocks`` are kept by none any more.

        At least one is broken, if there is one.  Those of ``spared`` sessions come last: their
        turns are here, and would miss them.
        """
        least = len(self._kept) - max(1, num_blocks)
        kept = [key for key, one in self._promises.items() if one.state is PromiseState.KEPT]
        kept.sort(key=lambda key: key in spared)
        effects: list[PromiseEffect] = []
        for key in kept:
            if len(self._kept) <= least:
                break
            effects += self._break(key, BreakReason.ROOM)
        return effects

    def drop_all(self) -> list[PromiseEffect]:
        """Break every promise: the KV is not valid any more."""
        return [e for key in list(self._promises) for e in self._break(key, BreakReason.RESET)]

    # Bounds

    def _within_limits(self, new: Key) -> list[PromiseEffect]:
        """Break promises until every bound holds; never the new one, which is within each."""
        effects: list[PromiseEffect] = []
        limits = self._limits
        while self.blocks_of_tenant(new.tenant) > limits.tenant_blocks:
            effects += self._break_oldest(new.tenant, new)
        while len(self._kept) > limits.blocks:
            effects += self._break_oldest(self._who_keeps_most(new), new)
        while len(self._promises) > limits.most:
            effects += self._forget_one(new)
        return effects

    def _who_keeps_most(self, new: Key) -> str:
        """The tenant with most blocks, of those with a promise beside the new one."""
        others = {key.tenant for key, one in self._promises.items() if key != new and one.blocks}
        return max(others, key=lambda tenant: (self.blocks_of_tenant(tenant), tenant))

    def _break_oldest(self, tenant: str, new: Key) -> list[PromiseEffect]:
        oldest = next(
            key
            for key, one in self._promises.items()
            if key.tenant == tenant and key != new and one.blocks
        )
        return self._break(oldest, BreakReason.SHARE)

    def _forget_one(self, new: Key) -> list[PromiseEffect]:
        """End the oldest promise of the tenant that has most of them; one that is broken first."""
        numbers = Counter(key.tenant for key in self._promises if key != new)
        most = max(numbers, key=lambda tenant: (numbers[tenant], tenant))
        his = [key for key in self._promises if key.tenant == most and key != new]
        broken = (key for key in his if self._promises[key].state is PromiseState.BROKEN)
        key = next(broken, his[0])
        effects = self._break(key, BreakReason.SHARE)
        return [*effects, *self._end(key, "expired")]

    # Transitions

    def _break(self, key: Key, why: BreakReason) -> list[PromiseEffect]:
        promise = self._promises[key]
        if not promise.enter("broken"):
            return []
        promise.why = why
        return [*self._unpin(key, promise), PromiseBroken(why)]

    def _end(self, key: Key, event: str) -> list[PromiseEffect]:
        promise = self._promises.get(key)
        if promise is None or not promise.enter(event):
            return []
        del self._promises[key]
        return self._unpin(key, promise)

    def _unpin(self, key: Key, promise: Promise) -> list[PromiseEffect]:
        """Unpin the blocks of a promise, if it has not been done."""
        if not promise.blocks:
            return []
        his = self._of_tenant[key.tenant]
        for count in (self._kept, his):
            count.subtract(promise.blocks)
            for block in promise.blocks:
                if not count[block]:
                    del count[block]
        if not his:
            del self._of_tenant[key.tenant]
        promise.blocks = ()
        return [UnpinBlocks(promise.number)]

    def _count(self, key: Key, promise: Promise) -> None:
        self._kept.update(promise.blocks)
        self._of_tenant.setdefault(key.tenant, Counter()).update(promise.blocks)
