"""The puller: a decode rank's side of every transfer, on a thread of its own.

::

    engine thread ── post ── commands ──► WakeupQueue ─┐
                  ◄── collect ── Outbox ◄──────────────┤── one thread: Pulls + sockets
    lenders       ◄── frames ──────────────────────────┤
    reader thread ◄── jobs ── results ─────────────────┘

``Pulls`` is touched by this thread alone.  At the end of a turn its reports and counts move
into an :class:`~pdconn.sidechannel.thread_queues.Outbox`, and the engine takes them from there.
"""

from __future__ import annotations

import logging
import selectors
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdconn.lifecycle.pull import Patience
from pdconn.puller.commands import ClaimTicket, Command, CompareAnew, FailPull, ReadBlocks
from pdconn.puller.dialer import LookedUp, Resolve, SocketDialer
from pdconn.puller.peers import MAX_PEERS
from pdconn.puller.pulls import Pulls
from pdconn.puller.rank import Rank
from pdconn.puller.reader_thread import ReaderThread
from pdconn.puller.reads import Job, JobResult, Read, ReaderStopped
from pdconn.puller.results import NO_RESULTS, PullResults, Report
from pdconn.puller.verification import Verify
from pdconn.puller.warmup import WarmUp
from pdconn.sidechannel.clock import steady
from pdconn.sidechannel.dial import resolve
from pdconn.sidechannel.security import Security
from pdconn.sidechannel.thread_queues import Outbox, WakeupQueue
from transport import Transport
from transport.closing import Closing
from transport.streams import StreamPoint

log = logging.getLogger(__name__)


class PullerBroken(RuntimeError):
    """A thread of ours died; what is in flight is unknown, so the engine must stop."""


@dataclass(frozen=True, slots=True)
class _Delayed:
    """A command for when the GPU has come to ``after``."""

    command: Command
    after: StreamPoint | None


_Posted = Command | _Delayed | LookedUp | ReaderStopped | JobResult

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
        self._clock = clock
        self._inbox: WakeupQueue[_Posted] = WakeupQueue()
        self._outbox: Outbox[Report] = Outbox()
        self._selector = selectors.DefaultSelector()
        self._has_news = threading.Event()
        self._num_unreported = 0
        self._awaited: set[str] = set()
        self._delayed: deque[_Delayed] = deque()
        self._broken: str | None = None
        self._stopping = False
        self._may_read_now = False
        self._reader = ReaderThread(transport, self._hear, clock)
        self._dialer = SocketDialer(
            self._selector, self._inbox.put, security or Security(), through, resolve
        )
        self._pulls = Pulls(
            me,
            self._dialer,
            self._post_job,
            clock,
            patience=patience or Patience(),
            verify=verify,
            warm_up=warm_up,
            max_peers=max_peers,
        )
        self._thread = threading.Thread(target=self._run, name="pdconn-puller", daemon=True)
        self._thread.start()

    def _post_job(self, job: Job) -> None:
        """Have the reader do ``job``, or one short read a turn ourselves.

        Of many that are due at once the others are copied while we plan and say what is due.
        """
        if self._may_read_now and isinstance(job, Read):
            self._may_read_now = not self._reader.read_now(job)
            if not self._may_read_now:
                return
        self._reader.post(job)

    def _hear(self, result: JobResult | ReaderStopped) -> None:
        """A result of the reader.  Our own thread looks for items before it sleeps."""
        if threading.current_thread() is self._thread:
            self._inbox.put_quietly(result)
        else:
            self._inbox.put(result)

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
        if self._broken is not None:
            raise PullerBroken(self._broken)
        if not self._has_news.is_set():
            return NO_RESULTS
        self._has_news.clear()
        results = PullResults.of(self._outbox.take_reports())
        self._num_unreported -= len(results.records) + len(results.failed)
        self._awaited.difference_update(outcome.request for outcome in results.claims)
        return results

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to collect, or nothing to wait for.

        For an engine that has no other work: its steps would keep the cores busy that
        the pull needs.
        """
        if self._num_unreported > 0 or self._awaited:
            self._has_news.wait(timeout_s)

    def take_counts(self) -> dict[str, int]:
        """Why pulls failed, and how many were verified, since the last call."""
        return self._outbox.take_counts()

    @property
    def num_open(self) -> int:
        """Requests that are still in some table; 0 when all is quiet."""
        return self._pulls.num_open

    @property
    def num_peers(self) -> int:
        """Lenders that we know."""
        return len(self._pulls.peers)

    @property
    def num_warm(self) -> int:
        """Lenders of the warm-up that are warm now."""
        return self._pulls.warmup.num_warm

    def close(self) -> None:
        """Stop both threads and close every socket.  A second call does nothing."""
        if self._stopping:
            return
        self._stopping = True
        self._inbox.wake()
        self._thread.join()
        self._reader.close()
        self._inbox.close()

    def _run(self) -> None:
        self._selector.register(self._inbox.socket, selectors.EVENT_READ, None)
        wake_at = self._pulls.next_deadline()
        try:
            while not self._stopping:
                wake_at = self._turn(wake_at)
        except Exception as error:
            log.critical("pdconn: the puller thread stopped", exc_info=True)
            self._break(f"{type(error).__name__}: {error}")
        finally:
            self._pulls.peers.close_all()
            self._selector.close()

    def _turn(self, wake_at: float | None) -> float | None:
        """Wait until ``wake_at`` for something to do, and do it; returns when to wake next."""
        pulls, self._may_read_now = self._pulls, True
        timeout_s = None if wake_at is None else max(0.0, wake_at - self._clock())
        if self._delayed:
            timeout_s = _GPU_POLL_S if timeout_s is None else min(timeout_s, _GPU_POLL_S)
        has_work = pulls.unplanned or self._inbox.items
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
            self._hand_over()  # before the lenders hear of it: the engine may be waiting
        wake_at = pulls.finish_turn()
        if pulls.reports or pulls.counts:
            self._hand_over()
        return wake_at

    def _take_items(self) -> None:
        """Handle what was posted, and what short reads that it leads to have come to."""
        pulls = self._pulls
        while items := self._inbox.take():
            for item in items:
                if isinstance(item, _Delayed):
                    self._delayed.append(item)
                elif isinstance(item, Command):
                    if self._delayed:  # commands keep their order
                        self._delayed.append(_Delayed(item, None))
                    else:
                        pulls.apply(item)
                elif isinstance(item, JobResult):
                    pulls.handle(item)
                elif isinstance(item, LookedUp):
                    self._dialer.looked_up(item, pulls.peers)
                else:
                    self._break(item.error)

    def _take_delayed(self) -> None:
        """Carry out what waited for the GPU, up to the first command that still does."""
        while self._delayed:
            first = self._delayed[0]
            if first.after is not None and not first.after.query():
                return
            self._delayed.popleft()
            self._pulls.apply(first.command)

    def _hand_over(self) -> None:
        """Let the engine have what the pulls report and count."""
        pulls = self._pulls
        self._outbox.put(pulls.reports, pulls.counts)
        if pulls.reports:
            pulls.reports.clear()
            self._has_news.set()
        pulls.counts.clear()

    def _break(self, error: str) -> None:
        self._broken = error
        self._has_news.set()
