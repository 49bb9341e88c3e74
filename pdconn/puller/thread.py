"""The puller: a decode rank's side of every transfer, on a thread of its own.

::

    engine thread ── post ── commands ──► SelectedBox ─┐
                  ◄── collect ── Box of turns ◄────────┤── one thread: Pulls + sockets
    lenders       ◄── frames ──────────────────────────┤
    reader thread ◄── jobs ── results ─────────────────┘

``Puller`` is the engine's end of the boxes, ``_PullerLoop`` what the thread owns.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pdconn.lifecycle.pull import Patience
from pdconn.puller.commands import ClaimTicket, Command, CompareAnew, FailPull, ReadBlocks
from pdconn.puller.dialer import LookedUp, Resolve, SocketDialer
from pdconn.puller.peers import MAX_PEERS
from pdconn.puller.pulls import Pulls
from pdconn.puller.rank import Rank
from pdconn.puller.reader_thread import HeldTransport, ReaderThread
from pdconn.puller.reads import Job, JobResult, Read
from pdconn.puller.results import NO_RESULTS, PullResults, Report
from pdconn.puller.verification import Verify
from pdconn.puller.warmup import WarmUp
from pdconn.sidechannel.clock import steady
from pdconn.sidechannel.dial import resolve
from pdconn.sidechannel.security import Security
from pdconn.threads import Box, SelectedBox, ThreadDied, Worker
from transport import Transport
from transport.closing import Closing
from transport.streams import StreamPoint


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
        wake_at = self._pulls.next_deadline()
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
                pulls.serve(key.data)
            if events & selectors.EVENT_WRITE:
                pulls.flush(key.data)
        self._take_items()
        self._take_delayed()
        pulls.tick(self._clock())
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
            self._pulls.handle(item)
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
            self._pulls.apply(item)

    def _take_delayed(self) -> None:
        """Carry out what waited for the GPU, up to the first command that still does."""
        while self._delayed:
            first = self._delayed[0]
            if first.after is not None and not first.after.query():
                return
            self._delayed.popleft()
            self._pulls.apply(first.command)

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
