"""The puller: a decode rank's side of every transfer, on a thread of its own.

::

    engine thread ── post_command ──► SelectedBox ─────┐
                  ◄── take_results ── Box of turns ◄───┤── one thread: Pulls + sockets
    lenders       ◄── frames ──────────────────────────┤
    reader thread ◄── jobs ── results ─────────────────┤
    name servers  ◄── one thread a name ── LookedUp ───┘

``Puller`` is the engine's end of the boxes, ``_PullerLoop`` what the thread owns, and
``SocketDialer`` opens its sockets.
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
from pdconn.lifecycle.turns import Urgency
from pdconn.puller.commands import (
    ClaimOutcome,
    ClaimTicket,
    Command,
    CompareAnew,
    ExpectedPull,
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
from pdconn.threads import (
    Box,
    SelectedBox,
    ThreadDied,
    ThreadReports,
    ThreadTurn,
    Worker,
    put_turn,
)
from transport import Transport
from transport.closing import Closing
from transport.streams import StreamPoint

MAX_LOOKUPS = 32
"""Names that are looked up at the same time; others wait."""

Resolve = Callable[[str, int], Address]
"""Resolves host and port (:func:`pdconn.sidechannel.connection.resolve`); may block for seconds."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Look-up ``number`` has ended with an address, or with an error."""

    number: int
    found: Address | OSError


class SocketDialer:
    """Dials lenders over TCP.

    A name server may take seconds to answer, and the thread that renews claims must not wait for
    it, so each host that is not an address is looked up by a thread of its own.

    Args:
        selector: watches the connections, with their peers as data.
        outbox: receives a :class:`LookedUp` from another thread, for :meth:`looked_up`.
        security: how lenders must authenticate.
        through: maps a lender's host and port to those to dial instead, for debugging.
        resolve: looks up a name, on a thread of its own.
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
        """Connect to ``peer``, or look up its host first."""
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
        """Connect to a peer whose host was looked up."""
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
        connection.watch_socket(self._selector, peer, connecting=True)
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
                Worker("pdconn-lookup", look, Box(), self._outbox).start_thread()
            except RuntimeError as error:  # no thread to spare
                self._outbox.put(LookedUp(number, OSError(errno.EAGAIN, str(error))))

    def _next_to_look_up(self) -> Peer | None:
        """Peers of pulls first; warm-ups use at most half of the look-ups."""
        if self._for_pulls:
            return self._for_pulls.popleft()
        if self._for_warmup and self._num_for_warmup < MAX_LOOKUPS // 2:
            return self._for_warmup.popleft()
        return None


def _look_up(resolve: Resolve, host: str, port: int, number: int, outbox: Box[Any]) -> None:
    """Look up one name, on a thread of its own."""
    found: Address | OSError
    try:
        found = resolve(host, port)
    except OSError as error:
        found = error
    outbox.put(LookedUp(number, found))


@dataclass(frozen=True, slots=True)
class PullResults:
    """Reports since the last call of :meth:`Puller.take_results`.

    Attributes:
        records: pulls that were received.
        failed: pulls that failed.
        released: requests whose quarantine has ended.
        claims: awaited claims that were granted, refused or lost.
        expected: pulls of which nothing is reported for a while.
    """

    records: tuple[PullRecord, ...]
    failed: tuple[FailedPull, ...]
    released: tuple[str, ...]
    claims: tuple[ClaimOutcome, ...] = ()
    expected: tuple[ExpectedPull, ...] = ()

    @classmethod
    def from_reports(cls, reports: Iterable[Report]) -> PullResults:
        """Sort ``reports`` by their kind."""
        reports = list(reports)
        return cls(
            tuple(report for report in reports if isinstance(report, PullRecord)),
            tuple(report for report in reports if isinstance(report, FailedPull)),
            tuple(report.request for report in reports if isinstance(report, Released)),
            tuple(report for report in reports if isinstance(report, ClaimOutcome)),
            tuple(report for report in reports if isinstance(report, ExpectedPull)),
        )

    @property
    def received(self) -> tuple[str, ...]:
        """Requests that were received."""
        return tuple(record.request for record in self.records)


NO_RESULTS = PullResults((), (), ())
"""The results of most steps of an engine."""


class PullerBroken(RuntimeError):
    """A thread of the puller has died; reads in flight are unknown, so the engine must stop."""


@dataclass(frozen=True, slots=True)
class _Delayed:
    """A command that waits until the GPU has reached ``after``."""

    command: Command
    after: StreamPoint | None


_Posted = Command | _Delayed | LookedUp | HeldTransport | JobResult | ThreadDied

_GPU_POLL_S = 0.0002
"""Between polls of the GPU for a command that waits for it; a GPU cannot wake a thread."""

_REPORTED = (ReadBlocks, FailPull)
"""Commands that a report answers."""


class Puller(Closing):
    """Pulls for one decode rank until closed.

    Args:
        me: which rank this is; its memory is registered with ``transport``.
        transport: owned from now on, by the reader thread.
        patience: how long a pull waits for what.
        verify: how much is compared with what was lent.
        security: how lenders must authenticate; by default they need not.
        warm_up: lenders to know before anything is pulled from them; its scratch is
            registered with ``transport``.
        through: maps a lender's host and port to those to dial instead, for debugging.
        resolve: looks up the host of a ticket.
        max_peers: lenders that are known at the same time.
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
        self._reported: ThreadReports[Report] = ThreadReports()
        self._num_unreported = 0
        self._prefetches: set[str] = set()
        self._awaited: set[str] = set()
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
            self._reported.outbox,
            selector=selector,
            dialer=dialer,
            reader=ReaderThread(transport, self._inbox, clock),
            make_pulls=make_pulls,
            clock=clock,
        )
        outbox = self._reported.outbox
        self._worker = Worker("pdconn-puller", loop.run_puller, self._inbox, outbox)
        self._worker.start_thread()

    def post_command(self, command: Command, after: StreamPoint | None = None) -> None:
        """Queue ``command``.  Never blocks.

        Args:
            after: a point that the GPU must reach first, such as its last write to the blocks.
        """
        if isinstance(command, _REPORTED):
            self._num_unreported += 1
        if isinstance(command, ReadBlocks) and command.urgency is Urgency.PREFETCH:
            self._prefetches.add(command.request)
        if isinstance(command, ClaimTicket):
            if command.is_awaited:
                self._awaited.add(command.request)
        elif not isinstance(command, CompareAnew):
            self._awaited.discard(command.request)
        self._inbox.put(command if after is None else _Delayed(command, after))

    def take_results(self) -> PullResults:
        """Pulls that ended, and outcomes of claims, since the last call.  Never blocks.

        Raises:
            PullerBroken: a thread of the puller has died.
        """
        reported = self._reported
        reported.take_in()
        if reported.error is not None:
            raise PullerBroken(reported.error)
        if not reported.reports:
            return NO_RESULTS
        results = PullResults.from_reports(reported.reports)
        reported.reports.clear()
        self._num_unreported -= len(results.records) + len(results.failed)
        if self._prefetches:
            self._prefetches.difference_update(record.request for record in results.records)
            self._prefetches.difference_update(failed.request for failed in results.failed)
        self._awaited.difference_update(
            outcome.request for outcome in results.claims if outcome.is_final
        )
        return results

    @property
    def is_awaited(self) -> bool:
        """Whether the engine waits for the end of a pull."""
        return self._num_unreported > 0

    @property
    def most_urgent(self) -> Urgency | None:
        """The most urgent class of the pulls whose end the engine waits for; None without one."""
        if self._num_unreported > len(self._prefetches):
            return Urgency.PULL
        return Urgency.PREFETCH if self._prefetches else None

    def wait_for_report(self, timeout_s: float) -> None:
        """Sleep until there are results, or nothing is awaited.

        For an engine without other work, whose steps would occupy the cores that the pull needs.
        """
        if not self._reported.reports and (self._num_unreported > 0 or self._awaited):
            self._reported.outbox.wait_for_item(timeout_s)

    def take_pull_counts(self) -> dict[str, int]:
        """Counts of failed and verified pulls since the last call."""
        return self._reported.remove_counts()

    def close(self) -> None:
        """Stop both threads and close every socket.  Idempotent."""
        self._worker.end_thread()
        self._inbox.free_sockets()


