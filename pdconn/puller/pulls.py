"""The pulls of one decode rank, and each request in work, without threads and sockets.

::

    engine ── commands ──► ┌───────┐ ── claim, renew, confirm ──► peers
           ◄── reports ─── │ Pulls │ ◄── granted, refused, … ────
                           └───────┘ ── jobs ──► reader ── results ──►

Every pull has a machine (:mod:`pdconn.lifecycle.pull`); the effects that it returns are
performed here, of a request's pull and of one that warms a lender up.  Nothing waits: the
owner calls with what happened and with the time, a thread with sockets in an engine, a loop
over virtual time in a simulation.  Nothing re-enters: performing an effect returns those that
follow from it; what happens to a peer is an event in the peer table, and each call ends by
handling those (:meth:`Pulls._drain`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pdconn.lifecycle import pull as machine
from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import (
    ENDED,
    Effect,
    Patience,
    Pull,
    PullAlarms,
    PullState,
    ToLender,
)
from pdconn.planning.plan import NO_GAPS, Moved, Need, Plan
from pdconn.planning.planning_errors import PlanningError
from pdconn.protocol import messages
from pdconn.protocol.errors import MessageError, TicketError
from pdconn.protocol.messages import Checksum, FromReader, PullReply, Reader
from pdconn.protocol.ticket import Ticket, check_blocks
from pdconn.puller.commands import (
    AbandonPull,
    ClaimOutcome,
    ClaimTicket,
    Command,
    CompareAnew,
    FailedPull,
    FailPull,
    PullRecord,
    ReadBlocks,
    Released,
    Report,
)
from pdconn.puller.peers import (
    MAX_PEERS,
    Dialer,
    Peer,
    PeerClosed,
    PeerKey,
    PeerPull,
    PeerReplied,
    PeerTable,
    PeerWelcomed,
    Rank,
)
from pdconn.puller.reads import Connected, Job, JobResult, Read, ReadSettled, Sum, Summed
from pdconn.puller.verification import CannotVerify, Verification, Verifier, Verify
from pdconn.puller.warmup import PagePull, PeerWarmup, WarmUp
from transport import PeerLost, PeerUnknown, ReadStats, TransportError

log = logging.getLogger(__name__)


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

    def add_read(self, stats: ReadStats) -> None:
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


@dataclass(slots=True, eq=False, kw_only=True)
class RequestPull(PeerPull):
    """The pull of a request, of what its ticket names.

    Attributes:
        is_awaited: whether the engine hears what comes of the claim; ``told``: the state it knows.
    """

    is_requested: ClassVar[bool] = True

    request: str
    reader: Reader
    ticket: Ticket
    digest: bytes
    measured: Measured
    need: Need | None = None
    verification: Verification | None = None
    is_awaited: bool = False
    told: PullState | None = None

    def message(self, effect: ToLender) -> FromReader:
        """What the lender is sent."""
        request = self.ticket.request_id
        if isinstance(effect, machine.SendClaim):
            return messages.Claim(effect.seq, request, self.reader, self.digest)
        if isinstance(effect, machine.SendRenew):
            return messages.Renew(effect.seq, request, self.reader)
        if isinstance(effect, machine.SendConfirm):
            return messages.Confirm(effect.seq, request, self.reader, self.digest)
        return messages.Done(request, self.reader, self.digest)

    def claim_outcome(self) -> ClaimOutcome | None:
        """What the engine must hear of its claim now."""
        pull, reader = self.machine, self.reader
        # Once the blocks are wanted, it is the pull that is reported, received or failed.
        if not self.is_awaited or pull.wanted or pull.state is self.told:
            return None
        if pull.state not in (PullState.HELD, PullState.FAILED):
            return None
        self.told = pull.state
        return ClaimOutcome(self.request, reader.pull, reader.rank, pull.reason)

    def make_plan(self, clock: Callable[[], float]) -> None:
        """As :meth:`pdconn.puller.peers.PeerPull.make_plan`."""
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
            known = self.measured
            known.moved, known.begins = plan.moved, plan.begins
            known.plan_began, known.plan_s = began, clock() - began

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


class Pulls:
    """Everything that one rank pulls.

    Args:
        me: which rank this is; its memory is registered with the reader's transport.
        dialer: opens connections to lenders.
        post: gives a job to the reader; its result comes back through :meth:`handle_result`.
        clock: seconds that never go back.
        patience: how long a pull waits for what.
        verify: how much is compared with what was lent.
        warm_up: lenders to know before anything is pulled from them.
        max_peers: lenders that are known at once.

    Attributes:
        peers: the lenders that we know.
        warmup: keeps some of them warm.
        reports, counts: pulls that ended, and why they failed, for the owner to take.
        unplanned: pulls whose claim is on its way; each :meth:`finish_turn` plans one.
    """

    def __init__(
        self,
        me: Rank,
        dialer: Dialer,
        post: Callable[[Job], None],
        clock: Callable[[], float],
        *,
        patience: Patience,
        verify: Verify = Verify.OFF,
        warm_up: WarmUp | None = None,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._me = me
        self._post = post
        self._patience = patience
        self._clock = clock
        self._entries: dict[str, RequestPull] = {}
        self._by_pull: dict[str, PeerPull] = {}
        self._alarms: PullAlarms[PeerPull] = PullAlarms(self._by_pull)
        self.unplanned: deque[RequestPull] = deque()
        self.peers = PeerTable(me.engine_id, me.pair, post, dialer, max_peers)
        self.warmup = PeerWarmup(
            me, warm_up or WarmUp(), self.peers, patience=patience, clock=clock
        )
        self._verifier = Verifier(me, verify)
        self.reports: list[Report] = []
        self.counts: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Entries of the tables of pulls; 0 when all is quiet."""
        return len(self._entries) + len(self._by_pull)

    def apply_command(self, command: Command) -> None:
        """Do what the engine asks for."""
        if isinstance(command, ClaimTicket):
            self._claim(command)
        elif isinstance(command, ReadBlocks):
            self._start_read(command)
        elif isinstance(command, FailPull):
            self._report_failed(command.request, command.reason)
        elif isinstance(command, AbandonPull):
            if (entry := self._entries.get(command.request)) is not None:
                self._perform(entry, entry.machine.abandon("it took too long", self._clock()))
        elif isinstance(command, CompareAnew):
            self.peers.compare_anew(replace(self._me, traits=command.traits).pair)
            for peer in self.peers:
                self._forget_peer_if_idle(peer)
        else:
            self._cancel(command.request)
        self._drain()

    def _claim(self, command: ClaimTicket) -> None:
        request, ticket, now = command.request, command.ticket, self._clock()
        entry = self._entries[request] = RequestPull(
            pull=command.pull,
            machine=Pull(self._patience, now, verify=self._verifier.is_on),
            peer=self.peers.to(PeerKey.from_ticket(ticket)),
            request=request,
            reader=Reader(command.pull, self._me.rank, self._me.of),
            ticket=ticket,
            digest=ticket.digest(),
            measured=Measured(claimed=now),
            is_awaited=command.is_awaited,
        )
        self._begin(entry)

    def _begin(self, entry: PeerPull) -> None:
        """Have the pull go on with its lender from where that stands."""
        peer = entry.peer
        self._by_pull[entry.pull] = peer.pulls[entry.pull] = entry
        if peer.state is PeerState.READY:
            self._greeted(entry)
            return
        if peer.welcome is not None:
            entry.machine.welcomed(self._clock())
        self._alarms.set_alarm(entry)

    def _start_read(self, command: ReadBlocks) -> None:
        entry, now = self._entries.get(command.request), self._clock()
        if entry is None:
            self._report_failed(command.request, "nothing is claimed for this request")
            return
        entry.need, entry.measured.asked = command.need, now
        self.unplanned.append(entry)
        self._perform(entry, entry.machine.want(now))

    def _cancel(self, request: str) -> None:
        if (entry := self._entries.get(request)) is not None:
            entry.is_awaited = False
            self._perform(entry, entry.machine.fail("cancelled", self._clock()))
            self._forget_if_over(entry, even_if_unasked=True)

    def handle_readable(self, peer: Peer) -> None:
        """The peer's connection has something for us."""
        self.peers.receive_from(peer)
        self._drain()

    def handle_writable(self, peer: Peer) -> None:
        """Send what is due to the peer, whose connection has room again."""
        self.peers.send_to(peer)
        self._drain()

    def finish_turn(self) -> float | None:
        """Tell the peers, plan one pull; both can wait for reports.  Returns the next deadline."""
        if self.peers.unsent:
            self.peers.send_to_all()
            self._drain()
        if self.unplanned:
            entry = self.unplanned.popleft()
            if entry.machine.state is PullState.CLAIMING and entry.plan is None:
                entry.make_plan(self._clock)
        return self.next_alarm()

    def _drain(self) -> None:
        """Handle what happened to peers until nothing is left: the only place that does."""
        events = self.peers.events
        while events:
            event = events.popleft()
            peer = event.peer
            if isinstance(event, PeerClosed):
                self._closed(peer)
            elif isinstance(event, PeerReplied):
                self._replied(peer, event.message)
            elif peer.state is PeerState.CLOSED:
                continue  # its PeerClosed comes later
            elif isinstance(event, PeerWelcomed):
                for entry in _pulls_from(peer):
                    self._perform(entry, entry.machine.welcomed(self._clock()))
            else:
                for entry in _pulls_from(peer):
                    self._greeted(entry)

    def _greeted(self, entry: PeerPull) -> None:
        """Claim what a ticket names, if the lender can have such blocks at all."""
        if isinstance(entry, RequestPull):
            pairing = entry.peer.pairing
            assert pairing is not None
            try:
                check_blocks(entry.ticket.blocks, pairing.lent_num_blocks)
            except TicketError as error:
                self._perform(entry, entry.machine.fail(str(error), self._clock()))
                return
            if entry.need is not None:
                self.unplanned.append(entry)
        self._perform(entry, entry.machine.greeted(self._clock()))

    def _closed(self, peer: Peer) -> None:
        """Fail what waits for the peer, and what is being read: nothing can confirm it."""
        for entry in _pulls_from(peer):
            if entry.is_requested:
                self.counts[f"pulls_{'unauthenticated' if peer.untrusted else 'unreachable'}"] += 1
            reason = f"{peer.key}: {peer.reason}"
            self._perform(entry, entry.machine.fail(reason, self._clock(), notify=False))
        self.warmup.lender_closed(peer)
        self._forget_peer_if_idle(peer)

    def _replied(self, peer: Peer, message: PullReply) -> None:
        entry = peer.pulls.get(message.pull)
        if not isinstance(entry, RequestPull):
            return
        now = self._clock()
        if isinstance(message, messages.Granted):
            entry.measured.granted = entry.measured.granted or now
            effects = entry.machine.granted(message.seq, message.ttl_ms / 1000, now)
        elif isinstance(message, Checksum):
            try:
                effects = entry.heard_checksum(message, now, self.counts)
            except MessageError as error:
                self.peers.close(peer, str(error))
                return
        elif isinstance(message, messages.Confirmed):
            effects = entry.machine.confirmed(message.seq)
        elif isinstance(message, messages.ChecksumUnavailable):
            effects = entry.unverified(message.detail, now, self.counts)
        else:
            self.counts[f"pulls_refused_{message.why}"] += 1
            effects = entry.machine.fail(f"refused, {message.why}: {message.detail}", now)
        self._perform(entry, effects)

    def next_alarm(self) -> float | None:
        """When :meth:`tick_due` should run next, or None when only an event can matter."""
        alarms = (self._alarms.first_alarm(), self.warmup.alarm)
        return min((at for at in alarms if at is not None), default=None)

    def tick_due(self, now: float) -> None:
        """Tick the machines whose time has come."""
        if self.warmup.alarm is not None and self.warmup.alarm <= now:
            for pull in self.warmup.begin_due(now):
                self._begin(pull)
        due = self._alarms.take_due(now)
        for peer in dict.fromkeys(entry.peer for entry in due if self._tick(entry, now)):
            for entry in _pulls_from(peer):
                if effects := entry.machine.renew_along(now):
                    self._perform(entry, effects)
        self._drain()

    def _tick(self, entry: PeerPull, now: float) -> bool:
        """Returns whether the entry renews its claim."""
        was, effects = entry.machine.state, entry.machine.tick(now)
        renews = any(isinstance(effect, machine.SendRenew) for effect in effects)
        self._perform(entry, effects)
        is_over = entry.is_requested and entry.machine.state in ENDED
        if is_over and was is PullState.GREETING:
            self.peers.close(entry.peer, "no greeting in time")
        elif is_over and was in (PullState.CLAIMING, PullState.CONFIRMING):
            self.peers.retire(entry.peer, f"a pull was not answered in time while {was}")
            self._forget_peer_if_idle(entry.peer)
        return renews

    def handle_result(self, result: JobResult) -> None:
        """A job that was posted is done."""
        tag = result.tag
        if isinstance(result, Connected):
            self.peers.rank_connected(result)
        elif isinstance(result, Summed):
            assert isinstance(tag, RequestPull)
            self._perform(tag, tag.summed(result, self._clock(), self.counts))
        else:
            assert isinstance(tag, PeerPull)
            self._settled(tag, result)
        self._drain()

    def _settled(self, entry: PeerPull, result: ReadSettled) -> None:
        """One of the reads is over; the machine hears of the last one."""
        peer, error = entry.peer, result.settled.error
        entry.reading -= 1
        if isinstance(entry, RequestPull):
            entry.measured.add_read(result.settled.stats)
        if error is not None:
            entry.error = entry.error or f"{type(error).__name__}: {error}"
        if not entry.reading:
            self._perform(entry, entry.machine.settled(entry.error, result.at))
        if isinstance(error, PeerLost | PeerUnknown):
            if entry.is_requested:
                # Its side channel may be alive and well: say what is due before hanging up.
                self.peers.send_to(peer)
                self.peers.close(peer, str(error))
            else:
                self.peers.retire(peer, str(error))  # requests that use it judge for themselves
        self._forget_peer_if_idle(peer)

    def _perform(self, entry: PeerPull, effects: list[Effect]) -> None:
        """Perform ``effects`` and those that they lead to; then forget the entry if it is over."""
        while effects:
            following: list[Effect] = []
            for effect in effects:
                following += self._perform_one(entry, effect)
            effects = following
        if isinstance(entry, RequestPull) and (outcome := entry.claim_outcome()) is not None:
            self.reports.append(outcome)
        if entry.machine.state in ENDED:
            self._forget_if_over(entry)
        else:
            self._alarms.set_alarm(entry)

    def _perform_one(self, entry: PeerPull, effect: Effect) -> list[Effect]:
        """Returns what the machine asks for next."""
        if isinstance(effect, machine.StartRead):
            return self._read(entry)
        if isinstance(entry, PagePull):
            return self.warmup.perform(entry, effect)
        assert isinstance(entry, RequestPull)
        if isinstance(effect, ToLender):
            self.peers.queue_messages(entry.peer, [entry.message(effect)])
        elif isinstance(effect, machine.AskChecksums):
            return self._verify(entry)
        elif isinstance(effect, machine.ReportReceived):
            self.reports.append(entry.measured.record(entry.request, self._clock()))
        elif isinstance(effect, machine.ReportFailed):
            self._report_failed(entry.request, effect.reason, effect.quarantined)
        elif isinstance(effect, machine.ReportReleased):
            self.reports.append(Released(entry.request))
        return []

    def _report_failed(self, request: str, reason: str, quarantined: bool = False) -> None:
        log.warning("pdconn: pull of %s failed: %s", request, reason)
        self.reports.append(FailedPull(request, reason, quarantined))

    def _read(self, entry: PeerPull) -> list[Effect]:
        if entry.plan is None:
            entry.make_plan(self._clock)
        if not isinstance(entry.plan, Plan):
            # No read is in flight, so the failure is settled as soon as it is known.
            return entry.machine.settled(entry.plan, self._clock())
        reads, entry.plan = entry.plan.reads, None
        gaps, entry.gaps = entry.gaps, NO_GAPS
        entry.reading = len(reads)
        for rank, spans in reads:
            self._post(Read(entry, entry.peer.ranks[rank], spans, gaps))
            gaps = NO_GAPS  # the first read fills them
        return entry.machine.settled(None, self._clock()) if not reads else []

    def _verify(self, entry: RequestPull) -> list[Effect]:
        """Have both sides sum what was read."""
        assert entry.need is not None
        try:
            begun = self._verifier.begin_check(entry.peer, entry.ticket, entry.need)
            entry.verification = begun
        except CannotVerify as error:
            return entry.unverified(str(error), self._clock(), self.counts)
        asked = begun.requests(entry.ticket.request_id, entry.reader)
        self.peers.queue_messages(entry.peer, asked)
        self._post(Sum(entry, begun.expected))
        return []

    def _forget_if_over(self, entry: PeerPull, even_if_unasked: bool = False) -> None:
        """Drop an entry that is reported.  One that failed unasked waits for the asking."""
        if entry.machine.state not in ENDED or not (entry.machine.wanted or even_if_unasked):
            return
        if isinstance(entry, RequestPull) and self._entries.get(entry.request) is entry:
            del self._entries[entry.request]
        self._by_pull.pop(entry.pull, None)
        entry.peer.pulls.pop(entry.pull, None)
        self._forget_peer_if_idle(entry.peer)

    def _forget_peer_if_idle(self, peer: Peer) -> None:
        if peer.retired and not peer.is_needed:
            self.peers.send_to(peer)
            self.peers.close(peer, "no pull uses it any more")
        if peer.state is PeerState.CLOSED and not any(
            entry.reading and entry.is_requested for entry in peer.pulls.values()
        ):
            self.peers.forget_peer(peer)


def _pulls_from(peer: Peer) -> Iterator[PeerPull]:
    """The peer's pulls; what ends one of them may end others on the way."""
    for name in list(peer.pulls):
        if (pull := peer.pulls.get(name)) is not None:
            yield pull
