"""The puller: a decode rank's side of every transfer, on a thread of its own.

::

    engine thread ── hold, pull, cancel ──► mailbox ─┐
                  ◄── collect ── outcome             ├── one thread: pulls + sockets
    lenders       ◄── frames ────────────────────────┤
    reader thread ◄── jobs ── answers ───────────────┘

``hold`` claims a lease as soon as the request is known, so that waiting in the
engine's queue costs nothing and greeting a new peer overlaps with it.  ``pull``
says that blocks are there; ``cancel`` that they will never be wanted.
"""

from __future__ import annotations

import logging
import selectors
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pdconn.lifecycle.pull import Patience
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import Ticket
from pdconn.puller.dialer import LookedUp, SocketDialer
from pdconn.puller.jobs import News, ReaderStopped
from pdconn.puller.proving import Verify
from pdconn.puller.pulls import Pulls
from pdconn.puller.rank import Rank
from pdconn.puller.reads import ReaderThread
from pdconn.puller.results import NO_NEWS, PullResults
from pdconn.puller.warming import WarmUp
from pdconn.sidechannel.clock import steady
from pdconn.sidechannel.security import Security
from pdconn.sidechannel.wakeup_queue import WakeupQueue
from transport import Transport

log = logging.getLogger(__name__)


class PullerBroken(RuntimeError):
    """A thread of ours died; what is in flight is unknown, so the engine must stop."""


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


_Post = _Hold | _Pull | _Cancel | LookedUp | ReaderStopped | News


class Puller:
    """Pulls for one decode rank until closed.

    Args:
        me: which rank this is; its memory is registered with ``transport``.
        transport: owned from now on, by the reader thread.
        patience: how long a pull waits for what.
        verify: how much is compared with what was lent.
        security: what lenders must prove; nothing by default.
        warm_up: lenders to know before anything is pulled from them; its scratch is
            registered with ``transport``.
        through: maps a lender's host and port to those to dial instead, for debugging.
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
        clock: Callable[[], float] = steady,
    ) -> None:
        self._clock = clock
        self._mailbox: WakeupQueue[_Post] = WakeupQueue()
        self._selector = selectors.DefaultSelector()
        self._news = threading.Event()
        self._owed = 0
        self._broken: str | None = None
        self._stopping = False
        self._reader = ReaderThread(transport, self._mailbox.put, clock)
        self._dialer = SocketDialer(
            self._selector, self._mailbox.put, security or Security(), through
        )
        self._pulls = Pulls(
            me,
            self._dialer,
            self._reader.post,
            clock,
            patience=patience or Patience(),
            verify=verify,
            warm_up=warm_up,
        )
        self._thread = threading.Thread(target=self._run, name="pdconn-puller", daemon=True)
        self._thread.start()

    def hold(self, request: str, pull: str, ticket: Ticket) -> None:
        """Claim what ``ticket`` names and keep it, under the pull id ``pull``."""
        self._mailbox.put(_Hold(request, pull, ticket))

    def pull(self, request: str, need: Need) -> None:
        """Blocks are there for a held request: read, then report it."""
        self._owed += 1
        self._mailbox.put(_Pull(request, need))

    def cancel(self, request: str) -> None:
        """Give the claim up.  A pull under way is still reported, once it is safe."""
        self._mailbox.put(_Cancel(request))

    def collect(self) -> PullResults:
        """What was received and what failed since the last call; never blocks.

        Raises:
            PullerBroken: one of our threads died.
        """
        if self._news.is_set():
            self._news.clear()
        if self._broken is not None:
            raise PullerBroken(self._broken)
        if not self._pulls.outbox:
            return NO_NEWS
        outcome = PullResults.of(self._pulls.outbox)
        self._owed -= len(outcome.records) + len(outcome.failed)
        return outcome

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to collect, or nothing to wait for.

        For an engine that has no other work: its steps would keep the cores busy that
        the pull needs.
        """
        if self._owed > 0:
            self._news.wait(timeout_s)

    def take_counts(self) -> dict[str, int]:
        """Why pulls failed, and how many were proven, since the last call."""
        if not self._pulls.counts:
            return {}
        counts, self._pulls.counts = self._pulls.counts, Counter()
        return dict(counts)

    @property
    def num_open(self) -> int:
        """Requests that are still in some table; 0 when all is quiet."""
        return self._pulls.num_open

    @property
    def num_peers(self) -> int:
        """Lenders that we know."""
        return len(self._pulls.connections)

    @property
    def num_warm(self) -> int:
        """Lenders of the warm-up that are warm now."""
        return self._pulls.warming.num_warm

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
            self._pulls.connections.close_all()
            self._selector.close()

    def _turn(self) -> None:
        pulls = self._pulls
        for key, events in self._selector.select(self._patience()):
            if key.data is None:
                self._mailbox.drain()
                continue
            if events & selectors.EVENT_READ:
                pulls.connections.serve(key.data)
            if events & selectors.EVENT_WRITE:
                pulls.connections.flush(key.data)
        for item in self._mailbox.take():
            self._obey(item)
        pulls.tick(self._clock())
        if pulls.outbox:
            self._news.set()  # before the lenders hear of it: the engine may be waiting
        pulls.connections.flush_all()
        if pulls.has_unplanned:
            pulls.plan_one()
        if pulls.outbox:
            self._news.set()

    def _patience(self) -> float | None:
        if self._pulls.has_unplanned:
            return 0.0
        deadline = self._pulls.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def _obey(self, item: _Post) -> None:
        if isinstance(item, _Hold):
            self._pulls.hold(item.request, item.pull, item.ticket)
        elif isinstance(item, _Pull):
            self._pulls.want(item.request, item.need)
        elif isinstance(item, _Cancel):
            self._pulls.cancel(item.request)
        elif isinstance(item, LookedUp):
            self._dialer.looked_up(item, self._pulls.connections)
        elif isinstance(item, ReaderStopped):
            self._broken = item.error
            self._news.set()
        else:
            self._pulls.answered(item)
