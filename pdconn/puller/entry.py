"""A request in work at a decode rank: its state, its times, its alarm, what it makes of results."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdconn.lifecycle.pull import (
    Effect,
    Pull,
    PullState,
    SendClaim,
    SendConfirm,
    SendRenew,
    ToLender,
)
from pdconn.planning.errors import PlanningError
from pdconn.planning.gaps import NO_GAPS, Gaps
from pdconn.planning.plan import Moved, Need, Plan
from pdconn.protocol.messages import (
    Checksum,
    Claim,
    Confirm,
    Done,
    FromReader,
    Reader,
    Renew,
)
from pdconn.protocol.ticket import Ticket
from pdconn.puller.commands import ClaimOutcome, PullRecord
from pdconn.puller.peers import Peer
from pdconn.puller.reads import ReadSettled, Summed
from pdconn.puller.verification import Verification
from transport import ReadStats, TransportError


@dataclass(slots=True)
class Measured:
    """Times and sizes of a pull as they become known; clock readings in seconds."""

    claimed: float
    asked: float = 0.0
    granted: float = 0.0
    plan_s: float = 0.0
    plan_began: float = 0.0
    moved: Moved = field(default_factory=Moved)
    begins: tuple[tuple[int, int], ...] = ()
    num_descriptors: int = 0
    post_s: float = 0.0
    transfer_s: float = 0.0

    def add(self, stats: ReadStats) -> None:
        """One of the reads settled."""
        self.num_descriptors += stats.num_descriptors
        self.post_s = max(self.post_s, stats.post_s)
        self.transfer_s = max(self.transfer_s, stats.transfer_s)

    def record(self, request: str, now: float) -> PullRecord:
        """The pull was received at ``now``."""
        return PullRecord(
            request,
            self.moved,
            self.num_descriptors,
            self.granted - self.claimed,
            self.plan_s,
            self.plan_s if 0 < self.granted <= self.plan_began else 0.0,
            self.post_s,
            self.transfer_s,
            now - self.asked,
            now - self.claimed,
            self.begins,
        )


@dataclass(slots=True, eq=False)
class PullEntry:
    """A request: its machine, its lender, and what is in flight for it.

    Attributes:
        digest: the ticket's.
        plan: or why there is none.
        gaps: what the plan leaves of our blocks.
        reading: reads that have not settled.
        alarm: when the entry is looked at, at the latest.
        is_awaited: whether the engine is to be told what comes of the claim.
        told: the state of the machine that it was told of last.
    """

    request: str
    reader: Reader
    ticket: Ticket
    digest: bytes
    machine: Pull
    peer: Peer
    measured: Measured
    need: Need | None = None
    plan: Plan | str | None = None
    gaps: Gaps = NO_GAPS
    verification: Verification | None = None
    reading: int = 0
    error: str | None = None
    alarm: float | None = None
    is_awaited: bool = False
    told: PullState | None = None

    def message(self, effect: ToLender) -> FromReader:
        """What the lender is sent."""
        request = self.ticket.request_id
        if isinstance(effect, SendClaim):
            return Claim(effect.seq, request, self.reader, self.digest)
        if isinstance(effect, SendRenew):
            return Renew(effect.seq, request, self.reader)
        if isinstance(effect, SendConfirm):
            return Confirm(effect.seq, request, self.reader, self.digest)
        return Done(request, self.reader, self.digest)

    def claim_outcome(self) -> ClaimOutcome | None:
        """What the engine must be told of its claim now; nothing once it wants the blocks.

        From then on the pull is reported, received or failed.
        """
        machine = self.machine
        if not self.is_awaited or machine.wanted or machine.state is self.told:
            return None
        if machine.state not in (PullState.HELD, PullState.FAILED):
            return None
        self.told = machine.state
        reader = self.reader
        return ClaimOutcome(self.request, reader.pull, reader.rank, machine.reason)

    def make_plan(self, clock: Callable[[], float]) -> None:
        """Plan the reads; what is wrong with them is kept instead."""
        pairing = self.peer.pairing
        assert pairing is not None
        assert self.need is not None
        began = clock()
        try:
            plan = self.plan = pairing.plan(self.need, self.ticket.blocks)
            self.gaps = pairing.gaps(self.need)
        except (PlanningError, TransportError) as error:
            self.plan = f"{type(error).__name__}: {error}"
        else:
            measured = self.measured
            measured.moved, measured.begins, measured.plan_began = plan.moved, plan.begins, began
            measured.plan_s = clock() - began

    def settled(self, result: ReadSettled) -> list[Effect]:
        """One of the reads is over; the machine hears of the last one."""
        self.reading -= 1
        self.measured.add(result.settled.stats)
        error = result.settled.error
        if error is not None:
            self.error = self.error or f"{type(error).__name__}: {error}"
        return [] if self.reading else self.machine.settled(self.error, result.at)

    def heard_checksum(self, theirs: Checksum, now: float, counts: Counter[str]) -> list[Effect]:
        """The lender has told a checksum.

        Raises:
            MessageError: there was no such request, or it was answered before.
        """
        if self.verification is None:
            return []
        self.verification.heard(theirs.number, theirs.answer)
        if not self.verification.is_answered:
            return []
        return [*self.machine.answered(now), *self._compare(self.verification, now, counts)]

    def summed(self, ours: Summed, now: float, counts: Counter[str]) -> list[Effect]:
        """Our side's checksums are known, or why there are none."""
        assert self.verification is not None
        if ours.error is not None:
            return self.unverified(f"no checksum of ours: {ours.error}", now, counts)
        self.verification.ours = ours.answers
        return self._compare(self.verification, now, counts)

    def unverified(self, why: str, now: float, counts: Counter[str]) -> list[Effect]:
        """There will be no checksums to compare."""
        counts["pulls_unverified"] += 1
        return self.machine.verified(f"unverified: {why}", now)

    def _compare(self, known: Verification, now: float, counts: Counter[str]) -> list[Effect]:
        if not known.is_complete:
            return []
        problem = known.problem()
        counts["pulls_verified" if problem is None else "pulls_corrupted"] += 1
        return self.machine.verified(problem, now)


class PullAlarms:
    """When the machines of ``entries``, by pull, must be ticked.

    One alarm of an entry counts, and it may be too early: what was put off is set anew when it is
    the next to ring, which costs less than to find it in the heap before.
    """

    def __init__(self, entries: Mapping[str, PullEntry]) -> None:
        self._entries = entries
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, entry: PullEntry) -> None:
        """Tick the entry at its machine's deadline, or sooner."""
        deadline = entry.machine.next_deadline()
        if deadline is not None and (entry.alarm is None or deadline < entry.alarm):
            heapq.heappush(self._heap, (deadline, entry.reader.pull))
            entry.alarm = deadline

    def first(self) -> float | None:
        """When the next machine must be ticked, not sooner; None when only events can matter."""
        entry = self._next()
        return None if entry is None else entry.alarm

    def due(self, now: float) -> list[PullEntry]:
        """Take the entries to tick at ``now``; their alarms are over."""
        due = []
        while (entry := self._next()) is not None and self._heap[0][0] <= now:
            heapq.heappop(self._heap)
            entry.alarm = None
            due.append(entry)
        return due

    def _next(self) -> PullEntry | None:
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
            self.set(entry)
        return None
