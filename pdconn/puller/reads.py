"""The reads of a decode rank: jobs for its transport, and the thread that carries them out.

Posting a read may copy the whole of it before it returns, so it happens on a thread of its
own: neither the engine nor the thread that renews claims ever waits for a copy.

``TransportJobs`` is the work without the thread: a simulation reads in virtual time with the
code that ``ReaderThread`` runs.  Long reads are posted in chunks, so that short ones get
their turn (:mod:`pdconn.puller.read_queue`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pdconn.integrity.memory import AnyMemory
from pdconn.integrity.reader import Expected
from pdconn.protocol.proof import PieceSum
from pdconn.puller.read_queue import ChunkSizer, PeerReadQueue, ReadChunk
from pdconn.sidechannel.clock import steady
from transport import PeerId, ReadId, ReadStats, Settled, Spans, Transport, TransportError
from transport.address import named_in
from transport.errors import BadAddress

log = logging.getLogger(__name__)

DRAIN_S = 5.0
"""How long closing waits for reads in flight; their memory is gone afterwards."""

_PAUSES_S = (0.0, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001)
"""Between polls of a read in flight: quick at first, then a thousand a second."""

_HANGING = 5000
"""Polls without a result after which a read is taken to hang, and polled every ``_HANGING_S``."""

_HANGING_S = 0.02

_NOTHING = ReadStats(0, 0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Connect:
    """Reach a peer's rank; answered by Connected under the same ``tag``."""

    tag: object
    address: bytes


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Forget a peer's rank; not answered."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Read:
    """Copy ``spans``; answered by ReadSettled under the same ``tag``."""

    tag: object
    peer: PeerId
    spans: Spans


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum what was read, in our memory; answered by Summed under the same ``tag``."""

    tag: object
    expected: tuple[Expected, ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """Our checksums, one per ``expected``; or ``error`` says why there are none."""

    tag: object
    answers: tuple[PieceSum, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Connected:
    """``peer`` is reachable, or ``error`` says why not."""

    tag: object
    peer: PeerId | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ReadSettled:
    """Nothing of the read can be written any more, as was seen at ``at`` seconds."""

    tag: object
    settled: Settled
    at: float


@dataclass(frozen=True, slots=True)
class ReaderStopped:
    """The reader's thread died of ``error``: what is in flight is unknown from now on."""

    error: str


Job = Connect | Disconnect | Read | Sum
JobResult = Connected | ReadSettled | Summed


