"""The order of the reads from one peer: fair among tenants, and among the pulls of each.  Pure.

First come, first served lets a prompt of a thousand tokens wait behind one of a hundred thousand.
Equal shares prevent that, but make every pull longer: two equal pulls would both end at the end,
where one could end at half time.  So pulls are served in the order in which they *would* end if all
shared the link equally, each with the whole link to itself (Friedman and Henderson, "Fairness and
efficiency in web server protocols", SIGMETRICS 2003).  No pull then ends later than with equal
shares, and most end sooner::

    asked at 0: a of 8, b of 8; asked at 4: c of 1       (bytes, one served per tick)

    first come     aaaaaaaabbbbbbbbc     a 8    b 16   c 17
    equal shares   all at once           a 17   b 17   c 7
    here           aaaacaaaabbbbbbbb     a 9    b 17   c 5

Time is counted in bytes served to each pull that shares: *virtual* time advances by ``1 / n`` of a
byte for each byte served while n of them would not be done yet.

Tenants share the link in the same way, and a tenant's pulls share what it is served.  So there are
two virtual times: one of the tenants, and one of each tenant's pulls.  A tenant's *level* is the
virtual time at which an equal share would have served it what it was served; it is ahead of its
share while that is later than now.  The tenant is next whose share would end its first pull first::

    asked by A at 0: a, b, c of 4; asked by B at 2: x of 5

    as one tenant   aaaabbbbccccxxxxx     x 17
    equal shares    all at once           x 12
    here            aaaxaxxxxbbbbcccc     x 9

No order keeps every pull within the shares.  With one pull each, A's that would end first is served
alone; if A now asks for more, it has spent the share that the new pulls are to have.  Serving each
tenant its share and no more would prevent that, but then equal pulls of n tenants would all end at
the end.  So a tenant with one pull is served in one go, and one with several is never ahead by more
than a chunk:

- Pulls of one tenant, and pulls of which each is the only one of its tenant, are served in the
  order above.
- A tenant's only pull ends no later than with equal shares, whatever others ask for, and any pull
  does while each tenant has several; but for a chunk of each tenant.
- A tenant that was ahead when it asked for more pays for that first.  Until then its pulls may end
  later than with equal shares, and so may those of other tenants with several.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Pull = TypeVar("Pull")


@dataclass(order=True, slots=True)
class _Queued(Generic[Pull]):
    """A pull that is not done.

    Attributes:
        ends: the virtual time of its tenant's pulls at which equal shares would have served it.
        left: bytes that are not served.
    """

    ends: float
    order: int
    pull: Pull = field(compare=False)
    tenant: _TenantPulls[Pull] = field(compare=False)
    left: int = field(compare=False)
    is_removed: bool = field(default=False, compare=False)


class _TenantPulls(Generic[Pull]):
    """The pulls of a tenant, in the order in which they would end with equal shares of its share.

    Attributes:
        level: as of the module.
        ends: the virtual time at which the tenant's share has served all that it has asked for.
        is_sharing: whether ``ends`` is still to come.
        num_pulls: those that it has asked for since it shares.
        turn: its place among the tenants; None without a pull.
    """

    __slots__ = (
        "_now", "_queued", "_sharing", "ends", "is_sharing", "level", "name", "num_pulls", "turn",
    )  # fmt: skip

    def __init__(self, name: bytes, now: float) -> None:
        self.name = name
        self.level = self.ends = now
        self.is_sharing = False
        self.num_pulls = 0
        self.turn: _TenantTurn[Pull] | None = None
        self._now = 0.0
        self._queued: list[_Queued[Pull]] = []
        self._sharing: list[float] = []

    def add_pull(self, pull: Pull, nbytes: int, order: int) -> _Queued[Pull]:
        """Add a pull, the ``order``-th of all."""
        queued = _Queued(self._now + nbytes, order, pull, self, nbytes)
        heapq.heappush(self._queued, queued)
        heapq.heappush(self._sharing, queued.ends)
        self.num_pulls += 1
        return queued

    def first(self) -> _Queued[Pull] | None:
        """The pull to serve next; None without one."""
        while self._queued and self._queued[0].is_removed:
            heapq.heappop(self._queued)
        return self._queued[0] if self._queued else None

    def served(self, nbytes: int) -> None:
        """Advance the virtual time of these pulls."""
        self.level += nbytes
        left = float(nbytes)
        while self._sharing:
            until_one_ends = (self._sharing[0] - self._now) * len(self._sharing)
            if left < until_one_ends:
                self._now += left / len(self._sharing)
                return
            left -= until_one_ends
            self._now = heapq.heappop(self._sharing)

    def may_be_served(self, now: float) -> bool:
        """Whether it may get a chunk before others at ``now``, the virtual time of the tenants."""
        return self.level <= now or self.num_pulls == 1


@dataclass(order=True, slots=True)
class _TenantTurn(Generic[Pull]):
    """A tenant's place: ``ends`` is when its share would have served the ``first`` of its pulls.

    It is stale once the tenant has another.
    """

    ends: float
    order: int
    first: _Queued[Pull] = field(compare=False)

    @property
    def is_stale(self) -> bool:
        return self.first.tenant.turn is not self


class FairQueue(Generic[Pull]):
    """Pulls in the order of the module.

    An event costs the logarithm of the number of pulls.  A tenant is remembered while it has pulls,
    and until its share would have served those that it had.

    Example:
        >>> pulls = FairQueue[str]()
        >>> pulls.add_pull("long", 1000)
        >>> pulls.served("long", 10)
        >>> pulls.add_pull("short", 5)
        >>> pulls.first()
        'short'
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = itertools.count()
        self._queued: dict[Pull, _Queued[Pull]] = {}
        self._tenants: dict[bytes, _TenantPulls[Pull]] = {}
        self._turns: list[_TenantTurn[Pull]] = []
        # Tenants that are ahead, by level; each has the turn that it had when it was found to be.
        self._ahead: list[tuple[float, int, _TenantTurn[Pull]]] = []
        # Tenants that share, by when they will have ended; they may have asked for more since.
        self._sharing: list[tuple[float, int, _TenantPulls[Pull]]] = []
        self._num_sharing = 0

    def __len__(self) -> int:
        """Pulls that are not done."""
        return len(self._queued)

    @property
    def num_tenants(self) -> int:
        """Tenants that are remembered."""
        return len(self._tenants)

    def add_pull(self, pull: Pull, nbytes: int, tenant: bytes = b"") -> None:
        """Add a pull of ``nbytes`` bytes for a tenant."""
        order = next(self._numbers)
        pulls = self._tenants.get(tenant)
        if pulls is None:
            pulls = self._tenants[tenant] = _TenantPulls(tenant, self._now)
        self._queued[pull] = pulls.add_pull(pull, nbytes, order)
        if pulls.is_sharing:
            pulls.ends += nbytes
        elif nbytes:
            pulls.ends, pulls.is_sharing = self._now + nbytes, True
            self._num_sharing += 1
            heapq.heappush(self._sharing, (pulls.ends, order, pulls))
        self._take_turn(pulls)

    def first(self) -> Pull | None:
        """The pull to serve next; None when the queue is empty."""
        while self._ahead and self._ahead[0][0] <= self._now:
            turn = heapq.heappop(self._ahead)[-1]
            if not turn.is_stale:
                heapq.heappush(self._turns, turn)
        while self._turns:
            turn, tenant = self._turns[0], self._turns[0].first.tenant
            if not turn.is_stale and tenant.may_be_served(self._now):
                return turn.first.pull
            heapq.heappop(self._turns)
            if not turn.is_stale:
                heapq.heappush(self._ahead, (tenant.level, turn.order, turn))
        # Somebody is not ahead, unless pulls were removed, or by rounding.
        while self._ahead:
            turn = self._ahead[0][-1]
            if not turn.is_stale:
                return turn.first.pull
            heapq.heappop(self._ahead)
        return None

    def remove_pull(self, pull: Pull) -> None:
        """Remove a pull, which is complete or has failed; one that is not there is ignored."""
        queued = self._queued.pop(pull, None)
        if queued is None:
            return
        if not self._queued:
            self._forget_all()
            return
        queued.is_removed, tenant = True, queued.tenant
        self._take_turn(tenant)
        if tenant.is_sharing and queued.left:  # it has failed: nobody waits for the rest
            tenant.ends -= queued.left
            heapq.heappush(self._sharing, (tenant.ends, queued.order, tenant))
            self._advance(0)
        self._forget_if_over(tenant)

    def served(self, pull: Pull, nbytes: int) -> None:
        """Advance virtual time: ``nbytes`` bytes of ``pull`` were served, which was the first."""
        queued = self._queued[pull]
        queued.left -= nbytes
        queued.tenant.served(nbytes)
        self._advance(nbytes)

    def _advance(self, nbytes: int) -> None:
        left = float(nbytes)
        while self._num_sharing:
            ends, order, tenant = self._sharing[0]
            if not tenant.is_sharing or tenant.ends < ends:
                heapq.heappop(self._sharing)
            elif tenant.ends > ends:
                heapq.heapreplace(self._sharing, (tenant.ends, order, tenant))
            else:
                until_one_ends = max(0.0, ends - self._now) * self._num_sharing
                if left < until_one_ends:
                    self._now += left / self._num_sharing
                    return
                left -= until_one_ends
                self._now = max(self._now, ends)
                tenant.is_sharing = False
                self._num_sharing -= 1
                self._forget_if_over(tenant)

    def _take_turn(self, tenant: _TenantPulls[Pull]) -> None:
        """Give the tenant a new place, if its first pull is another one."""
        first = tenant.first()
        if first is None:
            tenant.turn = None
        elif tenant.turn is None or tenant.turn.first is not first:
            tenant.turn = _TenantTurn(tenant.level + first.left, first.order, first)
            heapq.heappush(self._turns, tenant.turn)

    def _forget_if_over(self, tenant: _TenantPulls[Pull]) -> None:
        if tenant.turn is None and not tenant.is_sharing:
            self._tenants.pop(tenant.name, None)

    def _forget_all(self) -> None:
        """Begin anew: equal shares would have ended as well, but for rounding and failures."""
        self._now, self._num_sharing = 0.0, 0
        for each in (self._tenants, self._turns, self._ahead, self._sharing):
            each.clear()
