"""A lease: blocks lent under one request, until everybody is done with them.

::

    HELD ──consumed──► CLOSING ──drained──► FREED
      ├──expired─────────►│
      └──aborted─────────►│

*Consumed*: every rank of one pull said that it is done.  *Expired*: the deadline
passed.  *Aborted*: the engine takes the blocks back.  While CLOSING, no new pull
may start, but one that holds a claim may still believe what it reads, so the
blocks stay until its claim is done or over: that is *drained*, and often at once.

A claim is counted from when the lender *received* it, the reader counts from when
it *sent* it, so the reader has given up before the lender frees anything.

Pure: time is an argument, effects are returned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdconn.protocol.messages import Reader, RefusalReason

MAX_PULLS = 1024
"""Pulls that one lease takes note of; best-of-n makes one for each answer."""


MIN_TTL_S = 0.001
"""A time-to-live travels in whole milliseconds."""


class LeaseState(StrEnum):
    """Where a lease stands."""

    HELD = "held"
    CLOSING = "closing"
    FREED = "freed"


class Freed(StrEnum):
    """Why a lease ended."""

    READ = "read"
    EXPIRED = "expired"
    ABORTED = "aborted"


TRANSITIONS: dict[tuple[LeaseState, str], LeaseState] = {
    (LeaseState.HELD, "consumed"): LeaseState.CLOSING,
    (LeaseState.HELD, "expired"): LeaseState.CLOSING,
    (LeaseState.HELD, "aborted"): LeaseState.CLOSING,
    (LeaseState.CLOSING, "drained"): LeaseState.FREED,
}
"""The whole life of a lease; anything else leaves the state as it is."""

_CAUSES = {"consumed": Freed.READ, "expired": Freed.EXPIRED, "aborted": Freed.ABORTED}
_REFUSALS = {
    Freed.READ: RefusalReason.CONSUMED,
    Freed.EXPIRED: RefusalReason.EXPIRED,
    Freed.ABORTED: RefusalReason.ABORTED,
}


def refusal_after(freed: Freed) -> RefusalReason:
    """What a claim on a lease that ended this way is told."""
    return _REFUSALS[freed]


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
        ticket: digest of the ticket, which a claim must repeat.
        ttl_s: seconds that the grant and every claim and renewal hold.
        now: when the blocks were lent, in seconds of any steady clock.

    Memory: one number per claimed rank, one set entry per finished rank, of at most
    ``MAX_PULLS`` pulls.
    """

    __slots__ = ("_cause", "_pulls", "_ticket", "_ttl_s", "deadline", "state")

    def __init__(self, ticket: bytes, ttl_s: float, now: float) -> None:
        if ttl_s < MIN_TTL_S:
            raise ValueError(f"ttl_s: expected {MIN_TTL_S} or more, got {ttl_s}")
        self.state = LeaseState.HELD
        self.deadline = now + ttl_s
        self._ticket = ticket
        self._ttl_s = ttl_s
        self._pulls: dict[str, _Pull] = {}
        self._cause: Freed | None = None

    @property
    def freed(self) -> Freed | None:
        """Why the lease ended, or None while it has not."""
        return self._cause if self.state is LeaseState.FREED else None

    def claim(self, reader: Reader, ticket: bytes, now: float) -> Grant | Denied:
        """A rank asks to read.  Repeating a claim prolongs it."""
        denied = self._denied(reader, now)
        if denied is not None:
            return denied
        if ticket != self._ticket:
            # Ours is not told: who knows it may claim and end the lease.
            return Denied(RefusalReason.ALTERED, "the ticket is not the one that was given out")
        if self._is_one_too_many(reader):
            return Denied(RefusalReason.TOO_MANY, f"{MAX_PULLS} pulls have claimed this lease")
        pull = self._pulls.setdefault(reader.pull, _Pull(reader.of))
        if reader.rank in pull.done:
            return Denied(RefusalReason.CONSUMED, f"rank {reader.rank} was done with it already")
        return self._hold(pull, reader.rank, now)

    def is_claimed(self, reader: Reader, now: float) -> bool:
        """Whether this very reader holds a claim that is not over."""
        pull = self._pulls.get(reader.pull)
        return pull is not None and pull.claims.get(reader.rank, now) > now

    def renew(self, reader: Reader, now: float) -> Grant | Denied:
        """A rank asks for more time.  Only a claim that still holds can be renewed."""
        pull = self._pulls.get(reader.pull)
        if pull is None or pull.claims.get(reader.rank, now) <= now:
            cause = self._cause
            why = RefusalReason.EXPIRED if cause is None else refusal_after(cause)
            return Denied(why, "no claim that still holds")
        return self._hold(pull, reader.rank, now)

    def done(self, reader: Reader, ticket: bytes, now: float) -> None:
        """A rank will read no more.  May come twice, or without a claim before it.

        Whoever does not know the digest was never given the ticket, and is not heard.
        """
        if ticket != self._ticket or self._is_one_too_many(reader):
            return
        pull = self._pulls.setdefault(reader.pull, _Pull(reader.of))
        if pull.of != reader.of:
            return
        pull.claims.pop(reader.rank, None)
        pull.done.add(reader.rank)
        if len(pull.done) == pull.of:
            self._enter("consumed")
        self._drain(now)

    def abort(self, now: float) -> None:
        """The engine wants its blocks back as soon as nobody can believe them."""
        self._enter("aborted")
        self._drain(now)

    def tick(self, now: float) -> None:
        """Time passed."""
        if now >= self.deadline:
            self._enter("expired")
        self._drain(now)

    def next_deadline(self) -> float:
        """When ``tick`` may change something."""
        if self.state is LeaseState.HELD:
            return self.deadline
        return max(end for pull in self._pulls.values() for end in pull.claims.values())

    def _denied(self, reader: Reader, now: float) -> Denied | None:
        if self.state is LeaseState.HELD and now >= self.deadline:
            return Denied(RefusalReason.EXPIRED, "the lease is over")
        pull = self._pulls.get(reader.pull)
        if pull is not None and pull.of != reader.of:
            return Denied(RefusalReason.BAD_READER, f"ranks: theirs {reader.of}, before {pull.of}")
        if self._cause is not None and (pull is None or reader.rank not in pull.claims):
            return Denied(refusal_after(self._cause), f"the lease is {self.state}")
        return None

    def _is_one_too_many(self, reader: Reader) -> bool:
        return len(self._pulls) >= MAX_PULLS and reader.pull not in self._pulls

    def _hold(self, pull: _Pull, rank: int, now: float) -> Grant:
        pull.claims[rank] = now + self._ttl_s
        self.deadline = max(self.deadline, now + self._ttl_s)
        return Grant(self._ttl_s)

    def _enter(self, cause: str) -> None:
        entered = TRANSITIONS.get((self.state, cause))
        if entered is not None:
            self.state = entered
            self._cause = _CAUSES[cause]

    def _drain(self, now: float) -> None:
        if self.state is not LeaseState.CLOSING:
            return
        if all(end <= now for pull in self._pulls.values() for end in pull.claims.values()):
            self.state = TRANSITIONS[self.state, "drained"]
