"""The reader: a thread that owns the transport of a decode rank.

Posting a read may copy the whole of it before it returns, so it happens here:
neither the engine nor the thread that renews claims ever waits for a copy.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from pdconn.puller.jobs import Job, News, Read, ReaderStopped
from pdconn.puller.read_queue import ChunkSizer
from pdconn.puller.reading import TransportJobs
from pdconn.sidechannel.clock import steady
from transport import Transport

log = logging.getLogger(__name__)

DRAIN_S = 5.0
"""How long closing waits for reads in flight; their memory is gone afterwards."""

_PAUSES_S = (0.0, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001)
"""Between polls of a read in flight: quick at first, then a thousand a second."""

_HANGING = 5000
"""Polls in vain after which a read is taken to hang, and polled every ``_HANGING_S``."""

_HANGING_S = 0.02


class ReaderThread:
    """Runs jobs in order and hands their answers to ``deliver``, on this thread.

    Args:
        transport: owned from now on, and closed by :meth:`close`.
        deliver: must not block; also hears of an error of our own.
        pace: as of :class:`TransportJobs`.
    """

    def __init__(
        self,
        transport: Transport,
        deliver: Callable[[News | ReaderStopped], None],
        clock: Callable[[], float] = steady,
        pace: ChunkSizer | None = None,
    ) -> None:
        self._reading = TransportJobs(transport, deliver, clock, pace)
        self._deliver = deliver
        self._clock = clock
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pdconn-reader", daemon=True)
        self._thread.start()

    def post(self, job: Job) -> None:
        """Queue a job; never blocks."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the queued jobs, wait a while for reads in flight, close the transport."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.critical("the reader thread stopped", exc_info=True)
            self._deliver(ReaderStopped(f"{type(error).__name__}: {error}"))
        finally:
            self._reading.close()

    def _work(self) -> None:
        stop_by: float | None = None
        idle_polls = 0
        while stop_by is None or (self._is_busy and self._clock() < stop_by):
            try:
                job = self._next_job(idle_polls)
            except queue.Empty:
                idle_polls += 1
            else:
                idle_polls = 0
                if job is None:
                    stop_by = self._clock() + DRAIN_S
                else:
                    self._reading.do(job)
                    if isinstance(job, Read):
                        continue  # whoever asks now may go before what waits to be posted
            posted = self._reading.post()
            if self._reading.poll() or posted:
                idle_polls = 0

    @property
    def _is_busy(self) -> bool:
        return self._reading.is_ready or len(self._reading) > 0

    def _next_job(self, idle_polls: int) -> Job | None:
        """A job, None to stop; waits as long as nothing else is to be done.

        Raises:
            queue.Empty: there is no job, and reads to see to.
        """
        if self._reading.is_ready:
            return self._jobs.get_nowait()
        if len(self._reading):
            return self._jobs.get(timeout=_pause_after(idle_polls))
        return self._jobs.get()


def _pause_after(idle_polls: int) -> float:
    if idle_polls > _HANGING:
        return _HANGING_S
    return _PAUSES_S[min(idle_polls, len(_PAUSES_S) - 1)]