class _PullerLoop:
    """What the puller's thread owns: pulls, sockets, and its end of the reader's boxes."""

    def __init__(
        self,
        inbox: SelectedBox[_Posted],
        outbox: Box[ThreadTurn[Report] | ThreadDied],
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

    def run_puller(self) -> None:
        """Take turns until the inbox is closed."""
        self._selector.register(self._inbox.socket, selectors.EVENT_READ, None)
        wake_at = self._pulls.next_alarm()
        try:
            while not self._inbox.is_closed:
                wake_at = self._turn(wake_at)
        finally:
            self._pulls.peers.close_all()
            self._selector.close()
            self._inbox.close()  # the reader keeps its transport
            self._reader.close()

    def _post_job(self, job: Job) -> None:
        """Pass ``job`` to the reader, or post it ourselves: one short read a turn."""
        # Of several short reads the reader copies the others, while we plan and send messages.
        if self._may_read_now and isinstance(job, Read):
            results = self._reader.read_now(job)
            if results is not None:
                self._may_read_now = False
                self._done.extend(results)
                return
        self._reader.post_job(job)

    def _turn(self, wake_at: float | None) -> float | None:
        """Wait until ``wake_at`` for events and handle them; returns when to wake next."""
        pulls, self._may_read_now = self._pulls, True
        timeout_s = None if wake_at is None else max(0.0, wake_at - self._clock())
        if self._delayed:
            timeout_s = _GPU_POLL_S if timeout_s is None else min(timeout_s, _GPU_POLL_S)
        has_work = pulls.unplanned or self._done or self._inbox.items
        for key, events in self._selector.select(0.0 if has_work else timeout_s):
            if key.data is None:
                self._inbox.drain_socket()
                continue
            if events & selectors.EVENT_READ:
                pulls.handle_readable(key.data)
            if events & selectors.EVENT_WRITE:
                pulls.handle_writable(key.data)
        self._take_items()
        self._take_delayed()
        pulls.tick_due(self._clock())
        self._report()  # before messages to lenders: the engine may be waiting
        wake_at = pulls.finish_turn()
        self._report()
        return wake_at

    def _take_items(self) -> None:
        """Handle the items of the inbox, and the results of short reads that they lead to."""
        while self._inbox.items or self._done:
            done, self._done = self._done, deque()
            for item in (*self._inbox.take_all(), *done):
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
        """Carry out delayed commands, up to the first that still waits for the GPU."""
        while self._delayed:
            first = self._delayed[0]
            if first.after is not None and not first.after.query():
                return
            self._delayed.popleft()
            self._pulls.apply_command(first.command)

    def _report(self) -> None:
        """Pass reports and counts to the engine's thread."""
        put_turn(self._outbox, self._pulls.reports, self._pulls.counts)
