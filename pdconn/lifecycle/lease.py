"""Leases: the blocks of one request, pinned for readers until every reader is done.

::

    GROWING ──completed──► HELD ──consumed──► CLOSING ──drained──► FREED
      │                      ├──expired─────────►│                   ▲
      ├──aborted─────────────┴──aborted─────────►│──────revoked──────┤
      └──revoked─────────────┴──revoked──────────────────────────────┘

*Completed*: the request, which readers follow while it is computed, has ended, and there is a
ticket for its blocks.  Until then claims are granted and nothing is confirmed.  *Consumed*: every
rank of one pull has reported done; what a growing lease hears of that counts once it is complete.
*Expired*: the deadline has passed.  *Aborted*: the engine
wants the blocks back.  While CLOSING, no new pull may start; the blocks stay until every claim is
done or has expired (*drained*, often at once).  *Revoked*: the engine takes the blocks back now,
and no further claim is confirmed.

A ``LeaseTable`` finds leases by request and frees each exactly once.

Pure: time is an argument, effects are returned.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from pdconn.protocol.messages import Reader, RefusalReason

MAX_PULLS = 1024
"""Pulls that one lease tracks; best-of-n makes one for each answer."""

MIN_TTL_S = 0.001
"""A time-to-live travels in whole milliseconds."""


class LeaseState(StrEnum):
    """Where a lease stands."""

    GROWING = "growing"
    HELD = "held"
    CLOSING = "closing"
    FREED = "freed"


class Freed(StrEnum):
    """Why a lease ended."""

    READ = "read"
    EXPIRED = "expired"
    ABORTED = "aborted"


TRANSITIONS: dict[tuple[LeaseState, str], LeaseState] = {
    (LeaseState.GROWING, "completed"): LeaseState.HELD,
    (LeaseState.GROWING, "aborted"): LeaseState.CLOSING,
    (LeaseState.GROWING, "revoked"): LeaseState.FREED,
    (LeaseState.HELD, "consumed"): LeaseState.CLOSING,
    (LeaseState.HELD, "expired"): LeaseState.CLOSING,
    (LeaseState.HELD, "aborted"): LeaseState.CLOSING,
    (LeaseState.CLOSING, "drained"): LeaseState.FREED,
    (LeaseState.HELD, "revoked"): LeaseState.FREED,
    (LeaseState.CLOSING, "revoked"): LeaseState.FREED,
}
"""All transitions of a lease; any other event leaves the state as it is."""

_CAUSES = {
    "consumed": Freed.READ,
    "expired": Freed.EXPIRED,
    "aborted": Freed.ABORTED,
    "revoked": Freed.ABORTED,
}
_REFUSALS = {
    Freed.READ: RefusalReason.CONSUMED,
    Freed.EXPIRED: RefusalReason.EXPIRED,
    Freed.ABORTED: RefusalReason.ABORTED,
}


def refusal_after(freed: Freed) -> RefusalReason:
    """The reason for which a claim on a lease that ended so is refused."""
    return _REFUSALS[freed]


@dataclass(frozen=True, slots=True)
class LeaseOffer:
    """The engine lends the blocks of ``request`` for ``ttl_s`` seconds from ``at``.

    Attributes:
        request: the request whose blocks are lent.
        ticket: digest of the ticket, which a claim must repeat; None while the request is being
            computed: the lease grows.
        ttl_s: seconds that the lease, every claim and every renewal hold.
        at: when the blocks were lent, in seconds of the lender's clock.

    Raises:
        ValueError: ``ttl_s`` is below a millisecond.
    """

    request: str
    ticket: bytes | None
    ttl_s: float
    at: float

    def __post_init__(self) -> None:
        if self.ttl_s < MIN_TTL_S:
            raise ValueError(f"ttl_s: expected {MIN_TTL_S} or more, got {self.ttl_s}")


@dataclass(frozen=True, slots=True)
class Grant:
    """The claim holds for ``ttl_s`` seconds from now."""

    ttl_s: float


@dataclass(frozen=True, slots=True)
class Denied:
    """The claim does not hold."""

    why: RefusalReason
    detail: str


@dataclass(slots=True)
class _Pull:
    of: int
    claims: dict[int, float] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


class Lease:
    """One request's lent blocks.

    Args:
        offer: what is lent.
        max_pulls: pulls that may claim it.

    Memory: one number per claimed rank, one set entry per finished rank, of at most
    ``max_pulls`` pulls.
    """

    __slots__ = (
        "_cause",
        "_ends",
        "_max_pulls",
        "_pulls",
        "_ticket",
        "_ttl_s",
        "deadline",
        "state",
    )

    def __init__(self, offer: LeaseOffer, max_pulls: int = MAX_PULLS) -> None:
        is_growing = offer.ticket is None
        self.state = LeaseState.GROWING if is_growing else LeaseState.HELD
        # A growing lease ends with its request.
        self.deadline = math.inf if is_growing else offer.at + offer.ttl_s
        self._ticket = offer.ticket
        self._ttl_s = offer.ttl_s
        self._max_pulls = max_pulls
        self._pulls: dict[str, _Pull] = {}
        # When claims end, and how many do then: those of one frame of messages end together, so
        # there are few times to look at where there are thousands of claims.
        self._ends: Counter[float] = Counter()
        self._cause: Freed | None = None

    @property
    def freed(self) -> Freed | None:
        """Why the lease ended, or None while it has not."""
        return self._cause if self.state is LeaseState.FREED else None

    def claim(self, reader: Reader, ticket: bytes, now: float) -> Grant | Denied:
        """Grant or refuse a rank's claim.  A repeated claim extends the first."""
        denied = self._denied(reader, now)
        if denied is None and ticket != self._ticket:
            denied = _altered()
        return denied or self._claim(reader, now)

    def follow(self, reader: Reader, now: float) -> Grant | Denied:
        """As :meth:`claim`, for a reader that knows the stream of the request."""
        return self._denied(reader, now) or self._claim(reader, now)

    def complete(self, offer: LeaseOffer) -> None:
        """The request has ended, and is lent by a ticket.

        Raises:
            ValueError: the lease does not grow.
        """
        if offer.ticket is None or self.state is not LeaseState.GROWING:
            raise ValueError(f"request {offer.request!r} has a lease already")
        self._enter("completed")
        self._ticket, self._ttl_s = offer.ticket, offer.ttl_s
        self.deadline = max((offer.at + offer.ttl_s, *self._ends))
        if any(len(pull.done) == pull.of for pull in self._pulls.values()):
            self._enter("consumed")
            self._drain(offer.at)

    def _claim(self, reader: Reader, now: float) -> Grant | Denied:
        if self._exceeds_max_pulls(reader):
            return Denied(
                RefusalReason.TOO_MANY, f"{self._max_pulls} pulls have claimed this lease"
            )
        pull = self._pulls.setdefault(reader.pull, _Pull(reader.of))
        if reader.rank in pull.done:
            return Denied(RefusalReason.CONSUMED, f"rank {reader.rank} has reported done")
        return self._grant(pull, reader.rank, now)

    def is_claimed(self, reader: Reader, now: float) -> bool:
        """Whether this reader holds a claim that has not expired."""
        pull = self._pulls.get(reader.pull)
        return pull is not None and pull.claims.get(reader.rank, now) > now

    def renew(self, reader: Reader, now: float) -> Grant | Denied:
        """Renew a rank's claim, unless it has expired."""
        pull = self._pulls.get(reader.pull)
        if pull is None or pull.claims.get(reader.rank, now) <= now:
            return self._denied_claim()
        return self._grant(pull, reader.rank, now)

    def confirm(self, reader: Reader, ticket: bytes, now: float) -> Denied | None:
        """End a rank's claim after its reads.

        Returns:
            None if the blocks were lent until now, so that what was read is valid.
        """
        # The deadline of the claim does not matter here.  The lender counts it from receiving the
        # claim and the reader from sending it, but clocks may drift or stop; that the lease has not
        # been freed does not depend on any clock.
        if ticket != self._ticket:
            return _altered()
        pull = self._pulls.get(reader.pull)
        if pull is None or pull.of != reader.of or reader.rank not in pull.claims:
            return self._denied_claim()
        self.done(reader, ticket, now)
        return None

    def done(self, reader: Reader, ticket: bytes, now: float) -> None:
        """A rank reads no more.  May repeat, and needs no claim before it."""
        # A reader without the ticket's digest never had the ticket: it ends no claim.
        if ticket == self._ticket:
            self.leave(reader, now)

    def leave(self, reader: Reader, now: float) -> None:
        """As :meth:`done`, for a reader that knows the ticket, or the stream of the request."""
        if self._exceeds_max_pulls(reader):
            return
        pull = self._pulls.setdefault(reader.pull, _Pull(reader.of))
        if pull.of != reader.of:
            return
        self._end_claim(pull, reader.rank)
        pull.done.add(reader.rank)
        if len(pull.done) == pull.of:
            self._enter("consumed")
        self._drain(now)

    def abort(self, now: float) -> None:
        """Free the blocks as soon as no claim on them holds."""
        self._enter("aborted")
        self._drain(now)

    @property
    def is_unclaimed(self) -> bool:
        """Whether no rank has ever claimed it."""
        return not self._pulls

    def revoke(self) -> None:
        """Free the blocks now: no further claim is renewed or confirmed."""
        self._enter("revoked")

    def expire(self, now: float) -> None:
        """Expire the lease, and the claims that keep it from being freed, as of ``now``."""
        if now >= self.deadline:
            self._enter("expired")
        self._drain(now)

    def next_expiry(self) -> float:
        """When :meth:`expire` may change the state."""
        if self.state in (LeaseState.GROWING, LeaseState.HELD):
            return self.deadline
        return max(self._ends)

    def _denied(self, reader: Reader, now: float) -> Denied | None:
        if self.state is LeaseState.HELD and now >= self.deadline:
            return Denied(RefusalReason.EXPIRED, "the lease has expired")
        pull = self._pulls.get(reader.pull)
        if pull is not None and pull.of != reader.of:
            return Denied(
                RefusalReason.BAD_READER, f"ranks: theirs {reader.of}, in earlier claims {pull.of}"
            )
        if self._cause is not None and not self.is_claimed(reader, now):
            return Denied(refusal_after(self._cause), f"the lease is {self.state}")
        return None

    def _denied_claim(self) -> Denied:
        cause = self._cause
        why = RefusalReason.EXPIRED if cause is None else refusal_after(cause)
        return Denied(why, "no claim that still holds")

    def _exceeds_max_pulls(self, reader: Reader) -> bool:
        return len(self._pulls) >= self._max_pulls and reader.pull not in self._pulls

    def _grant(self, pull: _Pull, rank: int, now: float) -> Grant:
        # What was granted while it grew may hold for longer, and its reader believes that.
        end = max(now + self._ttl_s, pull.claims.get(rank, now))
        self._end_claim(pull, rank)
        pull.claims[rank] = end
        self._ends[end] += 1
        self.deadline = max(self.deadline, end)
        return Grant(self._ttl_s)

    def _end_claim(self, pull: _Pull, rank: int) -> None:
        end = pull.claims.pop(rank, None)
        if end is not None:
            self._ends[end] -= 1
            if not self._ends[end]:
                del self._ends[end]

    def _enter(self, cause: str) -> None:
        entered = TRANSITIONS.get((self.state, cause))
        if entered is not None:
            self.state = entered
            self._cause = self._cause or _CAUSES.get(cause)

    def _drain(self, now: float) -> None:
        if self.state is not LeaseState.CLOSING:
            return
        if all(end <= now for end in self._ends):
            self.state = TRANSITIONS[self.state, "drained"]


