"""The thread that carries out a decode rank's reads.

Posting a read may copy the whole of it before it returns, so it happens on a thread of its
own: neither the engine nor the thread that renews claims ever waits for a long copy.  A short read
takes less time than waking this thread and being woken by it, so the puller posts it itself.
The transport is one thread's at a time, and travels between the two with the jobs::

    reader   nothing is left to read ── HeldTransport ──► puller    short reads are posted there
    puller   any other job ── HeldTransport, job ──► reader         posts, polls, delivers

A reader that is in the middle of something keeps the transport, and gets short reads as well:
the puller never waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdconn.puller.read_queue import ChunkSizer
from pdconn.puller.reads import Job, JobResult, Read, TransportJobs
from pdconn.sidechannel.clock import steady
from pdconn.threads import Box, Worker
from transport import Transport

DRAIN_S = 5.0
"""How long closing waits for reads in flight; their memory is gone afterwards."""


@dataclass(slots=True, eq=False)
class HeldTransport:
    """The transport, in the hands of one thread, with results that nobody was given yet.

    Attributes:
        num_taken: jobs that the reader had taken when it let go of the transport.
    """

    jobs: TransportJobs
    results: list[JobResult]
    num_taken: int = 0

    @classmethod
    def of(
        cls, transport: Transport, clock: Callable[[], float], sizer: ChunkSizer | None
    ) -> HeldTransport:
        """Of ``transport``, which is used through it alone from now on."""
        results: list[JobResult] = []
        return cls(TransportJobs(transport, results.append, clock, sizer), results)

    @property
    def is_busy(self) -> bool:
        """Whether some read is not over, posted or not."""
        return self.jobs.is_ready or len(self.jobs) > 0

    def take_results(self) -> list[JobResult]:
        """Results since the last call."""
        results = self.results.copy()
        self.results.clear()
        return results


class ReaderThread:
    """The reader, as the thread that owns ``outbox`` sees it.

    Args:
        transport: owned from now on, and closed by :meth:`close`.
        outbox: gets results; a HeldTransport, to be given to :meth:`hold`; and ThreadDied, when
            the thread dies.
        sizer: as of :class:`TransportJobs`.
    """

    def __init__(
        self,
        transport: Transport,
        outbox: Box[Any],
        clock: Callable[[], float] = steady,
        sizer: ChunkSizer | None = None,
    ) -> None:
        inbox: Box[Job | HeldTransport] = Box()
        self._held: HeldTransport | None = None
        self._num_posted = 0
        loop = _ReaderLoop(HeldTransport.of(transport, clock, sizer), inbox, outbox, clock)
        self._worker = Worker("pdconn-reader", loop.run, inbox, outbox)
        self._worker.start()

    def post(self, job: Job) -> None:
        """Queue a job; never blocks."""
        self._num_posted += 1
        held, self._held = self._held, None
        self._worker.inbox.put_all((job,) if held is None else (held, job))

    def read_now(self, read: Read) -> list[JobResult] | None:
        """Post ``read`` on the calling thread, if that takes no longer than a short copy.

        Returns:
            What it has come to already, maybe nothing; or None, if it is to be posted by
            :meth:`post`.
        """
        held = self._held
        if held is None or not held.jobs.is_quick(read):
            return None
        held.jobs.do(read)
        held.jobs.post()
        held.jobs.poll()
        results = held.take_results()
        if held.is_busy:
            self._give_back()
        return results

    def hold(self, held: HeldTransport) -> None:
        """The reader has let go of its transport, and may have been given jobs since."""
        self._held = held
        if held.num_taken != self._num_posted:
            self._give_back()

    def close(self) -> None:
        """Finish the queued jobs, wait a while for reads in flight, close the transport.

        After it the outbox has no owner any more.
        """
        self._give_back()
        self._worker.end()
        for item in self._worker.outbox.take():
            if isinstance(item, HeldTransport):
                item.jobs.close()

    def _give_back(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._worker.inbox.put(held)


class _ReaderLoop:
    """The reader's own side.

    Attributes of its own: the transport while it is here, and jobs that came while it was not.
    """

    def __init__(
        self,
        held: HeldTransport,
        inbox: Box[Job | HeldTransport],
        outbox: Box[Any],
        clock: Callable[[], float],
    ) -> None:
        self._held: HeldTransport | None = held
        self._inbox, self._outbox, self._clock = inbox, outbox, clock
        self._waiting: deque[Job] = deque()
        self._num_taken = 0

    def run(self) -> None:
        """Carry out jobs until the inbox is closed, and reads in flight for a while after."""
        try:
            self._work()
        finally:
            if self._held is not None:
                self._held.jobs.close()

    def _work(self) -> None:
        stop_by: float | None = None
        idle_polls = 0
        while True:
            item = self._next_item(idle_polls)
            idle_polls = idle_polls + 1 if item is None else 0
            if item is None and self._inbox.is_closed and not self._inbox.items:
                now = self._clock()
                stop_by = now + DRAIN_S if stop_by is None else stop_by
                if self._held is None or not self._held.is_busy or now >= stop_by:
                    return
            if isinstance(item, HeldTransport):
                self._held = item
            elif item is not None:
                self._num_taken += 1
                self._waiting.append(item)
            if self._held is not None:
                if self._turn(self._held.jobs):
                    idle_polls = 0
                self._deliver(self._held)

    def _next_item(self, idle_polls: int) -> Job | HeldTransport | None:
        """A job or the transport; None where there is none, but reads to post or poll."""
        timeout_s: float | None = None
        if self._held is not None:
            jobs = self._held.jobs
            if jobs.is_ready:
                timeout_s = 0.0
            elif len(jobs):
                timeout_s = jobs.pause_s(idle_polls)
        item = self._inbox.take_one(timeout_s)
        if item is None and timeout_s and self._inbox.is_closed:
            time.sleep(timeout_s)  # a closed box does not wait
        return item

    def _turn(self, jobs: TransportJobs) -> bool:
        """Do the jobs, post and poll; whether anything was posted or has settled."""
        is_read = False
        while self._waiting:
            job = self._waiting.popleft()
            jobs.do(job)
            is_read = isinstance(job, Read)
        if is_read:
            return True  # a read that arrives now may go before what waits to be posted
        posted = jobs.post()
        return jobs.poll() or posted

    def _deliver(self, held: HeldTransport) -> None:
        """Hand results out, and the transport with them when nothing is left to do."""
        results = held.take_results()
        if held.is_busy or self._inbox.items or self._inbox.is_closed or self._outbox.is_closed:
            if results:
                self._outbox.put_all(results)
            return
        held.num_taken, self._held = self._num_taken, None
        if results:
            # The transport first: what a result leads to may be a short read.
            self._outbox.put_all((held, *results))
        else:
            self._outbox.put_quietly(held)
