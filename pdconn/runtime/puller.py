"""The puller: a decode rank's side of every transfer, on a thread of its own.

::

    engine thread ── hold, pull, cancel ──► mailbox ─┐
                  ◄── collect ── outcome             ├── one thread: machines + sockets
    lenders       ◄── frames ────────────────────────┤
    reader thread ◄── jobs ── answers ───────────────┘

``hold`` claims a lease as soon as the request is known, so that waiting in the
engine's queue costs nothing and greeting a new peer overlaps with it.  ``pull``
says that blocks are there; ``cancel`` that they will never be wanted.
"""

from __future__ import annotations

import heapq
import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdconn.lifecycle import pull as machine
from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import Pull
from pdconn.planning.errors import PlanningError
from pdconn.planning.plan import Need, Pairing
from pdconn.protocol.errors import TicketError
from pdconn.protocol.messages import (
    Claim,
    Done,
    FromReader,
    Granted,
    Reader,
    Refused,
    Renew,
    Welcome,
)
from pdconn.protocol.ticket import Ticket, block_digest, check_blocks
from pdconn.runtime.mailbox import Mailbox
from pdconn.runtime.peers import Connections, Peer, PeerKey, check_traits
from pdconn.runtime.reader import Answer, Connected, Read, ReaderStopped, ReaderThread, ReadSettled
from pdconn.runtime.records import Measured, Outcome, PullRecord
from registration.references import KVCacheReferences
from transport import PeerLost, PeerUnknown, Transport, TransportError

log = logging.getLogger(__name__)


class PullerBroken(RuntimeError):
    """A thread of ours died; what is in flight is unknown, so the engine must stop."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which decode rank this is, and what its memory looks like.

    ``rank`` of ``of`` ranks pull every request together; ``spread`` says which of a
    peer's replicas to prefer; ``traits`` must equal the lender's.
    """

    engine_id: str
    rank: int
    of: int
    spread: int
    references: KVCacheReferences
    traits: dict[str, str]

    def pair(self, welcome: Welcome) -> Pairing:
        """Match a greeted lender with us.

        Raises:
            Incompatible: naming the field and both values.
        """
        check_traits(self.traits, welcome)
        theirs = [rank.references for rank in welcome.ranks]
        return Pairing.of(self.references, theirs, self.spread)


@dataclass(frozen=True, slots=True)
class _Hold:
    request: str
    pull: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class _Pull:
    request: str
    need: Need


@dataclass(frozen=True, slots=True)
class _Cancel:
    request: str


@dataclass(slots=True, eq=False)
class _Entry:
    """A request in work: its machine, whose it is, and what is in flight for it."""

    request: str
    reader: Reader
    ticket: Ticket
    machine: Pull
    peer: Peer
    measured: Measured
    need: Need | None = None
    reading: int = 0
    error: str | None = None


