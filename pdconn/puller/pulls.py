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
from dataclasses import replace

from pdconn.lifecycle import pull as machine
from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import (
    ENDED,
    Effect,
    Patience,
    PullAlarms,
    PullState,
    ToLender,
)
from pdconn.planning.plan import NO_GAPS, Plan
from pdconn.planning.planning_errors import PlanningError
from pdconn.protocol import messages
from pdconn.protocol.errors import ProtocolError, TicketError
from pdconn.protocol.messages import Checksum, PullReply
from pdconn.protocol.ticket import check_blocks
from pdconn.puller.commands import (
    CANCELLED,
    AbandonPull,
    ClaimTicket,
    Command,
    CompareAnew,
    EndBeside,
    FailedPull,
    FailPull,
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
from pdconn.puller.request_pull import RequestPull
from pdconn.puller.verification import CannotVerify, Verifier, Verify
from pdconn.puller.warmup import PagePull, PeerWarmup, WarmUp
from transport import PeerLost, PeerUnknown, TransportError

log = logging.getLogger(__name__)


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
        # Requests whose blocks a store may write to, and their failure if it is to be reported.
        self._beside: dict[str, FailedPull | None] = {}
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
        return len(self._entries) + len(self._by_pull) + len(self._beside)

    def apply_command(self, command: Command) -> None:
        """Do what the engine asks for."""
        if isinstance(command, ClaimTicket):
            self._claim(command)
        elif isinstance(command, ReadBlocks):
            self._start_read(command)
        elif isinstance(command, EndBeside):
            self._end_beside(command)
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
        entry = self._entries[request] = RequestPull.claiming(
            command,
            self.peers.to(PeerKey.from_ticket(ticket)),
            self._me,
            self._patience,
            verify=self._verifier.is_on,
            at=now,
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
        if command.beside is not None:
            self._beside[command.request] = None
        if entry is None:
            self._report_failed(command.request, "nothing is claimed for this request")
            return
        entry.need, entry.measured.asked = command.need, now
        entry.beside = command.beside
        entry.urgency, entry.tenant = command.urgency, command.tenant
        self.unplanned.append(entry)
        self._perform(entry, entry.machine.want(now))

    def _end_beside(self, command: EndBeside) -> None:
        """The store writes to the request's blocks no more: read what it has not loaded."""
        withheld = self._beside.pop(command.request, None)
        if withheld is not None:
            self.reports.append(withheld)
        entry = self._entries.get(command.request)
        if entry is None or entry.beside is None:
            return
        entry.end_beside(command.loaded)
        effects: list[Effect] = []
        if entry.machine.state is PullState.READING:
            effects = self._read_missing(entry)
        if not (effects or entry.is_written):
            effects = entry.machine.settled(self._clock())
        self._perform(entry, effects)

    def _cancel(self, request: str) -> None:
        if (entry := self._entries.get(request)) is not None:
            entry.is_awaited = False
            self._perform(entry, entry.machine.fail(CANCELLED, self._clock()))
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
            is_early = entry.machine.state is PullState.CLAIMING and entry.machine.is_complete
            if is_early and entry.plan is None:
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
                if entry.ticket is not None:
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
        elif isinstance(message, Checksum | messages.StreamReply):
            try:
                if isinstance(message, Checksum):
                    effects = entry.heard_checksum(message, now, self.counts)
                else:
                    effects = entry.heard_of_stream(message, now)
            except ProtocolError as error:
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
        if (expected := entry.expected(now)) is not None:
            self.reports.append(expected)

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
        if result.num_overdue:
            self.counts["turns_overdue"] += result.num_overdue
        entry.reading -= 1
        if isinstance(entry, RequestPull):
            entry.measured.add_read(result.settled.stats)
            if error is None and not entry.reading:
                peer.rates.learn_read(*entry.measured.take_run(result.at))
        if error is not None:  # nothing more is read for it
            entry.machine.fail(f"{type(error).__name__}: {error}", self._clock())
        effects = [] if entry.is_written else entry.machine.settled(result.at)
        self._perform(entry, effects)
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
        effects = effects or self._settled_idle(entry)
        while effects:
            following: list[Effect] = []
            for effect in effects:
                following += self._perform_one(entry, effect)
            effects = following or self._settled_idle(entry)
        if (
            isinstance(entry, RequestPull)
            and (outcome := entry.claim_outcome(self._clock())) is not None
        ):
            self.reports.append(outcome)
        if entry.machine.state in ENDED:
            self._forget_if_over(entry)
        else:
            self._alarms.set_alarm(entry)

    def _settled_idle(self, entry: PeerPull) -> list[Effect]:
        """Settle a pull that has failed while it waited for announcements, with no read posted."""
        is_over = entry.machine.state in (PullState.DRAINING, PullState.QUARANTINED)
        if not is_over or entry.is_written:
            return []
        return entry.machine.settled(self._clock())

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
            self.reports.append(entry.record(self._clock()))
        elif isinstance(effect, machine.ReportFailed):
            self._report_failed(entry.request, effect.reason, effect.quarantined)
        elif isinstance(effect, machine.ReportReleased):
            self.reports.append(Released(entry.request))
        return []

    def _report_failed(self, request: str, reason: str, quarantined: bool = False) -> None:
        failed = FailedPull(request, reason, quarantined)
        level = logging.DEBUG if failed.is_cancelled else logging.WARNING
        log.log(level, "pdconn: pull of %s failed: %s", request, reason)
        # Its blocks are free once it is reported, unless they are quarantined.
        if request in self._beside and not quarantined:
            self._beside[request] = failed
        else:
            self.reports.append(failed)

    def _read(self, entry: PeerPull) -> list[Effect]:
        if entry.plan is None:
            entry.make_plan(self._clock)
        plan, entry.plan = entry.plan, None
        if isinstance(plan, str):
            return entry.machine.fail(plan, self._clock())
        if plan is not None:
            self._post_reads(entry, plan)
        if isinstance(entry, RequestPull) and (effects := self._read_missing(entry)):
            return effects
        # Without a read in flight it is settled.
        return [] if entry.is_written else entry.machine.settled(self._clock())

    def _read_missing(self, entry: RequestPull) -> list[Effect]:
        """Read what a store has not loaded."""
        try:
            plan = entry.take_missing_plan()
        except (PlanningError, TransportError) as error:
            return entry.machine.fail(f"{type(error).__name__}: {error}", self._clock())
        if plan is not None:
            self._post_reads(entry, plan)
        return []

    def _post_reads(self, entry: PeerPull, plan: Plan) -> None:
        if isinstance(entry, RequestPull) and not entry.reading:
            entry.measured.begin_run(self._clock())
        entry.reading += len(plan.reads)
        for rank, spans in plan.reads:
            gaps, entry.gaps = entry.gaps, NO_GAPS  # the first read fills them
            peer = entry.peer.ranks[rank]
            self._post(Read(entry, peer, spans, gaps, entry.urgency, entry.tenant))

    def _verify(self, entry: RequestPull) -> list[Effect]:
        """Have both sides sum what was read."""
        assert entry.need is not None
        assert entry.ticket is not None
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
