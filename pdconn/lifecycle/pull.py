"""A pull: one rank's copy of one request's KV, from ticket to report.

::

    GREETING ──greeted──► CLAIMING ──granted──► HELD ──wanted──► READING ──settled──► DONE
        │                     │                   │                  │
        └────────failed───────┴───────failed──────┴──────────────────┼──failed──► DRAINING
                              ▼                                      │               │
                           FAILED ◄──────────────────────────────────┴─────settled───┘

The claim is taken as soon as the request is known and renewed while it waits in
the engine's queue; reading starts when the engine has blocks for it (*wanted*).
Nothing is reported while a read can still write (DRAINING), and nothing is
reported received unless the read settled before the deadline of its claim.

The deadline counts from *sending* the claim or renewal that was granted, so it is
over here before it is over at the lender.

Pure: time is an argument, effects are returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

RENEWALS_PER_TTL = 3
"""A renewal is sent when a third of the time is gone, so two may be lost."""


class PullState(StrEnum):
    """Where a pull stands."""

    GREETING = "greeting"
    CLAIMING = "claiming"
    HELD = "held"
    READING = "reading"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self in (PullState.DONE, PullState.FAILED)


TRANSITIONS: dict[tuple[PullState, str], PullState] = {
    (PullState.GREETING, "greeted"): PullState.CLAIMING,
    (PullState.GREETING, "failed"): PullState.FAILED,
    (PullState.CLAIMING, "granted"): PullState.HELD,
    (PullState.CLAIMING, "failed"): PullState.FAILED,
    (PullState.HELD, "granted"): PullState.HELD,
    (PullState.HELD, "wanted"): PullState.READING,
    (PullState.HELD, "failed"): PullState.FAILED,
    (PullState.READING, "granted"): PullState.READING,
    (PullState.READING, "settled"): PullState.DONE,
    (PullState.READING, "failed"): PullState.DRAINING,
    (PullState.DRAINING, "settled"): PullState.FAILED,
}
"""The whole life of a pull; anything else leaves the state as it is."""


@dataclass(frozen=True, slots=True)
class SendClaim:
    """Claim the lease; the answer carries ``seq``."""

    seq: int


@dataclass(frozen=True, slots=True)
class SendRenew:
    """Renew the claim; the answer carries ``seq``."""

    seq: int


@dataclass(frozen=True, slots=True)
class SendDone:
    """Tell the lender that this rank will read no more."""

    ok: bool


@dataclass(frozen=True, slots=True)
class StartRead:
    """Plan and post the reads."""


@dataclass(frozen=True, slots=True)
class Received:
    """Every byte is there and was lent while it was read."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The bytes are not there, or cannot be believed."""

    reason: str


Effect = SendClaim | SendRenew | SendDone | StartRead | Received | Failed


class Pull:
    """One rank's pull.

    Args:
        claim_timeout_s: how long greeting and claiming may take together.
        now: seconds of any steady clock.

    ``wanted`` may come at any time before the end; failing before it is kept and
    reported once the engine asks for the blocks, or never when it cancels.
    """

    __slots__ = (
        "_claim_by", "_deadline", "_reason", "_renew_at", "_sent", "_seq", "_wanted", "state"
    )  # fmt: skip

    def __init__(self, claim_timeout_s: float, now: float) -> None:
        self.state = PullState.GREETING
        self._claim_by = now + claim_timeout_s
        self._deadline = now
        self._renew_at: float | None = None
        self._sent: dict[int, float] = {}
        self._seq = 0
        self._wanted = False
        self._reason: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether the engine waits for a report."""
        return self._wanted

    def greeted(self, now: float) -> list[Effect]:
        """The lender's geometry is known and fits."""
        if not self._enter("greeted"):
            return []
        return [SendClaim(self._next_seq(now))]

    def granted(self, seq: int, ttl_s: float, now: float) -> list[Effect]:
        """The lender answered claim or renewal ``seq``; others are ignored as late."""
        sent = self._sent.get(seq)
        if sent is None or (self.state, "granted") not in TRANSITIONS:
            return []
        self._sent = {other: at for other, at in self._sent.items() if other > seq}
        self._deadline = max(self._deadline, sent + ttl_s)
        self._renew_at = sent + ttl_s / RENEWALS_PER_TTL
        self._enter("granted")
        return self._read_if_wanted()

    def want(self, now: float) -> list[Effect]:
        """The engine has blocks for this pull and waits for a report."""
        self._wanted = True
        if self.state is PullState.FAILED:
            return [Failed(self._reason or "failed")]
        return self._read_if_wanted()

    def settled(self, error: str | None, now: float) -> list[Effect]:
        """No read of this pull can write any more; ``now`` is when that was seen."""
        was = self.state
        if not self._enter("settled"):
            return []
        if was is PullState.READING:
            if error is None and now < self._deadline:
                return [SendDone(ok=True), Received()]
            late = f"settled {now - self._deadline:.3f} s after the claim was over"
            self.state = PullState.FAILED
            self._reason = late if error is None else error
        return [SendDone(ok=False), Failed(self._reason or "failed")]

    def fail(self, reason: str, tell: bool = True) -> list[Effect]:
        """The pull cannot succeed; ``tell`` whether the lender is to hear that."""
        if self.state.ended or self.state is PullState.DRAINING:
            return []
        self._reason = reason
        if self._enter("failed") is PullState.DRAINING:
            return []
        done: list[Effect] = [SendDone(ok=False)] if tell else []
        return [*done, Failed(reason)] if self._wanted else done

    def tick(self, now: float) -> list[Effect]:
        """Time passed: renew, or give up."""
        if self.state in (PullState.GREETING, PullState.CLAIMING) and now >= self._claim_by:
            return self.fail(f"no answer to the claim while {self.state}")
        if self.state is PullState.HELD and now >= self._deadline:
            return self.fail("the claim ran out and no renewal was answered")
        renewing = self.state in (PullState.HELD, PullState.READING)
        if renewing and self._renew_at is not None and now >= self._renew_at:
            self._renew_at = now + max(self._deadline - now, 0.05) / RENEWALS_PER_TTL
            return [SendRenew(self._next_seq(now))] if now < self._deadline else []
        return []

    def next_deadline(self) -> float | None:
        """When ``tick`` may do something, or None when only an event can."""
        if self.state.ended or self.state is PullState.DRAINING:
            return None
        if self.state in (PullState.GREETING, PullState.CLAIMING):
            return self._claim_by
        times = [self._renew_at] if self._renew_at is not None else []
        if self.state is PullState.HELD:
            times.append(self._deadline)
        return min(times, default=None)

    def _read_if_wanted(self) -> list[Effect]:
        return [StartRead()] if self._wanted and self._enter("wanted") else []

    def _next_seq(self, now: float) -> int:
        self._seq += 1
        self._sent[self._seq] = now
        return self._seq

    def _enter(self, event: str) -> PullState | None:
        entered = TRANSITIONS.get((self.state, event))
        if entered is not None:
            self.state = entered
        return entered
