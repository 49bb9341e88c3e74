"""The reads of a decode rank: jobs for its transport, their results, and the thread that does them.

``TransportJobs`` is the work without the thread: a simulation reads in virtual time with the same
code.  Long reads are posted in chunks, so that short ones get their turn
(:mod:`pdconn.puller.read_queue`).

Posting a read may copy all of it before it returns, so it happens on a thread of its own: neither
the engine nor the thread that renews claims waits for a long copy.  Waking that thread and being
woken by it takes longer than a short read, so the puller posts short reads itself.  The transport
belongs to one thread at a time, and travels between the two with the jobs::

    reader   nothing is left to read ── HeldTransport ──► puller    short reads are posted there
    puller   any other job ── HeldTransport, job ──► reader         posts, polls, delivers

A busy reader keeps the transport, and is given short reads as well: the puller never waits for it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdconn.integrity.checks import Expected
from pdconn.integrity.memory import AnyMemory
from pdconn.integrity.zeros import fill_with_zeros
from pdconn.lifecycle.turns import ClassOrder, Urgency
from pdconn.planning.plan import NO_GAPS, Gaps
from pdconn.protocol.proof import PieceSum
from pdconn.puller.read_queue import ChunkSizer, PeerReadQueue, ReadChunk
from pdconn.sidechannel.clock import steady
from pdconn.threads import Box, Worker
from transport import PeerId, ReadId, ReadStats, Settled, Spans, Transport, TransportError
from transport.address import named_in
from transport.errors import BackendFailure, BadAddress

log = logging.getLogger(__name__)

QUICK_NBYTES = 4 << 20
"""Bytes of a short read.  Where posting copies (shared memory) they take half a millisecond: about
as long as waking another thread and being woken by it, and less than a plan."""

QUICK_RUNS = 512
"""Runs of a short read; each costs about a microsecond to post."""

_PAUSES_S = (0.0, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001)
"""Between polls of a read in flight: short at first, then a thousand polls a second."""

_RARELY_S = 0.004
_EXPECTED_SHARE = 0.8
"""A long read is polled every ``_RARELY_S`` seconds until this share of its expected time has
passed: each poll takes the interpreter's lock, and UCX's lock from the thread that moves the bytes.
The end of a read that is faster than expected is seen ``_RARELY_S`` late at most."""

_HANGING = 5000
"""Polls without a result after which a read is taken to hang, and polled every ``_HANGING_S``."""

_HANGING_S = 0.02

_NOTHING = ReadStats(0, 0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to a peer's rank; answered by Connected under the same ``tag``."""

    tag: object
    address: bytes


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Forget a peer's rank; not answered."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Read:
    """Zero ``gaps``, then copy ``spans``; answered by ReadSettled under the same ``tag``."""

    tag: object
    peer: PeerId
    spans: Spans
    gaps: Gaps = NO_GAPS
    urgency: Urgency = Urgency.PULL
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class Sum:
    """Checksum the bytes that were read; answered by Summed under the same ``tag``."""

    tag: object
    expected: tuple[Expected, ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """Our checksums, one per ``expected``; or ``error`` is why there are none."""

    tag: object
    answers: tuple[PieceSum, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Connected:
    """``peer`` is reachable, or ``error`` is why it is not."""

    tag: object
    peer: PeerId | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ReadSettled:
    """The read can no longer write, as observed at ``at`` seconds.

    ``num_overdue``: chunks that were posted since the last one while more urgent reads waited.
    """

    tag: object
    settled: Settled
    at: float
    num_overdue: int = 0


Job = Connect | Disconnect | Read | Sum
JobResult = Connected | ReadSettled | Summed


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A posted chunk, which is not expected to settle before ``soon_at`` seconds."""

    chunk: ReadChunk
    soon_at: float


class TransportJobs:
    """Carries out jobs on a transport, on the thread that calls it.

    Args:
        transport: closed by :meth:`close`.
        deliver: called with each result; must not block.
        sizer: gives the length of the chunks that reads are posted in.
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
        self._in_flight: dict[ReadId, _InFlight] = {}
        self._users: Counter[PeerId] = Counter()
        self._proven: set[PeerId] = set()
        self._addresses: dict[PeerId, bytes] = {}
        self._memory = AnyMemory()
        self._order = ClassOrder()

    def __len__(self) -> int:
        """Chunks that can still write."""
        return len(self._in_flight)

    @property
    def tags(self) -> set[object]:
        """Tags of the reads that have not settled, posted or not."""
        return {read.tag for reads in self._queues.values() for read in reads}

    @property
    def is_ready(self) -> bool:
        """Whether a chunk of some read may be posted now."""
        return self._ready_peer() is not None

    def is_quick(self, read: Read) -> bool:
        """Whether ``read`` can be posted now in no more time than a short copy takes."""
        spans, gaps = read.spans, read.gaps
        return (
            not self._queues
            and read.peer in self._proven  # the first read connects, which may take long
            and len(spans) + len(gaps) <= QUICK_RUNS
            and spans.total_bytes + gaps.total_bytes <= QUICK_NBYTES
            # Only the thread that connects is bound to a GPU, so it reads device memory.
            and spans.local_device.kind == spans.remote_device.kind == "cpu"
        )

    def pause_s(self, idle_polls: int) -> float:
        """Seconds until the next poll, after ``idle_polls`` in a row in which nothing settled."""
        soon_at = min((each.soon_at for each in self._in_flight.values()), default=0.0)
        if self._clock() + _RARELY_S < soon_at:
            return _RARELY_S
        if idle_polls > _HANGING:
            return _HANGING_S
        pause = _PAUSES_S[min(idle_polls, len(_PAUSES_S) - 1)]
        return max(pause, self._transport.poll_pause_s)

    def do_job(self, job: Job) -> None:
        """Do a job.  A read is only queued: :meth:`post_chunk` posts it."""
        if isinstance(job, Connect):
            self._connect(job)
        elif isinstance(job, Sum):
            self._sum(job)
        elif isinstance(job, Disconnect):
            # A lender that was dialled again, or under two host names, is one peer here.
            self._users[job.peer] -= 1
            if self._users[job.peer] <= 0:
                del self._users[job.peer]
                self._addresses.pop(job.peer, None)
                self._proven.discard(job.peer)
                self._transport.disconnect(job.peer)
        elif self._fill(job):
            reads = self._queues.setdefault(job.peer, PeerReadQueue(self._sizer))
            reads.add_read(job.tag, job.peer, job.spans, job.urgency, job.tenant)

    def post_chunk(self) -> bool:
        """Post one chunk, of the peers in turn; False if none may be.  May copy all of it."""
        found = self._ready_peer()
        if found is None:
            return False
        peer, urgency = found
        began = self._clock()
        self._order.note_served(urgency, began, self._waiting())
        reads = self._queues[peer] = self._queues.pop(peer)  # last in line from now on
        chunk = reads.next_chunk(urgency)
        try:
            posted = self._transport.read(peer, chunk.spans)
        except TransportError as error:
            self._ended(chunk, Settled(_NOTHING, error))
        else:
            soon_at = began + _EXPECTED_SHARE * (reads.expected_at(chunk, began) - began)
            self._in_flight[posted] = _InFlight(chunk, soon_at)
        return True

    def poll_reads(self) -> bool:
        """Deliver the reads that have settled; whether any chunk has."""
        ended = False
        for read in list(self._in_flight):
            settled = self._transport.poll(read)
            if settled is not None:
                self._ended(self._in_flight.pop(read).chunk, settled)
                ended = True
        return ended

    def _ready_peer(self) -> tuple[PeerId, Urgency] | None:
        """The peer to read from next, and for what; None if nothing may be posted."""
        # The least urgent class waits for all chunks of the others, also those for which a peer has
        # no room yet: they share our end of the link.
        urgency = self._order.choose(self._waiting(), self._clock())
        if urgency is None:
            return None
        for peer, reads in self._queues.items():
            if reads.may_post(urgency):
                return peer, urgency
        return None

    def _waiting(self) -> set[Urgency]:
        """The classes of which chunks are still to be posted."""
        return {urgency for reads in self._queues.values() for urgency in reads.waiting()}

    def _ended(self, chunk: ReadChunk, settled: Settled) -> None:
        read = chunk.read
        reads = self._queues[read.peer]
        now = self._clock()
        if settled.ok and read.peer in self._users:
            self._proven.add(read.peer)
        if reads.chunk_settled(chunk, settled, now):
            if not len(reads):
                del self._queues[read.peer]
            overdue = self._order.take_overdue()
            self._deliver(ReadSettled(read.tag, read.outcome(), now, overdue))

    def close(self) -> None:
        """Close the transport, unless a read can still write."""
        try:
            self._transport.close()
        except TransportError as error:
            log.warning("pdconn: the transport was left open: %s", error)

    def _fill(self, job: Read) -> bool:
        """Zero the gaps; False if that failed, and the read with it."""
        if not len(job.gaps):  # the usual case
            return True
        try:
            fill_with_zeros(job.gaps)
        except RuntimeError as error:
            log.warning("pdconn: zeroing the gaps of a pull failed", exc_info=True)
            failed = Settled(_NOTHING, BackendFailure(f"{type(error).__name__}: {error}"))
            self._deliver(ReadSettled(job.tag, failed, self._clock()))
            return False
        return True

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
        """Refuse another address of a peer that is in use."""
        # Transports accept a newer address of a known peer.  Lenders register once and draw their
        # names, so a second address can only be an attempt to take over pulls.
        peer = PeerId(named_in(address))
        if self._users[peer] > 0 and self._addresses[peer] != address:
            raise BadAddress(f"{peer} is in use under another address")


DRAIN_S = 5.0
"""How long closing waits for reads in flight; afterwards their memory is freed."""


@dataclass(slots=True, eq=False)
class HeldTransport:
    """The transport, which one thread holds, and results that were not delivered yet.

    Attributes:
        num_taken: jobs that the reader had taken when it passed the transport on.
    """

    jobs: TransportJobs
    results: list[JobResult]
    num_taken: int = 0

    @classmethod
    def from_transport(
        cls, transport: Transport, clock: Callable[[], float], sizer: ChunkSizer | None
    ) -> HeldTransport:
        """Take over ``transport``, which is used through this object alone from now on."""
        results: list[JobResult] = []
        return cls(TransportJobs(transport, results.append, clock, sizer), results)

    @property
    def is_busy(self) -> bool:
        """Whether some read has not settled, posted or not."""
        return self.jobs.is_ready or len(self.jobs) > 0

    def take_results(self) -> list[JobResult]:
        """Results since the last call."""
        results = self.results.copy()
        self.results.clear()
        return results


class ReaderThread:
    """The reader's interface for the thread that owns ``outbox``.

    Args:
        transport: owned from now on, and closed by :meth:`close`.
        outbox: receives results; a HeldTransport, to be passed to :meth:`hold`; and ThreadDied,
            when the thread dies.
        sizer: gives the length of chunks (:class:`TransportJobs`).
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
        loop = _ReaderLoop(
            HeldTransport.from_transport(transport, clock, sizer), inbox, outbox, clock
        )
        self._worker = Worker("pdconn-reader", loop.run_reader, inbox, outbox)
        self._worker.start_thread()

    def post_job(self, job: Job) -> None:
        """Queue a job.  Never blocks."""
        self._num_posted += 1
        held, self._held = self._held, None
        self._worker.inbox.put_all((job,) if held is None else (held, job))

    def read_now(self, read: Read) -> list[JobResult] | None:
        """Post ``read`` on the calling thread, if that takes no longer than a short copy.

        Returns:
            Results that are known already; None if ``read`` was not posted.
        """
        held = self._held
        if held is None or not held.jobs.is_quick(read):
            return None
        held.jobs.do_job(read)
        held.jobs.post_chunk()
        held.jobs.poll_reads()
        results = held.take_results()
        if held.is_busy:
            self._give_back()
        return results

    def hold(self, held: HeldTransport) -> None:
        """Hold the transport that the reader has passed on."""
        self._held = held
        if held.num_taken != self._num_posted:  # the reader was given jobs meanwhile
            self._give_back()

    def close(self) -> None:
        """Finish the queued jobs, wait up to ``DRAIN_S`` for reads in flight, close the transport.

        The outbox must no longer have an owner.
        """
        self._give_back()
        self._worker.end_thread()
        for item in self._worker.outbox.take_all():
            if isinstance(item, HeldTransport):
                item.jobs.close()

    def _give_back(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._worker.inbox.put(held)


class _ReaderLoop:
    """What the reader's thread owns: the transport, and the jobs that wait for it."""

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

    def run_reader(self) -> None:
        """Do jobs until the inbox is closed, then wait up to ``DRAIN_S`` for reads in flight."""
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
        """A job or the transport; None if there is none, and reads are to be posted or polled."""
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
            jobs.do_job(job)
            is_read = isinstance(job, Read)
        if is_read:
            return True  # a read that arrives now may be posted before those that wait
        posted = jobs.post_chunk()
        return jobs.poll_reads() or posted

    def _deliver(self, held: HeldTransport) -> None:
        """Put results into the outbox, and the transport when nothing is left to do."""
        results = held.take_results()
        if held.is_busy or self._inbox.items or self._inbox.is_closed or self._outbox.is_closed:
            if results:
                self._outbox.put_all(results)
            return
        held.num_taken, self._held = self._num_taken, None
        if results:
            # The transport first: a result may lead to a short read.
            self._outbox.put_all((held, *results))
        else:
            self._outbox.put_quietly(held)
