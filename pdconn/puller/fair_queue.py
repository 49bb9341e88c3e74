"""The order in which several pulls are served over one link.

First come, first served lets a prompt of a thousand tokens wait behind one of a hundred
thousand.  Equal shares end that, but make every pull longer: of two equal pulls both would
be over at the end, where one could be over at half time.  So each pull is served in the
order in which it *would* end if all shared equally, and gets the whole link meanwhile
(Friedman and Henderson, "Fairness and efficiency in web server protocols", SIGMETRICS
2003).  No pull then ends later than with equal shares, and most end sooner::

    asked at 0: a of 8, b of 8; asked at 4: c of 1       (bytes, one served per tick)

    first come     aaaaaaaabbbbbbbbc     a 8    b 16   c 17
    equal shares   all at once           a 17   b 17   c 7
    here           aaaacaaaabbbbbbbb     a 9    b 17   c 5

Time is counted in bytes served to each pull that shares: *virtual* time advances by
``1 / n`` of a byte for each byte served while n of them would not be done yet.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Pull = TypeVar("Pull")


@dataclass(order=True, slots=True)
class _Queued(Generic[Pull]):
    """``ends`` is the virtual time at which equal shares would have served the pull."""

    ends: float
    order: int
    pull: Pull = field(compare=False)


class FairQueue(Generic[Pull]):
    """Pulls in the order in which equal shares would end them.

    Example:
        >>> pulls = FairQueue[str]()
        >>> pulls.add("long", 1000)
        >>> pulls.served(10)
        >>> pulls.add("short", 5)
        >>> pulls.first()
        'short'
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = itertools.count()
        self._queued: list[_Queued[Pull]] = []
        self._sharing: list[float] = []

    def __len__(self) -> int:
        """Pulls that are not done."""
        return len(self._queued)

    def add(self, pull: Pull, nbytes: int) -> None:
        """``pull`` needs ``nbytes`` bytes from now on."""
        ends = self._now + nbytes
        heapq.heappush(self._queued, _Queued(ends, next(self._numbers), pull))
        heapq.heappush(self._sharing, ends)

    def first(self) -> Pull | None:
        """The pull whose turn it is; None when the queue is empty."""
        return self._queued[0].pull if self._queued else None

    def done(self) -> None:
        """The first has all that it needs, or failed."""
        heapq.heappop(self._queued)

    def served(self, nbytes: int) -> None:
        """So many bytes were served, to any pull."""
        left = float(nbytes)
        while self._sharing:
            until_one_ends = (self._sharing[0] - self._now) * len(self._sharing)
            if left < until_one_ends:
                self._now += left / len(self._sharing)
                return
            left -= until_one_ends
            self._now = heapq.heappop(self._sharing)
