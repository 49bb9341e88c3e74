"""The thread that carries out a decode rank's reads.

Posting a read may copy the whole of it before it returns, so it happens on a thread of its
own: neither the engine nor the thread that renews claims ever waits for a long copy.  A short read
takes less time than waking this thread and being woken by it, so the thread that asks for it
posts it itself, if nothing else is read::

    puller      read_now(short read) ── lock ──► posted, polled ── settled: its result at once
                                                                └─ not yet: the reader polls it
                post(any other job) ── queue ──► reader thread

Who holds the lock has the transport.  The puller never waits for it: a reader that is in the middle
of something gets the short read as well.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from pdconn.puller.read_queue import ChunkSizer
from pdconn.puller.reads import Job, JobResult, Read, ReaderStopped, TransportJobs
from pdconn.sidechannel.clock import steady
from transport import Transport

log = logging.getLogger(__name__)

DRAIN_S = 5.0
"""How long closing waits for reads in flight; their memory is gone afterwards."""


class _Look:
    """A job: something is in flight that this thread has not posted."""


class ReaderThread:
    """Runs jobs and hands their results to ``deliver``.

    It does so on a thread of its own; of :meth:`read_now`, on the caller's.

    Args:
        transport: owned from now on, and closed by :meth:`close`.
        deliver: must not block; also gets ReaderStopped when this thread dies.
        sizer: as of :class:`TransportJobs`.
    """

    def __init__(
        self,
        transport: Transport,
        deliver: Callable[[JobResult | ReaderStopped], None],
        clock: Callable[[], float] = steady,
        sizer: ChunkSizer | None = None,
    ) -> None:
        self._transport_jobs = TransportJobs(transport, deliver, clock, sizer)
        self._lock = threading.Lock()
        self._deliver = deliver
        self._clock = clock
        self._jobs: queue.SimpleQueue[Job | _Look | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pdconn-reader", daemon=True)
        self._thread.start()

    def post(self, job: Job) -> None:
        """Queue a job; never blocks."""
        self._jobs.put(job)

    def read_now(self, read: Read) -> bool:
        """Post ``read`` on the calling thread, if that takes no longer than a short copy.

        It may overtake jobs that are queued.

        Returns:
            Whether it was; if not, :meth:`post` it.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            jobs = self._transport_jobs
            if not jobs.is_quick(read):
                return False
            jobs.do(read)
            jobs.post()
            jobs.poll()
            if len(jobs) or jobs.is_ready:
                self._jobs.put(_Look())
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        """Finish the queued jobs, wait a while for reads in flight, close the transport."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.critical("pdconn: the reader thread stopped", exc_info=True)
            self._deliver(ReaderStopped(f"{type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._transport_jobs.close()

    def _work(self) -> None:
        stop_by: float | None = None
        idle_polls = 0
        while stop_by is None or (self._is_busy and self._clock() < stop_by):
            job: Job | _Look | None = _Look()
            try:
                job = self._next_job(idle_polls)
            except queue.Empty:
                idle_polls += 1
            else:
                idle_polls = 0
                if job is None:
                    stop_by = self._clock() + DRAIN_S
            if self._turn(job):
                idle_polls = 0

    def _turn(self, job: Job | _Look | None) -> bool:
        """Do ``job``, post and poll; whether anything was posted or has settled."""
        jobs = self._transport_jobs
        with self._lock:
            if isinstance(job, Job):
                jobs.do(job)
                if isinstance(job, Read):
                    return True  # a read that arrives now may go before what waits to be posted
            posted = jobs.post()
            return jobs.poll() or posted

    @property
    def _is_busy(self) -> bool:
        with self._lock:
            return self._transport_jobs.is_ready or len(self._transport_jobs) > 0

    def _next_job(self, idle_polls: int) -> Job | _Look | None:
        """A job, or None to stop; waits for as long as there is nothing else to do.

        Raises:
            queue.Empty: there is no job, but reads to post or poll.
        """
        with self._lock:
            jobs, timeout_s = self._transport_jobs, None
            if jobs.is_ready:
                timeout_s = 0.0
            elif len(jobs):
                timeout_s = jobs.pause_s(idle_polls)
        return self._jobs.get(timeout=timeout_s)