class TransportJobs:
    """Carries out jobs on a transport, on the thread that calls it.

    Args:
        transport: closed by :meth:`close`.
        deliver: gets the results; must not block.
        sizer: how long the chunks are that reads are posted in.
    """

    def __init__(
        self,
        transport: Transport,
        deliver: Callable[[JobResult], None],
        clock: Callable[[], float] = steady,
        sizer: ChunkSizer | None = None,
    ) -> None:
        self._transport = transport
        self._deliver = deliver
        self._clock = clock
        self._sizer = sizer or ChunkSizer()
        self._queues: dict[PeerId, PeerReadQueue] = {}
        self._in_flight: dict[ReadId, ReadChunk] = {}
        self._users: Counter[PeerId] = Counter()
        self._addresses: dict[PeerId, bytes] = {}
        self._memory = AnyMemory()

    def __len__(self) -> int:
        """Chunks of reads that can still write."""
        return len(self._in_flight)

    @property
    def tags(self) -> set[object]:
        """Tags of the reads that are not over, posted or not."""
        return {read.tag for reads in self._queues.values() for read in reads}

    @property
    def is_ready(self) -> bool:
        """Whether a chunk of some read waits to be posted, and may be."""
        return self._ready_peer() is not None

    @property
    def poll_pause_s(self) -> float:
        """As ``Transport.poll_pause_s``."""
        return self._transport.poll_pause_s

    def do(self, job: Job) -> None:
        """Carry out a job.  A read is only queued: :meth:`post` begins it."""
        if isinstance(job, Connect):
            self._connect(job)
        elif isinstance(job, Sum):
            self._sum(job)
        elif isinstance(job, Disconnect):
            # A lender that was dialled anew, or under two host names, is one peer here.
            self._users[job.peer] -= 1
            if self._users[job.peer] <= 0:
                del self._users[job.peer]
                self._addresses.pop(job.peer, None)
                self._transport.disconnect(job.peer)
        else:
            reads = self._queues.setdefault(job.peer, PeerReadQueue(self._sizer))
            reads.add(job.tag, job.peer, job.spans)

    def post(self) -> bool:
        """Post one chunk, the peers taking turns; False if none may be.  May copy all of it."""
        peer = self._ready_peer()
        if peer is None:
            return False
        reads = self._queues[peer] = self._queues.pop(peer)  # last in line from now on
        chunk = reads.next()
        try:
            posted = self._transport.read(peer, chunk.spans)
        except TransportError as error:
            self._ended(chunk, Settled(_NOTHING, error))
        else:
            self._in_flight[posted] = chunk
        return True

    def poll(self) -> bool:
        """Deliver the reads that have settled; whether any chunk of any read has."""
        ended = False
        for read in list(self._in_flight):
            settled = self._transport.poll(read)
            if settled is not None:
                self._ended(self._in_flight.pop(read), settled)
                ended = True
        return ended

    def _ready_peer(self) -> PeerId | None:
        """The peer whose turn it is; None if nothing may be posted."""
        for peer, reads in self._queues.items():
            if reads.is_ready:
                return peer
        return None

    def _ended(self, chunk: ReadChunk, settled: Settled) -> None:
        read = chunk.read
        reads = self._queues[read.peer]
        now = self._clock()
        if reads.settled(chunk, settled, now):
            if not len(reads):
                del self._queues[read.peer]
            self._deliver(ReadSettled(read.tag, read.settled(), now))

    def close(self) -> None:
        """Close the transport, if nothing can write any more."""
        try:
            self._transport.close()
        except TransportError as error:
            log.warning("pdconn: the transport was left open: %s", error)

    def _sum(self, job: Sum) -> None:
        try:
            sums = tuple(expected.ours(self._memory) for expected in job.expected)
        except Exception as error:
            log.warning("pdconn: checksum of what was read failed", exc_info=True)
            self._deliver(Summed(job.tag, (), f"{type(error).__name__}: {error}"))
        else:
            self._deliver(Summed(job.tag, sums))

    def _connect(self, job: Connect) -> None:
        try:
            self._refuse_impostor(job.address)
            peer = self._transport.connect(job.address)
        except TransportError as error:
            self._deliver(Connected(job.tag, None, f"{type(error).__name__}: {error}"))
        else:
            self._users[peer] += 1
            self._addresses[peer] = job.address
            self._deliver(Connected(job.tag, peer, None))

    def _refuse_impostor(self, address: bytes) -> None:
        """Connect no other lender under the name of a peer that is in use.

        Transports take a newer address of a known peer.  Lenders register once and draw
        their names, so here a second address can only be an attempt to take over pulls.
        """
        peer = PeerId(named_in(address))
        if self._users[peer] > 0 and self._addresses[peer] != address:
            raise BadAddress(f"{peer} is in use under another address")


class ReaderThread:
    """Runs jobs in order and hands their results to ``deliver``, on this thread.

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
            log.critical("pdconn: the reader thread stopped", exc_info=True)
            self._deliver(ReaderStopped(f"{type(error).__name__}: {error}"))
        finally:
            self._transport_jobs.close()

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
                    self._transport_jobs.do(job)
                    if isinstance(job, Read):
                        continue  # a read that arrives now may go before what waits to be posted
            posted = self._transport_jobs.post()
            if self._transport_jobs.poll() or posted:
                idle_polls = 0

    @property
    def _is_busy(self) -> bool:
        return self._transport_jobs.is_ready or len(self._transport_jobs) > 0

    def _next_job(self, idle_polls: int) -> Job | None:
        """A job, or None to stop; waits for as long as there is nothing else to do.

        Raises:
            queue.Empty: there is no job, but reads to post or poll.
        """
        if self._transport_jobs.is_ready:
            return self._jobs.get_nowait()
        if len(self._transport_jobs):
            pause = _pause_after(idle_polls, self._transport_jobs.poll_pause_s)
            return self._jobs.get(timeout=pause)
        return self._jobs.get()


def _pause_after(idle_polls: int, least_s: float) -> float:
    if idle_polls > _HANGING:
        return _HANGING_S
    return max(_PAUSES_S[min(idle_polls, len(_PAUSES_S) - 1)], least_s)
