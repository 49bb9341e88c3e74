"""The pulls of one decode rank, without its threads and sockets.

::

    engine ── hold, want, cancel ──► ┌───────┐ ── claim, renew, done ──► peers
           ◄── outbox ────────────── │ Pulls │ ◄── granted, refused ────
                                     └───────┘ ── reads ──► reader ── settled ──►

Every request has a machine (:mod:`pdconn.lifecycle.pull`); what it wants is done here.
Nothing waits: whoever owns this calls it with what happened and with the time, a thread
with sockets in an engine, a loop over virtual time in a simulation.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from random import Random

from pdconn.lifecycle import pull as machine
from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import Patience, Pull, PullState
from pdconn.planning.errors import PlanningError
from pdconn.planning.plan import Need, Plan
from pdconn.protocol.errors import TicketError
from pdconn.protocol.messages import (
    Checksum,
    ChecksumUnavailable,
    Claim,
    Described,
    Done,
    FromReader,
    Granted,
    Reader,
    Renew,
)
from pdconn.protocol.ticket import Ticket, check_blocks
from pdconn.puller.connections import PeerTable
from pdconn.puller.entries import Alarms, Entry
from pdconn.puller.jobs import Connected, Job, News, Read, ReadSettled, Summed
from pdconn.puller.peers import AboutPull, Dialer, Peer, PeerKey
from pdconn.puller.proving import Verify
from pdconn.puller.rank import Rank
from pdconn.puller.results import FailedPull, Measured, Released, Report
from pdconn.puller.verification import CannotVerify, Verifier
from pdconn.puller.warming import PeerWarmup, ProbeRead, WarmUp
from transport import PeerLost, PeerUnknown, TransportError

log = logging.getLogger(__name__)


class Pulls:
    """Everything that one rank pulls.

    Args:
        me: which rank this is; its memory is registered with whoever reads.
        dialer: opens wires to lenders.
        post: gives a job to whoever reads; its answer comes back through :meth:`answered`.
        clock: seconds that never go back.
        patience: how long a pull waits for what.
        verify: how much is compared with what was lent.
        warm_up: lenders to know before anything is pulled from them.

    Attributes:
        connections: the lenders that we know.
        warming: those of them that are kept warm.
        outbox: what ended, for the engine.
        counts: why pulls failed.
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
    ) -> None:
        self._me = me
        self._post = post
        self._patience = patience
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._by_pull: dict[str, Entry] = {}
        self._alarms = Alarms()
        self._unplanned: deque[Entry] = deque()
        self.connections = PeerTable(me.engine_id, me.pair, post, dialer, self)
        self.warming = PeerWarmup(
            me.engine_id,
            warm_up or WarmUp(),
            self.connections,
            post,
            patience=patience,
            clock=clock,
            rng=Random(f"{me.engine_id}/{me.rank}"),
        )
        self._verifying = Verifier(me, verify, post, self._say)
        self.outbox: deque[Report] = deque()
        self.counts: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Requests that are still in some table; 0 when all is quiet."""
        return len(self._entries) + len(self._by_pull)

    # What the engine says

    def hold(self, request: str, pull: str, ticket: Ticket) -> None:
        """Claim what ``ticket`` names and keep it, under the pull id ``pull``."""
        now = self._clock()
        peer = self.connections.to(PeerKey.of(ticket))
        entry = Entry(
            request,
            Reader(pull, self._me.rank, self._me.of),
            ticket,
            ticket.digest(),
            Pull(self._patience, now, verify=self._verifying.is_on),
            peer,
            Measured(held=now),
        )
        self._entries[request] = self._by_pull[pull] = entry
        peer.pulls[request] = None
        if peer.is_closed:
            self._do(entry, entry.machine.fail(f"{peer.key}: {peer.reason}", now, tell=False))
        elif peer.state is PeerState.READY:
            self._greeted(entry)
        else:
            self._do(entry, [])

    def want(self, request: str, need: Need) -> None:
        """Blocks are there for a held request: read, then report it."""
        entry = self._entries.get(request)
        if entry is None:
            self.outbox.append(FailedPull(request, "nothing is held for this request"))
            return
        entry.need, entry.measured.asked = need, self._clock()
        self._unplanned.append(entry)
        self._do(entry, entry.machine.want(self._clock()))

    def cancel(self, request: str) -> None:
        """Give the claim up.  A pull under way is still reported, once it is safe."""
        entry = self._entries.get(request)
        if entry is not None:
            self._do(entry, entry.machine.fail("cancelled", self._clock()))
            self._forget_if_over(entry, even_if_unasked=True)

    @property
    def has_unplanned(self) -> bool:
        """Whether :meth:`plan_one` has something to do."""
        return bool(self._unplanned)

    def plan_one(self) -> None:
        """Plan a pull whose claim is on its way: call it when nothing else is to be done.

        One whose lender has not greeted us yet comes back here once it has.
        """
        entry = self._unplanned.popleft()
        if entry.machine.state is PullState.CLAIMING and entry.plan is None:
            self._plan(entry)

    # What time and the reader say

    def next_deadline(self) -> float | None:
        """When :meth:`tick` should run next, or None when only an event can matter."""
        warming, first = self.warming.next_deadline(), self._alarms.next_deadline()
        if warming is None or first is None:
            return first if warming is None else warming
        return min(first, warming)

    def tick(self, now: float) -> None:
        """Tick the machines whose time has come; stale alarms are set anew or dropped."""
        self.warming.tick(now)
        for request in self._alarms.take_due(now):
            entry = self._entries.get(request)
            if entry is not None:
                entry.alarm = None
                self._tick(entry, now)

    def _tick(self, entry: Entry, now: float) -> None:
        was = entry.machine.state
        self._do(entry, entry.machine.tick(now))
        if not entry.machine.state.ended:
            return
        if was is PullState.GREETING:
            self.connections.close(entry.peer, "no greeting in time")
        elif was is PullState.CLAIMING:
            self.connections.retire(entry.peer, "a claim was not answered in time")
            self._forget_peer_if_idle(entry.peer)

    def answered(self, answer: News) -> None:
        """A job that was posted is done."""
        if isinstance(answer, Connected):
            self.connections.connected(answer)
        elif isinstance(answer, Summed):
            entry = answer.tag
            assert isinstance(entry, Entry)
            self._summed(entry, answer)
        elif isinstance(answer.tag, ProbeRead):
            self.warming.touched(answer)
        else:
            self._settled(answer)

    def _summed(self, entry: Entry, answer: Summed) -> None:
        try:
            self._verifying.summed(entry, answer)
        except CannotVerify as error:
            self._unproven(entry, str(error))
        else:
            self._conclude(entry)

    def _unproven(self, entry: Entry, why: str) -> None:
        self.counts["pulls_unproven"] += 1
        self._do(entry, entry.machine.verified(f"unproven: {why}", self._clock()))

    def _greeted(self, entry: Entry) -> None:
        """Claim what the ticket names, if the lender can have such blocks at all."""
        pairing = entry.peer.pairing
        assert pairing is not None
        try:
            check_blocks(entry.ticket.blocks, pairing.lent_num_blocks)
        except TicketError as error:
            self._do(entry, entry.machine.fail(str(error), self._clock()))
            return
        if entry.need is not None:
            self._unplanned.append(entry)
        self._do(entry, entry.machine.greeted(self._clock()))

    def _settled(self, answer: ReadSettled) -> None:
        entry = answer.tag
        assert isinstance(entry, Entry)
        entry.reading -= 1
        entry.measured.add(answer.settled.stats)
        error = answer.settled.error
        if error is not None:
            entry.error = entry.error or f"{type(error).__name__}: {error}"
        if entry.reading == 0:
            self._do(entry, entry.machine.settled(entry.error, answer.at))
        if isinstance(error, PeerLost | PeerUnknown):
            # Its side channel may be alive and well: say what is due before hanging up.
            self.connections.flush(entry.peer)
            self.connections.close(entry.peer, str(error))
        self._forget_peer_if_idle(entry.peer)

    # What the connections say

    def peer_described(self, peer: Peer, said: Described) -> None:
        """Only who is to be warmed is asked who it is."""
        self.warming.described(peer, said)

    def peer_welcomed(self, peer: Peer) -> None:
        """It is up to us now: our transport may have much to do before it connects."""
        self.warming.welcomed(peer)
        for entry in self._using(peer):
            self._do(entry, entry.machine.welcomed(self._clock()))

    def peer_ready(self, peer: Peer) -> None:
        """Every rank that we need is connected: claim for whoever waits, and touch last."""
        for entry in self._using(peer):
            self._greeted(entry)
        self.warming.ready(peer)

    def peer_closed(self, peer: Peer) -> None:
        """Fail what waits for the peer.  What is being read may still settle in time."""
        for entry in self._using(peer):
            if not entry.reading:
                why = "unauthenticated" if peer.untrusted else "unreachable"
                self.counts[f"pulls_{why}"] += 1
                reason = f"{peer.key}: {peer.reason}"
                self._do(entry, entry.machine.fail(reason, self._clock(), tell=False))
        self.warming.closed(peer)
        self._forget_peer_if_idle(peer)

    def heard(self, peer: Peer, message: AboutPull) -> None:
        """An answer to a claim, a renewal, or an ask for proof."""
        entry = self._by_pull.get(message.pull)
        if entry is None or entry.peer is not peer:
            return
        now = self._clock()
        if isinstance(message, Granted):
            entry.measured.granted = entry.measured.granted or now
            self._do(entry, entry.machine.granted(message.seq, message.ttl_ms / 1000, now))
        elif isinstance(message, Checksum):
            if self._verifying.heard(entry, message):
                self._do(entry, entry.machine.answered(now))
            self._conclude(entry)
        elif isinstance(message, ChecksumUnavailable):
            self._unproven(entry, message.detail)
        else:
            self.counts[f"pulls_refused_{message.why}"] += 1
            self._do(entry, entry.machine.fail(f"refused, {message.why}: {message.detail}", now))

    # What the machines want

    def _do(self, entry: Entry, effects: list[machine.Effect]) -> None:
        for effect in effects:
            self._perform(entry, effect)
        self._alarms.set(entry)
        self._forget_if_over(entry)

    def _perform(self, entry: Entry, effect: machine.Effect) -> None:
        request = entry.ticket.request_id
        if isinstance(effect, machine.SendClaim):
            self._say(entry, Claim(effect.seq, request, entry.reader, entry.digest))
        elif isinstance(effect, machine.SendRenew):
            self._say(entry, Renew(effect.seq, request, entry.reader))
        elif isinstance(effect, machine.SendDone):
            self._say(entry, Done(request, entry.reader, entry.digest, effect.ok))
        elif isinstance(effect, machine.StartRead):
            self._read(entry)
        elif isinstance(effect, machine.AskChecksums):
            self._ask_proof(entry)
        elif isinstance(effect, machine.ReportReceived):
            self.outbox.append(entry.measured.record(entry.request, self._clock()))
        elif isinstance(effect, machine.ReportFailed):
            self._failed(entry, effect)
        elif isinstance(effect, machine.ReportReleased):
            self.outbox.append(Released(entry.request))

    def _failed(self, entry: Entry, effect: machine.ReportFailed) -> None:
        log.warning("pdconn: pull of %s failed: %s", entry.request, effect.reason)
        self.outbox.append(FailedPull(entry.request, effect.reason, effect.quarantined))

    def _say(self, entry: Entry, message: FromReader) -> None:
        if not entry.peer.is_closed:
            entry.peer.outgoing.append(message)

    def _plan(self, entry: Entry) -> None:
        pairing, need = entry.peer.pairing, entry.need
        assert pairing is not None
        assert need is not None
        began = self._clock()
        try:
            plan = entry.plan = pairing.plan(need, entry.ticket.blocks)
        except (PlanningError, TransportError) as error:
            entry.plan = f"{type(error).__name__}: {error}"
        else:
            entry.measured.planned(plan.moved, began, self._clock())

    def _read(self, entry: Entry) -> None:
        if entry.plan is None:
            self._plan(entry)
        if not isinstance(entry.plan, Plan):
            # No read is in flight, so the failure is settled as soon as it is known.
            self._do(entry, entry.machine.settled(entry.plan, self._clock()))
            return
        reads, entry.plan = entry.plan.reads, None
        entry.reading = len(reads)
        for rank, spans in reads:
            self._post(Read(entry, entry.peer.ranks[rank], spans))
        if not reads:
            self._do(entry, entry.machine.settled(None, self._clock()))

    def _ask_proof(self, entry: Entry) -> None:
        try:
            self._verifying.ask(entry)
        except CannotVerify as error:
            self._unproven(entry, str(error))

    def _conclude(self, entry: Entry) -> None:
        if entry.proof is not None and entry.proof.is_complete:
            problem = entry.proof.problem()
            self.counts["pulls_proven" if problem is None else "pulls_corrupted"] += 1
            self._do(entry, entry.machine.verified(problem, self._clock()))

    def _forget_if_over(self, entry: Entry, even_if_unasked: bool = False) -> None:
        """Drop an entry that is reported.  One that failed unasked waits for the asking."""
        if not entry.machine.state.ended or not (entry.machine.wanted or even_if_unasked):
            return
        if self._entries.get(entry.request) is entry:
            del self._entries[entry.request]
        self._by_pull.pop(entry.reader.pull, None)
        entry.peer.pulls.pop(entry.request, None)
        self._forget_peer_if_idle(entry.peer)

    def _forget_peer_if_idle(self, peer: Peer) -> None:
        if peer.retired and not peer.pulls:
            self.connections.flush(peer)
            self.connections.close(peer, "nobody uses it any more")
        if peer.is_closed and not any(entry.reading for entry in self._using(peer)):
            self.connections.forget(peer)

    def _using(self, peer: Peer) -> Iterator[Entry]:
        """The peer's requests; whatever ends one of them may end others on the way."""
        for request in list(peer.pulls):
            entry = self._entries.get(request)
            if entry is not None:
                yield entry