class Puller:
    """Pulls for one decode rank until closed.

    Args:
        me: which rank this is; its memory is registered with ``transport``.
        transport: owned from now on, by the reader thread.
        claim_timeout_s: how long greeting and claiming may take.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        me: Rank,
        transport: Transport,
        claim_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me = me
        self._claim_timeout_s = claim_timeout_s
        self._clock = clock
        self._mailbox: Mailbox[_Hold | _Pull | _Cancel | Answer] = Mailbox()
        self._entries: dict[str, _Entry] = {}
        self._by_pull: dict[str, _Entry] = {}
        self._alarms: list[tuple[float, str]] = []
        self._selector = selectors.DefaultSelector()
        self._outbox: deque[str | tuple[str, str] | PullRecord] = deque()
        self._news = threading.Event()
        self._owed = 0
        self._broken: str | None = None
        self._stopping = False
        self._reader = ReaderThread(transport, self._mailbox.post, clock)
        self._connections = Connections(me.engine_id, me.pair, self._reader, self._selector, self)
        self._thread = threading.Thread(target=self._run, name="pdconn-puller", daemon=True)
        self._thread.start()

    def hold(self, request: str, pull: str, ticket: Ticket) -> None:
        """Claim what ``ticket`` names and keep it, under the pull id ``pull``."""
        self._mailbox.post(_Hold(request, pull, ticket))

    def pull(self, request: str, need: Need) -> None:
        """Blocks are there for a held request: read, then report it."""
        self._owed += 1
        self._mailbox.post(_Pull(request, need))

    def cancel(self, request: str) -> None:
        """Give the claim up.  A pull under way is still reported, once it is safe."""
        self._mailbox.post(_Cancel(request))

    def collect(self) -> Outcome:
        """What was received and what failed since the last call; never blocks.

        Raises:
            PullerBroken: one of our threads died.
        """
        self._news.clear()
        if self._broken is not None:
            raise PullerBroken(self._broken)
        outcome = Outcome.of(self._outbox)
        self._owed -= len(outcome.received) + len(outcome.failed)
        return outcome

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to collect, or nothing to wait for.

        For an engine that has no other work: its steps would keep the cores busy that
        the pull needs.
        """
        if self._owed > 0:
            self._news.wait(timeout_s)

    @property
    def num_open(self) -> int:
        """Requests that are still in some table; 0 when all is quiet."""
        return len(self._entries) + len(self._by_pull)

    def close(self) -> None:
        """Stop both threads and close every socket.  A second call does nothing."""
        if self._stopping:
            return
        self._stopping = True
        self._mailbox.wake()
        self._thread.join()
        self._reader.close()
        self._mailbox.close()

    def _run(self) -> None:
        self._selector.register(self._mailbox.socket, selectors.EVENT_READ, None)
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            log.critical("the puller thread stopped", exc_info=True)
            self._broken = f"{type(error).__name__}: {error}"
            self._news.set()
        finally:
            self._connections.close_all()
            self._selector.close()

    def _turn(self) -> None:
        patience = max(0.0, self._alarms[0][0] - self._clock()) if self._alarms else None
        for key, events in self._selector.select(patience):
            if key.data is not None:
                self._connections.serve(key.data, events)
        for item in self._mailbox.take():
            self._obey(item)
        self._ring(self._clock())
        self._connections.flush_all()

    def _ring(self, now: float) -> None:
        """Tick the machines whose time has come; stale alarms are set anew or dropped."""
        while self._alarms and self._alarms[0][0] <= now:
            _, request = heapq.heappop(self._alarms)
            entry = self._entries.get(request)
            if entry is None:
                continue
            self._do(entry, entry.machine.tick(now))
            if entry.machine.state.ended and entry.peer.state is PeerState.GREETING:
                self._connections.close(entry.peer, "no greeting in time")

    # What the engine and the reader thread say

    def _obey(self, item: _Hold | _Pull | _Cancel | Answer) -> None:
        if isinstance(item, _Hold):
            self._hold(item)
        elif isinstance(item, _Pull):
            entry = self._entries.get(item.request)
            if entry is None:
                self._report((item.request, "nothing is held for this request"))
                return
            entry.need, entry.measured.asked = item.need, self._clock()
            self._do(entry, entry.machine.want(self._clock()))
        elif isinstance(item, _Cancel):
            entry = self._entries.get(item.request)
            if entry is not None:
                self._do(entry, entry.machine.fail("cancelled"))
                self._forget_if_over(entry, even_if_unasked=True)
        elif isinstance(item, Connected):
            self._connections.connected(item)
        elif isinstance(item, ReadSettled):
            self._settled(item)
        elif isinstance(item, ReaderStopped):
            self._broken = item.error
            self._news.set()

    def _hold(self, hold: _Hold) -> None:
        now = self._clock()
        peer = self._connections.to(PeerKey.of(hold.ticket))
        reader = Reader(hold.pull, self._me.rank, self._me.of)
        entry = _Entry(
            hold.request,
            reader,
            hold.ticket,
            Pull(self._claim_timeout_s, now),
            peer,
            Measured(held=now),
        )
        self._entries[hold.request] = self._by_pull[hold.pull] = entry
        peer.pulls.add(hold.request)
        if peer.is_closed:
            self._do(entry, entry.machine.fail(f"{peer.key}: {peer.reason}", tell=False))
        elif peer.state is PeerState.READY:
            self._greeted(entry)
        else:
            self._do(entry, [])

    def _greeted(self, entry: _Entry) -> None:
        """Claim what the ticket names, if the lender can have such blocks at all."""
        pairing = entry.peer.pairing
        assert pairing is not None
        try:
            check_blocks(entry.ticket.blocks, pairing.lent_num_blocks)
        except TicketError as error:
            self._do(entry, entry.machine.fail(str(error)))
            return
        self._do(entry, entry.machine.greeted(self._clock()))

    def _settled(self, answer: ReadSettled) -> None:
        entry = answer.tag
        assert isinstance(entry, _Entry)
        entry.reading -= 1
        entry.measured.add(answer.settled.stats)
        error = answer.settled.error
        if error is not None:
            entry.error = entry.error or f"{type(error).__name__}: {error}"
        if entry.reading == 0:
            self._do(entry, entry.machine.settled(entry.error, answer.at))
        if isinstance(error, PeerLost | PeerUnknown):
            self._connections.close(entry.peer, str(error))
        self._forget_peer_if_idle(entry.peer)

    # What the connections say

    def peer_ready(self, peer: Peer) -> None:
        """Every rank that we need is connected: claim for whoever waits."""
        for entry in self._using(peer):
            self._greeted(entry)

    def peer_closed(self, peer: Peer) -> None:
        """Fail what waits for the peer.  What is being read may still settle in time."""
        for entry in self._using(peer):
            if not entry.reading:
                reason = f"{peer.key}: {peer.reason}"
                self._do(entry, entry.machine.fail(reason, tell=False))
        self._forget_peer_if_idle(peer)

    def heard(self, peer: Peer, message: Granted | Refused) -> None:
        """An answer to a claim or renewal."""
        entry = self._by_pull.get(message.pull)
        if entry is None or entry.peer is not peer:
            return
        now = self._clock()
        if isinstance(message, Granted):
            entry.measured.granted = entry.measured.granted or now
            self._do(entry, entry.machine.granted(message.seq, message.ttl_ms / 1000, now))
        else:
            self._do(entry, entry.machine.fail(f"refused, {message.why}: {message.detail}"))

    # What the machines want

    def _do(self, entry: _Entry, effects: list[machine.Effect]) -> None:
        for effect in effects:
            self._perform(entry, effect)
        deadline = entry.machine.next_deadline()
        if deadline is not None:
            heapq.heappush(self._alarms, (deadline, entry.request))
        self._forget_if_over(entry)

    def _perform(self, entry: _Entry, effect: machine.Effect) -> None:
        request = entry.ticket.request_id
        if isinstance(effect, machine.SendClaim):
            digest = block_digest(entry.ticket.blocks)
            self._say(entry, Claim(effect.seq, request, entry.reader, digest))
        elif isinstance(effect, machine.SendRenew):
            self._say(entry, Renew(effect.seq, request, entry.reader))
        elif isinstance(effect, machine.SendDone):
            self._say(entry, Done(request, entry.reader, effect.ok))
        elif isinstance(effect, machine.StartRead):
            self._read(entry)
        elif isinstance(effect, machine.Received):
            self._outbox.append(entry.measured.record(entry.request, self._clock()))
            self._report(entry.request)
        else:
            log.warning("pdconn: pull of %s failed: %s", entry.request, effect.reason)
            self._report((entry.request, effect.reason))

    def _report(self, ended: str | tuple[str, str]) -> None:
        self._outbox.append(ended)
        self._news.set()

    def _say(self, entry: _Entry, message: FromReader) -> None:
        if not entry.peer.is_closed:
            entry.peer.outgoing.append(message)

    def _read(self, entry: _Entry) -> None:
        pairing, need = entry.peer.pairing, entry.need
        assert pairing is not None
        assert need is not None
        began = self._clock()
        try:
            plan = pairing.plan(need, entry.ticket.blocks)
        except (PlanningError, TransportError) as error:
            # No read is in flight, so the failure is settled as soon as it is known.
            self._do(entry, entry.machine.settled(f"{type(error).__name__}: {error}", began))
            return
        entry.measured.planned(plan.moved, self._clock() - began)
        entry.reading = len(plan.reads)
        for rank, spans in plan.reads:
            self._reader.post(Read(entry, entry.peer.ranks[rank], spans))
        if not plan.reads:
            self._do(entry, entry.machine.settled(None, self._clock()))

    def _forget_if_over(self, entry: _Entry, even_if_unasked: bool = False) -> None:
        """Drop an entry that is reported.  One that failed unasked waits for the asking."""
        if not entry.machine.state.ended or not (entry.machine.wanted or even_if_unasked):
            return
        if self._entries.get(entry.request) is entry:
            del self._entries[entry.request]
        self._by_pull.pop(entry.reader.pull, None)
        entry.peer.pulls.discard(entry.request)
        self._forget_peer_if_idle(entry.peer)

    def _forget_peer_if_idle(self, peer: Peer) -> None:
        if peer.is_closed and not any(entry.reading for entry in self._using(peer)):
            self._connections.forget(peer)

    def _using(self, peer: Peer) -> Iterator[_Entry]:
        """The peer's requests; whatever ends one of them may end others on the way."""
        for request in list(peer.pulls):
            entry = self._entries.get(request)
            if entry is not None:
                yield entry
