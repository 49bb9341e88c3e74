"""A pull: one rank's copy of one request's KV, from ticket to report.

::

    GREETING ──greeted──► CLAIMING ──granted──► HELD ──wanted──► READING ──copied──► VERIFYING
                                                  │              ▲ │   │                 │
                                                early      completed│ settled         verified
                                                  ▼              │ ▼   └──► CONFIRMING ◄─┘
                                               FOLLOWING ────────┘failed        │
                                                  │                ▼        confirmed
                                                  └─failed─► DRAINING           ▼
                                                             │  │              DONE
                                         QUARANTINED ◄─waited┘settled
                                              └─settled─► FAILED ◄┘

    GREETING, CLAIMING, HELD, VERIFYING, CONFIRMING ──failed──► FAILED

A pull claims its lease as soon as the request is known, and renews the claim while the request
waits in the engine's queue.  It reads once the engine has blocks for it (*wanted*).  It is reported
received only if the read settled before the deadline of the claim, if, with ``verify``, the
lender's checksums equal ours (VERIFYING), and if the lender confirms after the read that the claim
held until then (CONFIRMING).

A pull with an early ticket follows a request that is still being computed.  If its blocks are
wanted *early*, before the lender has announced all of them, it is FOLLOWING: it reads what was
announced, as often as there is more, and the rest once all is announced (*completed*).

A pull that fails while a read can still write, as by another read that has failed, is DRAINING: it
reads nothing more, and is reported failed when the read settles, or after ``drain_s``.  In the
latter case its blocks are quarantined: the engine does not use them until the read settles and they
are *released*.

Pure: time is an argument, effects are returned.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

RENEWALS_PER_TTL = 3
"""A renewal is sent after a third of the time-to-live, so two may be lost."""

RENEWS_ALONG_FROM = 2 / 3
"""Of the wait for a renewal: after this share it is sent along with a renewal that is due.

So a pull renews at most 1.5 times as often as it would alone, and the messages to one lender are
more than a third of a wait apart, however many pulls hold claims there.
"""

MIN_RENEWAL_S = 0.05
"""A pull waits for its next renewal for at least a third of this."""

_EXPIRED = "the claim expired and no renewal was answered"


class PullState(StrEnum):
    """Where a pull stands."""

    GREETING = "greeting"
    CLAIMING = "claiming"
    HELD = "held"
    FOLLOWING = "following"
    READING = "reading"
    VERIFYING = "verifying"
    CONFIRMING = "confirming"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    DONE = "done"
    FAILED = "failed"


ENDED = frozenset((PullState.DONE, PullState.FAILED))
"""States that no event leaves."""

_RENEWING = frozenset((PullState.HELD, PullState.FOLLOWING, PullState.READING, PullState.VERIFYING))


TRANSITIONS: dict[tuple[PullState, str], PullState] = {
    (PullState.GREETING, "greeted"): PullState.CLAIMING,
    (PullState.GREETING, "failed"): PullState.FAILED,
    (PullState.CLAIMING, "granted"): PullState.HELD,
    (PullState.CLAIMING, "failed"): PullState.FAILED,
    (PullState.HELD, "granted"): PullState.HELD,
    (PullState.HELD, "wanted"): PullState.READING,
    (PullState.HELD, "early"): PullState.FOLLOWING,
    (PullState.HELD, "failed"): PullState.FAILED,
    (PullState.FOLLOWING, "granted"): PullState.FOLLOWING,
    (PullState.FOLLOWING, "completed"): PullState.READING,
    (PullState.FOLLOWING, "failed"): PullState.DRAINING,
    (PullState.READING, "granted"): PullState.READING,
    (PullState.READING, "settled"): PullState.CONFIRMING,
    (PullState.READING, "copied"): PullState.VERIFYING,
    (PullState.READING, "failed"): PullState.DRAINING,
    (PullState.VERIFYING, "granted"): PullState.VERIFYING,
    (PullState.VERIFYING, "verified"): PullState.CONFIRMING,
    (PullState.VERIFYING, "failed"): PullState.FAILED,
    (PullState.CONFIRMING, "confirmed"): PullState.DONE,
    (PullState.CONFIRMING, "failed"): PullState.FAILED,
    (PullState.DRAINING, "settled"): PullState.FAILED,
    (PullState.DRAINING, "waited"): PullState.QUARANTINED,
    (PullState.QUARANTINED, "settled"): PullState.FAILED,
}
"""All transitions of a pull; any other event leaves the state as it is."""


@dataclass(frozen=True, slots=True)
class SendClaim:
    """Claim the lease; the answer repeats ``seq``."""

    seq: int


@dataclass(frozen=True, slots=True)
class SendRenew:
    """Renew the claim; the answer repeats ``seq``."""

    seq: int


@dataclass(frozen=True, slots=True)
class SendConfirm:
    """Ask the lender whether the claim held while we read; the answer repeats ``seq``."""

    seq: int


@dataclass(frozen=True, slots=True)
class SendDone:
    """Report to the lender that this rank reads no more."""


@dataclass(frozen=True, slots=True)
class StartRead:
    """Plan and post the reads: of what was announced, if the pull is FOLLOWING, else of the rest.

    The answer is ``settled``, when no read is in flight.
    """


@dataclass(frozen=True, slots=True)
class AskChecksums:
    """Ask the lender for the checksums of the bytes that were read."""


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """Every byte has arrived, and the lender has confirmed that the blocks were lent until then."""


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """The bytes have not arrived, or are not valid.

    ``quarantined``: a read can still write to the blocks, until :class:`ReportReleased`.
    """

    reason: str
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class ReportReleased:
    """The last read of a quarantined pull has settled: nothing can write to its blocks."""


ToLender = SendClaim | SendRenew | SendConfirm | SendDone
"""Effects that send a message."""

Effect = ToLender | StartRead | AskChecksums | ReportReceived | ReportFailed | ReportReleased


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a pull waits, in seconds.

    Attributes:
        claim_s: for each answer of the lender (greeting, claim, checksum, confirmation).
        read_s: for our transport to connect, for its reads, and for our own checksums.
        drain_s: for the reads of a failed pull, before its blocks are quarantined.
    """

    claim_s: float = 10.0
    read_s: float = 120.0
    drain_s: float = 5.0


