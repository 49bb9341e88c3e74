"""The puller: a decode rank's side of every transfer, on a thread of its own.

::

    engine thread ── post ── commands ──► SelectedBox ─┐
                  ◄── collect ── Box of turns ◄────────┤── one thread: Pulls + sockets
    lenders       ◄── frames ──────────────────────────┤
    reader thread ◄── jobs ── results ─────────────────┤
    name servers  ◄── one thread a name ── LookedUp ───┘

``Puller`` is the engine's end of the boxes, ``_PullerLoop`` what the thread owns, and
``SocketDialer`` opens its sockets.  A name server may take seconds to answer, and the thread that
renews claims must not wait for it, so every host that is not an address is looked up by a thread of
its own.
"""

from __future__ import annotations

import errno
import itertools
import selectors
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import Patience
from pdconn.puller.commands import (
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
from pdconn.puller.peers import MAX_PEERS, Peer, PeerTable, Rank
from pdconn.puller.pulls import Pulls
from pdconn.puller.reads import HeldTransport, Job, JobResult, Read, ReaderThread
from pdconn.puller.verification import Verify
from pdconn.puller.warmup import WarmUp
from pdconn.sidechannel.clock import steady
from pdconn.sidechannel.connection import (
    MAX_REPLIES,
    MAX_WELCOME,
    Address,
    Connection,
    connecting_to,
    literal_address,
    resolve,
)
from pdconn.sidechannel.security import Security, Unprotected
from pdconn.threads import Box, SelectedBox, ThreadDied, Worker
from transport import Transport
from transport.closing import Closing
from transport.streams import StreamPoint

MAX_LOOKUPS = 32
"""Names that are looked up at once; others wait for their turn."""

Resolve = Callable[[str, int], Address]
"""As :func:`pdconn.sidechannel.connection.resolve`; may take as long as a name server does."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The look-up ``number`` has ``found`` an address, or an error."""

    number: int
    found: Address | OSError


class SocketDialer:
    """Dials lenders over TCP.

    Args:
        selector: watches the connections, with their peers as data.
        outbox: gets a :class:`LookedUp` from another thread, for :meth:`looked_up`.
        security: how lenders must authenticate.
        through: maps a lender's host and port to those to dial instead, for debugging.
        resolve: looks a name up, on a thread of its own.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        outbox: Box[Any],
        security: Security,
        through: Callable[[str, int], tuple[str, int]] | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        self._selector = selector
        self._outbox = outbox
        self._security = security
        self._through = through or (lambda host, port: (host, port))
        self._resolve = resolve
        self._for_pulls: deque[Peer] = deque()
        self._for_warmup: deque[Peer] = deque()
        self._looking: dict[int, Peer] = {}
        self._numbers = itertools.count()
        self._num_for_warmup = 0

    def dial(self, peer: Peer) -> None:
        """As :meth:`pdconn.puller.peers.Dialer.dial`."""
        try:
            self._security.require(peer.key.host)
        except Unprotected as error:
            raise PermissionError(errno.EPERM, str(error)) from None
        host, port = self._through(peer.key.host, peer.key.port)
        literal = literal_address(host, port)
        if literal is not None:
            self._open(peer, literal)
            return
        (self._for_pulls if peer.key.names_a_boot else self._for_warmup).append(peer)
        self._look_for_more()

    def looked_up(self, answer: LookedUp, peers: PeerTable) -> None:
        """Go on with a peer whose name is known now."""
        peer, found = self._looking.pop(answer.number), answer.found
        self._num_for_warmup -= not peer.key.names_a_boot
        self._look_for_more()
        if peer.state is PeerState.CLOSED:
            return
        try:
            if isinstance(found, OSError):
                raise found
            self._open(peer, found)
        except OSError as error:
            peers.close(peer, f"side channel: {error}")

    def _open(self, peer: Peer, address: Address) -> None:
        host, port = peer.key.host, peer.key.port
        policy = self._security.for_reader(host, f"{host}:{port}")
        sock = connecting_to(address)
        connection = Connection(sock, MAX_WELCOME, policy=policy, max_later=MAX_REPLIES)
        connection.watch(self._selector, peer, connecting=True)
        peer.connection = connection

    def _look_for_more(self) -> None:
        while len(self._looking) < MAX_LOOKUPS:
            peer = self._next_to_look_up()
            if peer is None:
                return
            if peer.state is PeerState.CLOSED:
                continue
            number = next(self._numbers)
            self._looking[number] = peer
            self._num_for_warmup += not peer.key.names_a_boot
            host, port = self._through(peer.key.host, peer.key.port)
            look = partial(_look_up, self._resolve, host, port, number, self._outbox)
            try:
                Worker("pdconn-lookup", look, Box(), self._outbox).start()
            except RuntimeError as error:  # no thread to spare
                self._outbox.put(LookedUp(number, OSError(errno.EAGAIN, str(error))))

    def _next_to_look_up(self) -> Peer | None:
        """A peer of a pull goes first; warm-ups take at most half of the look-ups."""
        if self._for_pulls:
            return self._for_pulls.popleft()
        if self._for_warmup and self._num_for_warmup < MAX_LOOKUPS // 2:
            return self._for_warmup.popleft()
        return None


def _look_up(resolve: Resolve, host: str, port: int, number: int, outbox: Box[Any]) -> None:
    """One look-up, on a thread of its own."""
    found: Address | OSError
    try:
        found = resolve(host, port)
    except OSError as error:
        found = error
    outbox.put(LookedUp(number, found))


@dataclass(frozen=True, slots=True)
class PullResults:
    """What happened since the engine last asked.

    Attributes:
        records: pulls that were received.
        failed: pulls that were not.
        released: requests whose quarantine is over.
        claims: awaited claims that were granted, refused or lost.
    """

    records: tuple[PullRecord, ...]
    failed: tuple[FailedPull, ...]
    released: tuple[str, ...]
    claims: tuple[ClaimOutcome, ...] = ()

    @classmethod
    def of(cls, reports: Iterable[Report]) -> PullResults:
        """Sort ``reports`` by what they say."""
        reports = list(reports)
        return cls(
            tuple(report for report in reports if isinstance(report, PullRecord)),
            tuple(report for report in reports if isinstance(report, FailedPull)),
            tuple(report.request for report in reports if isinstance(report, Released)),
            tuple(report for report in reports if isinstance(report, ClaimOutcome)),
        )

    @property
    def received(self) -> tuple[str, ...]:
        """Requests that were received."""
        return tuple(record.request for record in self.records)


NO_RESULTS = PullResults((), (), ())
"""Of most steps of an engine."""


class PullerBroken(RuntimeError):
    """A thread of ours died; what is in flight is unknown, so the engine must stop."""


@dataclass(frozen=True, slots=True)
class _Delayed:
    """A command for when the GPU has come to ``after``."""

    command: Command
    after: StreamPoint | None


@dataclass(frozen=True, slots=True)
class _PullerTurn:
    """What a turn of the puller's thread reports and counts."""

    reports: list[Report]
    counts: dict[str, int]


_Posted = Command | _Delayed | LookedUp | HeldTransport | JobResult | ThreadDied

_GPU_POLL_S = 0.0002
"""How often a command that waits for the GPU is looked at; no GPU wakes a thread of ours."""

_REPORTED = (ReadBlocks, FailPull)
"""Commands that are answered by a report."""


class Puller(Closing):
    """Pulls for one decode rank until closed.

    Args:
        me: which rank this is; its memory is registered with ``transport``.
        transport: owned from now on, by the reader thread.
        patience: how long a pull waits for what.
        verify: how much is compared with what was lent.
        security: how lenders must authenticate; not at all by default.
        warm_up: lenders to know before anything is pulled from them; its scratch is
            registered with ``transport``.
        through: maps a lender's host and port to those to dial instead, for debugging.
        resolve: looks up the host of a ticket.
        max_peers: lenders that are known at once.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        me: Rank,
        transport: Transport,
        *,
        patience: Patience | None = None,
        verify: Verify = Verify.OFF,
        security: Security | None = None,
        warm_up: WarmUp | None = None,
        through: Callable[[str, int], tuple[str, int]] | None = None,
        resolve: Resolve = resolve,
        max_peers: int = MAX_PEERS,
        clock: Callable[[], float] = steady,
    ) -> None:
        self._inbox: SelectedBox[_Posted] = SelectedBox()
        self._outbox: Box[_PullerTurn | ThreadDied] = Box()
        self._reports: list[Report] = []
        self._counts: dict[str, int] = {}
        self._num_unreported = 0
        self._awaited: set[str] = set()
        self._broken: str | None = None
        selector = selectors.DefaultSelector()
        dialer = SocketDialer(selector, self._inbox, security or Security(), through, resolve)
        make_pulls = partial(
            Pulls,
            me,
            dialer,
            clock=clock,
            patience=patience or Patience(),
            verify=verify,
            warm_up=warm_up,
            max_peers=max_peers,
        )
        loop = _PullerLoop(
            self._inbox,
            self._outbox,
            selector=selector,
            dialer=dialer,
            reader=ReaderThread(transport, self._inbox, clock),
            make_pulls=make_pulls,
            clock=clock,
        )
        self._worker = Worker("pdconn-puller", loop.run, self._inbox, self._outbox)
        self._worker.start()

    def post(self, command: Command, after: StreamPoint | None = None) -> None:
        """Have ``command`` carried out, after those before it; never blocks.

        Args:
            after: what the GPU must have done before, such as writing to blocks to be read into.
        """
        if isinstance(command, _REPORTED):
            self._num_unreported += 1
        if isinstance(command, ClaimTicket):
            if command.is_awaited:
                self._awaited.add(command.request)
        elif not isinstance(command, CompareAnew):
            self._awaited.discard(command.request)
        self._inbox.put(command if after is None else _Delayed(command, after))

    def collect(self) -> PullResults:
        """What was received, what failed, what came of claims since the last call; never blocks.

        Raises:
            PullerBroken: one of our threads died.
        """
        self._take_turns()
        if self._broken is not None:
            raise PullerBroken(self._broken)
        if not self._reports:
            return NO_RESULTS
        results = PullResults.of(self._reports)
        self._reports.clear()
        self._num_unreported -= len(results.records) + len(results.failed)
        self._awaited.difference_update(outcome.request for outcome in results.claims)
        return results

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to collect, or nothing to wait for.

        For an engine that has no other work: its steps would keep the cores busy that
        the pull needs.
        """
        if not self._reports and (self._num_unreported > 0 or self._awaited):
            self._outbox.wait(timeout_s)

    def take_counts(self) -> dict[str, int]:
        """Why pulls failed, and how many were verified, since the last call."""
        self._take_turns()
        counts, self._counts = self._counts, {}
        return counts

    def close(self) -> None:
        """Stop both threads and close every socket.  A second call does nothing."""
        self._worker.end()
        self._inbox.free_sockets()

    def _take_turns(self) -> None:
        """Take what the thread has reported."""
        if not self._outbox.items:
            return
        for turn in self._outbox.take():
            if isinstance(turn, ThreadDied):
                self._broken = turn.error
            else:
                self._reports += turn.reports
                counts = self._counts
                for name, amount in turn.counts.items():
                    counts[name] = counts.get(name, 0) + amount


class _PullerLoop:
    """What the puller's thread owns: pulls, sockets, and its end of the reader's boxes."""

    def __init__(
        self,
        inbox: SelectedBox[_Posted],
        outbox: Box[_PullerTurn | ThreadDied],
        *,
        selector: selectors.BaseSelector,
        dialer: SocketDialer,
        reader: ReaderThread,
        make_pulls: Callable[..., Pulls],
        clock: Callable[[], float],
    ) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._selector, self._dialer, self._reader = selector, dialer, reader
        self._clock = clock
        self._delayed: deque[_Delayed] = deque()
        self._done: deque[_Posted] = deque()
        self._may_read_now = False
        self._pulls = make_pulls(post=self._post_job)

    def run(self) -> None:
        """Take turns until the inbox is closed."""
        self._selector.register(self._inbox.socket, selectors.EVENT_READ, None)
        wake_at = self._pulls.next_alarm()
        try:
            while not self._inbox.is_closed:
                wake_at = self._turn(wake_at)
        finally:
            self._pulls.peers.close_all()
            self._selector.close()
            self._inbox.close()  # the reader hands its transport to nobody
            self._reader.close()

    def _post_job(self, job: Job) -> None:
        """Have the reader do ``job``, or one short read a turn ourselves.

        Of many that are due at once the others are copied while we plan and say what is due.
        """
        if self._may_read_now and isinstance(job, Read):
            results = self._reader.read_now(job)
            if results is not None:
                self._may_read_now = False
                self._done.extend(results)
                return
        self._reader.post(job)

    def _turn(self, wake_at: float | None) -> float | None:
        """Wait until ``wake_at`` for something to do, and do it; returns when to wake next."""
        pulls, self._may_read_now = self._pulls, True
        timeout_s = None if wake_at is None else max(0.0, wake_at - self._clock())
        if self._delayed:
            timeout_s = _GPU_POLL_S if timeout_s is None else min(timeout_s, _GPU_POLL_S)
        has_work = pulls.unplanned or self._done or self._inbox.items
        for key, events in self._selector.select(0.0 if has_work else timeout_s):
            if key.data is None:
                self._inbox.drain()
                continue
            if events & selectors.EVENT_READ:
                pulls.serve_peer(key.data)
            if events & selectors.EVENT_WRITE:
                pulls.flush_peer(key.data)
        self._take_items()
        self._take_delayed()
        pulls.tick_due(self._clock())
        if pulls.reports or pulls.counts:
            self._report()  # before the lenders hear of it: the engine may be waiting
        wake_at = pulls.finish_turn()
        if pulls.reports or pulls.counts:
            self._report()
        return wake_at

    def _take_items(self) -> None:
        """Handle what was posted, and what short reads that it leads to have come to."""
        while self._inbox.items or self._done:
            done, self._done = self._done, deque()
            for item in (*self._inbox.take(), *done):
                self._handle(item)

    def _handle(self, item: _Posted) -> None:
        if isinstance(item, JobResult):
            self._pulls.handle_result(item)
        elif isinstance(item, HeldTransport):
            self._reader.hold(item)
        elif isinstance(item, _Delayed):
            self._delayed.append(item)
        elif isinstance(item, LookedUp):
            self._dialer.looked_up(item, self._pulls.peers)
        elif isinstance(item, ThreadDied):
            raise PullerBroken(item.error)
        elif self._delayed:  # commands keep their order
            self._delayed.append(_Delayed(item, None))
        else:
            self._pulls.apply_command(item)

    def _take_delayed(self) -> None:
        """Carry out what waited for the GPU, up to the first command that still does."""
        while self._delayed:
            first = self._delayed[0]
            if first.after is not None and not first.after.query():
                return
            self._delayed.popleft()
            self._pulls.apply_command(first.command)

    def _report(self) -> None:
        """Let the engine have what the pulls report and count."""
        pulls = self._pulls
        turn = _PullerTurn(pulls.reports.copy(), dict(pulls.counts))
        pulls.reports.clear()
        pulls.counts.clear()
        if turn.reports:
            self._outbox.put(turn)
        else:
            self._outbox.put_quietly(turn)
