"""Who may stand in the lender's doorway, and for how long.

Anybody can open a connection.  Whoever has not greeted, sends half a frame, or does not
read what it asked for is *loitering*, and is shown out after ``LOITER_S``.  When too many
loiter, the one that came first goes first, so a crowd of strangers delays a guest by
less than it takes the guest to greet.  One host cannot take all places either.

Pure: time is an argument.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

V = TypeVar("V", bound=Hashable)

MAX_VISITORS = 8192
MAX_VISITORS_OF_HOST = 2048
MAX_LOITERERS = 512
LOITER_S = 10.0


class AdmissionControl(Generic[V]):
    """Counts visitors by host, and times those that loiter.

    Args:
        places: how many may be inside, ``MAX_VISITORS`` at most.
    """

    def __init__(self, places: int = MAX_VISITORS) -> None:
        self._places = min(places, MAX_VISITORS)
        self._hosts: dict[V, str] = {}
        self._by_host: Counter[str] = Counter()
        self._loiterers: OrderedDict[V, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hosts)

    def refusal(self, host: str) -> str | None:
        """Why nobody else from ``host`` may enter now, or None."""
        if len(self._hosts) >= self._places:
            return f"{self._places} connections are open"
        if self._by_host[host] >= MAX_VISITORS_OF_HOST:
            return f"{MAX_VISITORS_OF_HOST} connections of {host} are open"
        return None

    def enter(self, visitor: V, host: str, now: float) -> V | None:
        """A visitor came; returns one to show out in its place, or None."""
        self._hosts[visitor] = host
        self._by_host[host] += 1
        self._loiterers[visitor] = now + LOITER_S
        if len(self._loiterers) > MAX_LOITERERS:
            return next(iter(self._loiterers))
        return None

    def observe(self, visitor: V, loiters: bool, now: float) -> None:
        """Note whether a visitor that is inside loiters just now."""
        if not loiters:
            self._loiterers.pop(visitor, None)
        elif visitor in self._hosts:
            self._loiterers.setdefault(visitor, now + LOITER_S)

    def leave(self, visitor: V) -> None:
        """A visitor went; unknown ones are ignored."""
        host = self._hosts.pop(visitor, None)
        if host is None:
            return
        self._loiterers.pop(visitor, None)
        self._by_host[host] -= 1
        if not self._by_host[host]:
            del self._by_host[host]

    def overdue(self, now: float) -> Iterator[V]:
        """Who has loitered too long.  The caller shows each out before asking for the next."""
        while self._loiterers:
            visitor, until = next(iter(self._loiterers.items()))
            if until > now:
                return
            del self._loiterers[visitor]
            yield visitor

    def next_deadline(self) -> float | None:
        """When somebody may be overdue."""
        return next(iter(self._loiterers.values()), None)