class Pull:
    """One rank's pull.

    Args:
        patience: its time limits.
        now: seconds of any steady clock.
        verify: whether to compare checksums after the read.
        follows: whether the lender announces the blocks while it computes them.

    ``want`` may be called at any time before the end.  A failure before it is kept, and reported
    once the engine wants the blocks, or never if the engine cancels.

    Attributes:
        state: where the pull stands.
        wanted: whether the engine waits for a report.
        is_complete: whether all blocks were announced, as by a ticket.
        asks_at: when the engine is to be asked for blocks, if it is not yet; the owner decides.
    """

    __slots__ = (
        "_deadline", "_is_parked", "_patience", "_reason", "_renew_at", "_renew_from", "_sent",
        "_seq", "_verify", "_wait_until", "asks_at", "is_complete", "state", "wanted",
    )  # fmt: skip

    def __init__(
        self, patience: Patience, now: float, verify: bool = False, *, follows: bool = False
    ) -> None:
        self.state = PullState.GREETING
        self._patience = patience
        self._verify = verify
        self._wait_until = now + patience.claim_s
        self._deadline = now
        self._renew_at: float | None = None
        self._renew_from = now
        self._sent: dict[int, float] = {}
        self._seq = 0
        self.wanted = False
        self.is_complete = not follows
        self.asks_at: float | None = None
        self._is_parked = False
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why it failed."""
        return self._reason

    def welcomed(self, now: float) -> list[Effect]:
        """The lender has answered the greeting and fits; our transport connects to it."""
        if self.state is PullState.GREETING:
            self._wait_until = now + self._patience.read_s
        return []

    def greeted(self, now: float) -> list[Effect]:
        """Our transport has connected to the lender."""
        if not self._enter("greeted"):
            return []
        self._wait_until = now + self._patience.claim_s
        return [SendClaim(self._next_seq(now))]

    def granted(self, seq: int, ttl_s: float, now: float) -> list[Effect]:
        """The lender has granted claim or renewal ``seq``; answers to older ones are ignored."""
        # The deadline counts from sending, so it passes here before it passes at the lender if both
        # clocks run alike.  It only saves reads that could not be confirmed: a frozen virtual
        # machine sees no time pass, and a slewed clock runs slow or fast, so what was read is
        # valid only once the lender has confirmed it.
        sent = self._sent.get(seq)
        if sent is None or (self.state, "granted") not in TRANSITIONS:
            return []
        self._sent = {other: at for other, at in self._sent.items() if other > seq}
        self._deadline = max(self._deadline, sent + ttl_s)
        self._await_renewal(sent, ttl_s)
        if now >= self._deadline and self._is_parked:
            # The lender grants it later than it was asked; a renewal is granted at once.
            self._is_parked = False
            return self._send_renewal(now)
        if self.state is PullState.CLAIMING:
            self._wait_until = now + self._patience.read_s
        self._enter("granted")
        if now >= self._deadline:  # a grant that arrives after its own deadline
            return self.fail("the claim had expired when its grant arrived", now)
        return self._read_if_wanted(now)

    def parked(self, seq: int, ttl_s: float, now: float) -> list[Effect]:
        """The lender awaits the request that claim ``seq`` is for, for ``ttl_s`` seconds.

        It is believed once, and for as long as a read may take.
        """
        if self.state is PullState.CLAIMING and seq in self._sent and not self._is_parked:
            self._wait_until = now + min(ttl_s, self._patience.read_s) + self._patience.claim_s
            self._is_parked = True
        return []

    def grew(self, now: float) -> list[Effect]:
        """The lender has announced more blocks."""
        if self.is_complete:
            return []
        if self.state is PullState.HELD:
            self._wait_until = now + self._patience.read_s
        elif self.state is PullState.FOLLOWING:
            self._wait_until = now + self._patience.read_s
            return [StartRead()]
        return []

    def completed(self, now: float) -> list[Effect]:
        """The lender has announced all blocks, and made a ticket for them."""
        self.is_complete = True
        if not self._enter("completed"):
            return []
        self._wait_until = now + self._patience.read_s
        return [StartRead()]

    def want(self, now: float) -> list[Effect]:
        """The engine has blocks for this pull and waits for a report."""
        self.wanted = True
        if self.state is PullState.FAILED:
            return [ReportFailed(self._reason or "failed")]
        if self.state is PullState.HELD and now >= self._deadline:
            return self.fail(_EXPIRED, now)
        return self._read_if_wanted(now)

    def settled(self, now: float) -> list[Effect]:
        """No read of this pull can write any longer, as observed at ``now``.

        If one of them has failed, so has the pull, before.
        """
        if self.state is PullState.READING:
            return self._copied(now)
        was = self.state
        if not self._enter("settled"):
            return []
        if was is PullState.QUARANTINED:
            return [SendDone(), ReportReleased()]
        return [SendDone(), ReportFailed(self._reason or "failed")]

    def answered(self, now: float) -> list[Effect]:
        """The lender's checksums have arrived; ours may still be computed."""
        if self.state is PullState.VERIFYING:
            self._wait_until = now + self._patience.read_s
        return []

    def verified(self, problem: str | None, now: float) -> list[Effect]:
        """The checksums have been compared; ``problem``: how they differ, or None."""
        if problem is not None:
            return self.fail(problem, now) if self.state is PullState.VERIFYING else []
        return self._confirm(now) if self._enter("verified") else []

    def confirmed(self, seq: int) -> list[Effect]:
        """The lender has confirmed that the claim held until it received request ``seq``."""
        if seq != self._seq or not self._enter("confirmed"):
            return []
        return [ReportReceived()]

    def fail(self, reason: str, now: float, notify: bool = True) -> list[Effect]:
        """The pull cannot succeed.  ``notify``: whether to send the lender a Done."""
        if (self.state, "failed") not in TRANSITIONS:
            return []
        self._reason = reason
        if self._enter("failed") is PullState.DRAINING:
            self._wait_until = now + self._patience.drain_s
            return []
        done: list[Effect] = [SendDone()] if notify else []
        return [*done, ReportFailed(reason)] if self.wanted else done

    def abandon(self, reason: str, now: float) -> list[Effect]:
        """Fail the pull, and quarantine its blocks at once if a read can still write to them."""
        effects = self.fail(reason, now)
        if self.state is PullState.DRAINING:
            self._wait_until = now
            effects += self.tick(now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Renew the claim or fail the pull, as is due at ``now``."""
        state = self.state
        if state in (PullState.GREETING, PullState.CLAIMING) and now >= self._wait_until:
            return self.fail(f"no answer to the claim while {state}", now)
        if state is PullState.VERIFYING and now >= self._wait_until:
            return self.fail("no checksum of what was lent", now)
        if state is PullState.CONFIRMING:
            return [] if now < self._wait_until else self.fail("the read was not confirmed", now)
        if state is PullState.DRAINING and now >= self._wait_until:
            self._enter("waited")
            return [ReportFailed(self._reason or "failed", quarantined=True)]
        return self._tick_claim(now) if state in _RENEWING else []

    def renew_along(self, now: float) -> list[Effect]:
        """Renew along with a pull of the same lender that is due, if most of our wait is over.

        ::

            first   ├─────────────────────► due: renews
            second       ├─────────────────────►  two thirds are over: renews too
            third                   ├─────────────────────►  not yet
        """
        # A message costs the lender more than what it contains, so renewals share messages.
        if self._renew_at is None or now < self._renew_from:
            return []
        return self._send_renewal(now) if self.state in _RENEWING and now < self._deadline else []

    def next_deadline(self) -> float | None:
        """When :meth:`tick` may have an effect, or None when only an event can."""
        if self.state in ENDED or self.state is PullState.QUARANTINED:
            return None
        if self.state not in _RENEWING:
            return self._wait_until
        times = [self._deadline] if self._renew_at is None else [self._renew_at, self._deadline]
        if self.state is not PullState.HELD or not self.is_complete:
            times.append(self._wait_until)
        if self.asks_at is not None:
            times.append(self.asks_at)
        return min(times)

    def _copied(self, now: float) -> list[Effect]:
        """Verify, confirm, or fail after the read has settled."""
        if now < self._deadline:
            if not self._verify:
                self._enter("settled")
                return self._confirm(now)
            self._enter("copied")
            self._wait_until = now + self._patience.claim_s
            return [AskChecksums()]
        self.fail(f"settled {now - self._deadline:.3f} s after the claim expired", now)
        return self.settled(now)

    def _confirm(self, now: float) -> list[Effect]:
        self._wait_until = now + self._patience.claim_s
        return [SendConfirm(self._next_seq(now))]

    def _tick_claim(self, now: float) -> list[Effect]:
        if now >= self._deadline:
            return self.fail(_EXPIRED, now)
        if self.state is PullState.READING and now >= self._wait_until:
            return self.fail(f"the read did not end in {self._patience.read_s:g} s", now)
        if not self.is_complete and now >= self._wait_until:
            return self.fail(f"prefill announced nothing in {self._patience.read_s:g} s", now)
        return self._renew(now)

    def _renew(self, now: float) -> list[Effect]:
        if self._renew_at is None or now < self._renew_at:
            return []
        return self._send_renewal(now)

    def _send_renewal(self, now: float) -> list[Effect]:
        self._await_renewal(now, max(self._deadline - now, MIN_RENEWAL_S))
        return [SendRenew(self._next_seq(now))]

    def _await_renewal(self, sent: float, left_s: float) -> None:
        """Schedule the renewal after one sent at ``sent``, ``left_s`` before the deadline."""
        wait_s = left_s / RENEWALS_PER_TTL
        self._renew_at = sent + wait_s
        self._renew_from = sent + RENEWS_ALONG_FROM * wait_s

    def _read_if_wanted(self, now: float) -> list[Effect]:
        if not self.wanted or not self._enter("wanted" if self.is_complete else "early"):
            return []
        self._wait_until = now + self._patience.read_s
        return [StartRead()]

    def _next_seq(self, now: float) -> int:
        self._seq += 1
        self._sent[self._seq] = now
        return self._seq

    def _enter(self, event: str) -> PullState | None:
        entered = TRANSITIONS.get((self.state, event))
        if entered is not None:
            self.state = entered
        return entered


class TickedPull(Protocol):
    """Whatever has the machine of a pull, by the name ``pull``; ``alarm``: when it is ticked."""

    pull: str
    machine: Pull
    alarm: float | None


P = TypeVar("P", bound=TickedPull)


class PullAlarms(Generic[P]):
    """When the machines of ``entries``, by pull, must be ticked.

    One alarm of an entry counts, and it may be too early: what was put off is set anew when it is
    the next to ring, which costs less than to find it in the heap before.
    """

    def __init__(self, entries: Mapping[str, P]) -> None:
        self._entries = entries
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def set_alarm(self, entry: P) -> None:
        """Tick the entry at its machine's deadline, or sooner."""
        deadline = entry.machine.next_deadline()
        if deadline is not None and (entry.alarm is None or deadline < entry.alarm):
            heapq.heappush(self._heap, (deadline, entry.pull))
            entry.alarm = deadline

    def first_alarm(self) -> float | None:
        """When the next machine must be ticked, not sooner; None when only events can matter."""
        entry = self._next()
        return None if entry is None else entry.alarm

    def take_due(self, now: float) -> list[P]:
        """Take the entries to tick at ``now``; their alarms are over."""
        due = []
        while (entry := self._next()) is not None and self._heap[0][0] <= now:
            heapq.heappop(self._heap)
            entry.alarm = None
            due.append(entry)
        return due

    def _next(self) -> P | None:
        """The entry whose alarm rings first, after what would ring for nothing is dropped."""
        while self._heap:
            at, pull = self._heap[0]
            entry = self._entries.get(pull)
            if entry is None or entry.alarm != at:
                heapq.heappop(self._heap)
                continue
            deadline = entry.machine.next_deadline()
            if deadline is not None and deadline <= at:
                return entry
            heapq.heappop(self._heap)
            entry.alarm = None
            self.set_alarm(entry)
        return None
