"""The pull of a request: its ticket or stream, its plan, its checksums, and what was measured.

The machine of :mod:`pdconn.lifecycle.pull` decides; this is what it decides about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pdconn.lifecycle import pull as machine
from pdconn.lifecycle.pull import Effect, Patience, Pull, PullState, ToLender
from pdconn.planning import cover
from pdconn.planning.plan import Moved, Need, Plan
from pdconn.planning.planning_errors import PlanningError
from pdconn.protocol import messages
from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import Checksum, FromReader, Reader
from pdconn.protocol.ticket import Ticket, check_blocks
from pdconn.puller.commands import ClaimOutcome, ClaimTicket, ExpectedPull, PullRecord
from pdconn.puller.following import FollowedStream
from pdconn.puller.peers import Peer, PeerPull, Rank
from pdconn.puller.reads import Summed
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
    completed: float | None = None
    early_nbytes: int = 0
    run: tuple[float, int] = (0.0, 0)

    def begin_run(self, now: float) -> None:
        """The first of some reads that overlap is posted: a run begins."""
        self.run = now, 0

    def take_run(self, now: float) -> tuple[int, float]:
        """All reads have settled: returns the bytes and the seconds of the run."""
        began, nbytes = self.run
        return nbytes, now - began

    def add_read(self, stats: ReadStats) -> None:
        """One of the reads settled."""
        self.run = self.run[0], self.run[1] + stats.nbytes
        self.num_descriptors += stats.num_descriptors
        self.post_s = max(self.post_s, stats.post_s)
        self.transfer_s = max(self.transfer_s, stats.transfer_s)

    def record(self, request: str, num_blocks: int, now: float) -> PullRecord:
        """The pull was received at ``now``."""
        completed = self.claimed if self.completed is None else self.completed
        return PullRecord(
            request=request,
            moved=self.moved,
            num_descriptors=self.num_descriptors,
            claim_s=self.granted - self.claimed,
            plan_s=self.plan_s,
            plan_wait_s=self.plan_s if 0 < self.granted <= self.plan_began else 0.0,
            post_s=self.post_s,
            transfer_s=self.transfer_s,
            total_s=now - self.asked,
            age_s=now - self.claimed,
            visible_s=now - max(self.asked, completed),
            begins=self.begins,
            early_s=max(0.0, completed - self.asked),
            early_nbytes=self.early_nbytes,
            num_blocks=num_blocks,
            is_followed=self.completed is not None,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class RequestPull(PeerPull):
    """The pull of a request, of what its ticket names.

    Attributes:
        ticket: None until the lender has named the request of an early ticket.
        digest: of the ticket; of the early one until it is complete.
        stream: what an early ticket names; None with a ticket.
        beside: what a store loads meanwhile; None once it has ended.
        missing: what it has not loaded, and no plan reads yet.
        is_awaited: whether the engine hears what comes of the claim; ``told``: the state it knows,
            and whether the ticket was complete.
    """

    is_requested: ClassVar[bool] = True

    request: str
    reader: Reader
    ticket: Ticket | None
    digest: bytes
    measured: Measured
    stream: FollowedStream | None = None
    need: Need | None = None
    beside: Need | None = None
    missing: Need | None = None
    is_planned: bool = False
    verification: Verification | None = None
    is_awaited: bool = False
    told: tuple[PullState, bool] | None = None

    @classmethod
    def claiming(
        cls,
        command: ClaimTicket,
        peer: Peer,
        me: Rank,
        patience: Patience,
        *,
        verify: bool,
        at: float,
    ) -> RequestPull:
        """The pull for ``command``, whose claim is not sent yet."""
        given = command.ticket
        stream = FollowedStream(given, peer.rates) if isinstance(given, EarlyTicket) else None
        return cls(
            pull=command.pull,
            machine=Pull(patience, at, verify, follows=stream is not None),
            peer=peer,
            request=command.request,
            reader=Reader(command.pull, me.rank, me.of),
            ticket=None if isinstance(given, EarlyTicket) else given,
            digest=given.digest(),
            measured=Measured(claimed=at),
            stream=stream,
            is_awaited=command.is_awaited,
        )

    @property
    def is_written(self) -> bool:
        """Whether something can write to its blocks: a read, or the store."""
        return self.reading > 0 or self.beside is not None

    def end_beside(self, loaded: Need) -> None:
        """The store has ended: what it has not loaded of ``beside`` is to be read, too."""
        asked, self.beside = self.beside, None
        assert asked is not None
        assert self.need is not None
        left = cover.left_of(asked, loaded)
        if not any(left.tokens):
            return
        if self.is_planned:
            self.missing = left
        self.need = cover.with_left(left, self.need)

    def take_missing_plan(self) -> Plan | None:
        """The reads of what the store has not loaded; None if there are none, or not yet.

        Raises:
            PlanningError, TransportError: as :meth:`pdconn.planning.plan.Pairing.plan`.
        """
        if self.missing is None or self.ticket is None or not self.machine.is_complete:
            return None
        assert self.peer.pairing is not None
        missing, self.missing = self.missing, None
        plan, known = self.peer.pairing.plan(missing, self.ticket.blocks), self.measured
        # To the plan of the rest, these tokens were held.
        moved, full = known.moved, plan.moved.full
        hits = moved.saved_by_hits - full
        known.moved = replace(moved, full=moved.full + full, saved_by_hits=hits)
        return plan

    def message(self, effect: ToLender) -> FromReader:
        """What the lender is sent."""
        if self.ticket is None:
            assert self.stream is not None
            name = self.stream.early.stream
            if isinstance(effect, machine.SendClaim):
                return messages.Follow(effect.seq, name, self.reader)
            return messages.Done(name, self.reader, self.digest)
        request = self.ticket.request_id
        if isinstance(effect, machine.SendClaim):
            return messages.Claim(effect.seq, request, self.reader, self.digest)
        if isinstance(effect, machine.SendRenew):
            return messages.Renew(effect.seq, request, self.reader)
        if isinstance(effect, machine.SendConfirm):
            return messages.Confirm(effect.seq, request, self.reader, self.digest)
        return messages.Done(request, self.reader, self.digest)

    def record(self, now: float) -> PullRecord:
        """The pull was received at ``now``."""
        blocks = () if self.need is None else self.need.blocks
        num_blocks = sum(1 for group in blocks for block in group.ids if block)
        return self.measured.record(self.request, num_blocks, now)

    def claim_outcome(self, now: float) -> ClaimOutcome | None:
        """What the engine must hear of its claim now."""
        pull, reader = self.machine, self.reader
        # Once the blocks are wanted, it is the pull that is reported, received or failed.
        known = pull.state, pull.is_complete
        if not self.is_awaited or pull.wanted or known == self.told:
            return None
        if pull.state not in (PullState.HELD, PullState.FAILED):
            return None
        if pull.state is PullState.HELD and self._asks_later(now):
            return None
        self.told = known
        ticket = None if self.stream is None else self.ticket
        return ClaimOutcome(self.request, reader.pull, reader.rank, pull.reason, ticket)

    def _asks_later(self, now: float) -> bool:
        """Whether it is too early for blocks for a request that is still being computed."""
        pull, pairing = self.machine, self.peer.pairing
        pull.asks_at = None
        if self.stream is None or pull.is_complete or pairing is None:
            return False
        due = self.stream.blocks_due_at(pairing, now)
        if due is not None and due <= now:
            return False
        pull.asks_at = due
        return True

    def expected(self, now: float) -> ExpectedPull | None:
        """For how long nothing will come of the pull; None if that is not known."""
        pull, stream = self.machine, self.stream
        if stream is None or stream.pace is None or pull.is_complete:
            return None
        if pull.state not in (PullState.HELD, PullState.FOLLOWING):
            return None
        until = stream.pace.expected_end(now) if pull.asks_at is None else pull.asks_at
        if until is None:
            return None
        return ExpectedPull(self.request, self.reader.pull, self.reader.rank, until - now)

    def make_plan(self, clock: Callable[[], float]) -> None:
        """As :meth:`pdconn.puller.peers.PeerPull.make_plan`."""
        pairing = self.peer.pairing
        assert pairing is not None
        assert self.need is not None
        began, known, self.is_planned = clock(), self.measured, True
        try:
            if self.stream is None:
                assert self.ticket is not None
                plan = pairing.plan(self.need, self.ticket.blocks)
            elif (announced := self.stream.next_plan(pairing, self.need)) is not None:
                plan = announced
            else:
                return
            self.plan = plan
            if not known.plan_began:
                self.gaps = pairing.gaps(self.need)
        except (PlanningError, TransportError) as error:
            self.plan = f"{type(error).__name__}: {error}"
        else:
            known.moved, known.begins = plan.moved, plan.begins
            known.plan_began, known.plan_s = began, known.plan_s + clock() - began

    def heard_of_stream(self, message: messages.StreamReply, now: float) -> list[Effect]:
        """The lender has sent something of the request that is followed.

        Raises:
            ProtocolError: at the wrong time, or not what it has announced.
        """
        stream = self.stream
        if stream is None:
            raise MessageError("message", "no stream", type(message).__name__.lower())
        if isinstance(message, messages.Parked):
            return self.machine.parked(message.seq, message.ttl_ms / 1000, now)
        if isinstance(message, messages.Opened):
            self.ticket = stream.open_stream(message)
            return []
        if isinstance(message, messages.Grown):
            if self.peer.pairing is None:
                raise MessageError("grown", "after the greeting", "before it")
            is_news = stream.grow(message, self.peer.pairing, now)
            return self.machine.grew(now) if is_news else []
        ticket = self.ticket = stream.complete(message, now)
        if self.measured.completed is None:
            self.measured.completed, self.measured.early_nbytes = now, stream.nbytes_read
        self.digest = ticket.digest()
        if self.peer.pairing is not None:
            check_blocks(ticket.blocks, self.peer.pairing.lent_num_blocks)
        return self.machine.completed(now)

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