def _altered() -> Denied:
    # The detail does not show our digest: with it a reader could claim, and end the lease.
    return Denied(RefusalReason.ALTERED, "the ticket is not the one that prefill issued")


@dataclass(frozen=True, slots=True)
class FreedLease:
    """The engine may reuse the blocks of ``request``."""

    request: str
    why: Freed


class LeaseTable:
    """Leases by request id.

    Args:
        remember: ended leases that are kept by name (about 100 bytes each), so that a late claim
            is refused with the reason.
    """

    def __init__(self, remember: int = 4096) -> None:
        self._leases: dict[str, Lease] = {}
        self._ended: OrderedDict[str, Freed] = OrderedDict()
        self._remember = remember
        # When a lease is looked at next: one time of each counts, others in the heap do not.
        self._timers: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def add_lease(self, offer: LeaseOffer) -> None:
        """Open a lease.

        Raises:
            ValueError: the request has a lease already.
        """
        if offer.request in self._leases:
            raise ValueError(f"request {offer.request!r} has a lease already")
        self._ended.pop(offer.request, None)
        lease = self._leases[offer.request] = Lease(offer)
        self._settle(offer.request, lease)

    def complete_lease(self, offer: LeaseOffer) -> list[FreedLease]:
        """Complete the lease of ``offer.request``, which grows; returns it if its reader has left.

        Raises:
            ValueError: the request has no lease that grows.
        """
        if not self.is_growing(offer.request):
            raise ValueError(f"request {offer.request!r} has no lease that grows")
        lease = self._leases[offer.request]
        lease.complete(offer)
        return self._settle(offer.request, lease)

    def claim_lease(
        self, request: str, reader: Reader, ticket: bytes, now: float
    ) -> Grant | Denied:
        """Grant or refuse a claim on the lease of ``request``."""
        lease = self._leases.get(request)
        return self._refuse_unknown(request) if lease is None else lease.claim(reader, ticket, now)

    def follow_lease(self, request: str, reader: Reader, now: float) -> Grant | Denied:
        """As :meth:`claim_lease`, for a reader that knows the stream of ``request``."""
        lease = self._leases.get(request)
        return self._refuse_unknown(request) if lease is None else lease.follow(reader, now)

    def is_lent(self, request: str) -> bool:
        """Whether the lease of ``request`` has not ended."""
        return request in self._leases

    def is_growing(self, request: str) -> bool:
        """Whether ``request`` has a lease that grows."""
        lease = self._leases.get(request)
        return lease is not None and lease.state is LeaseState.GROWING

    def is_claimed(self, request: str, reader: Reader, now: float) -> bool:
        """Whether this reader holds a claim that has not expired."""
        lease = self._leases.get(request)
        return lease is not None and lease.is_claimed(reader, now)

    def renew_lease(self, request: str, reader: Reader, now: float) -> Grant | Denied:
        """Renew a claim on the lease of ``request``, unless it has expired."""
        lease = self._leases.get(request)
        return self._refuse_unknown(request) if lease is None else lease.renew(reader, now)

    def confirm_lease(
        self, request: str, reader: Reader, ticket: bytes, now: float
    ) -> tuple[Denied | None, list[FreedLease]]:
        """End a claim after its reads.

        Returns:
            Why what was read is not valid, or None; and the lease, if this was its last reader.
        """
        lease = self._leases.get(request)
        if lease is None:
            return self._refuse_unknown(request), []
        denied = lease.confirm(reader, ticket, now)
        return denied, [] if denied else self._settle(request, lease)

    def end_claim(
        self, request: str, reader: Reader, ticket: bytes, now: float
    ) -> list[FreedLease]:
        """A reader reads no more.  Unknown requests are ignored, since the message may repeat."""
        lease = self._leases.get(request)
        if lease is None:
            return []
        lease.done(reader, ticket, now)
        return self._settle(request, lease)

    def leave_lease(self, request: str, reader: Reader, now: float) -> list[FreedLease]:
        """As :meth:`end_claim`, for a reader that knows the stream of ``request``."""
        lease = self._leases.get(request)
        if lease is None:
            return []
        lease.leave(reader, now)
        return self._settle(request, lease)

    def abort_lease(self, request: str, now: float) -> list[FreedLease]:
        """Free the lease as soon as no claim on it holds."""
        lease = self._leases.get(request)
        if lease is None:
            return []
        lease.abort(now)
        return self._settle(request, lease)

    def abort_unclaimed(self, request: str, now: float) -> list[FreedLease]:
        """Free the lease of ``request`` unless a rank has claimed it."""
        lease = self._leases.get(request)
        return [] if lease is None or not lease.is_unclaimed else self.abort_lease(request, now)

    def abort_all(self, now: float) -> list[FreedLease]:
        """Free every lease as soon as no claim on it holds."""
        return [freed for request in list(self._leases) for freed in self.abort_lease(request, now)]

    def revoke_all(self) -> list[FreedLease]:
        """Free every lease now, claimed or not: no further read from it is confirmed."""
        freed: list[FreedLease] = []
        for request, lease in list(self._leases.items()):
            lease.revoke()
            freed += self._settle(request, lease)
        return freed

    def free_expired(self, now: float) -> list[FreedLease]:
        """Free the leases that have expired at ``now``.  Cost grows with due timers, not leases."""
        freed: list[FreedLease] = []
        while self._timers and self._timers[0][0] <= now:
            at, request = heapq.heappop(self._timers)
            if self._due.get(request) != at:
                continue
            del self._due[request]
            lease = self._leases[request]
            lease.expire(now)
            freed += self._settle(request, lease)
        return freed

    def next_expiry(self) -> float | None:
        """When :meth:`free_expired` must run next, or None when nothing is lent."""
        while self._timers and self._due.get(self._timers[0][1]) != self._timers[0][0]:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def _settle(self, request: str, lease: Lease) -> list[FreedLease]:
        freed = lease.freed
        if freed is None:
            due = lease.next_expiry()
            # A lease that grows needs none: what ends that comes here.
            if due < self._due.get(request, math.inf):
                heapq.heappush(self._timers, (due, request))
                self._due[request] = due
            return []
        del self._leases[request]
        self._due.pop(request, None)
        self._ended[request] = freed
        while len(self._ended) > self._remember:
            self._ended.popitem(last=False)
        return [FreedLease(request, freed)]

    def _refuse_unknown(self, request: str) -> Denied:
        ended = self._ended.get(request)
        if ended is None:
            return Denied(RefusalReason.UNKNOWN, "nothing is lent under this request")
        return Denied(refusal_after(ended), "the lease has ended")
