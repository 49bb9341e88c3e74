"""Reads from one peer: cut into chunks, posted in a fair order, few bytes at a time.

A backend that copies while it posts (shared memory) occupies the reader's thread until it is
done, and one that does not (TCP, RDMA) serves reads in the order of posting.  Either way a
short pull would wait for every long one before it.  So a read is cut into chunks, at most two of
them are in flight, and which read's chunk is next is decided fairly among tenants, and among the
pulls of each (:mod:`pdconn.puller.fair_queue`).  After a chunk has failed, no other chunk of its
read is posted.  Reads of prefetches have a queue of their own: which class goes next is decided for
all peers together (:mod:`pdconn.lifecycle.turns`).

Tenants are fair among each other at each peer, and not across peers: a peer that has something to
send has two chunks in flight, whatever others do, so how peers share our end of the link is decided
by the network.  A tenant with pulls from three peers may get three times what one gets that pulls
from a fourth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pdconn.lifecycle.turns import Urgency
from pdconn.puller.fair_queue import FairQueue
from transport import PeerId, ReadStats, Settled, Spans, TransportError
from transport.types import U64

CHUNK_S = 0.1

FIRST_NBYTES = 128 << 20
LEAST_NBYTES = 16 << 20
MOST_NBYTES = 1 << 30


class ChunkSizer:
    """Sets the length of chunks so that the link takes ``CHUNK_S`` for each.

    Each chunk costs half a millisecond of CPU time, whatever the link; how long other reads wait
    for it depends on the link.

    Args:
        nbytes: of the first chunk.
        least: of any chunk; shorter ones, whose time depends on latencies, change nothing.
    """

    def __init__(self, nbytes: int = FIRST_NBYTES, least: int = LEAST_NBYTES) -> None:
        self.chunk_nbytes = nbytes
        self._least = least
        self._nbytes_per_s = math.inf

    def expected_s(self, nbytes: int) -> float:
        """Seconds that a chunk takes at the rate of the last long one; 0.0 where that is unknown.

        It is unknown before the first long chunk, and for short chunks.
        """
        return nbytes / self._nbytes_per_s if nbytes >= self._least else 0.0

    def learn_pace(self, nbytes: int, seconds: float) -> None:
        """Update the rate: a chunk took ``seconds``, in which the peer sent nothing else."""
        if nbytes >= self._least and seconds > 0:
            self._nbytes_per_s = nbytes / seconds

    def learn_size(self, stats: ReadStats) -> None:
        """Update the length of chunks by a settled one."""
        seconds = max(stats.post_s, stats.transfer_s)
        if stats.nbytes >= self._least and seconds > 0:
            wanted = int(stats.nbytes / seconds * CHUNK_S)
            self.chunk_nbytes = min(max(wanted, self._least), MOST_NBYTES)


@dataclass(slots=True, eq=False)
class QueuedRead:
    """A read that has not settled.

    Attributes:
        tag: of its result.
        posted: bytes posted so far.
        periods: when each settled chunk was posted, and when it was observed to settle.
    """

    tag: object
    peer: PeerId
    spans: Spans
    total: int
    posted: int = 0
    begun: bool = False
    in_flight: int = 0
    stats: list[ReadStats] = field(default_factory=list)
    periods: list[tuple[float, float]] = field(default_factory=list)
    error: TransportError | None = None
    _ends: U64 | None = None

    @classmethod
    def unposted(cls, tag: object, peer: PeerId, spans: Spans) -> QueuedRead:
        """A read of which nothing is posted yet."""
        return cls(tag, peer, spans, spans.total_bytes)

    @property
    def has_more(self) -> bool:
        """Whether a chunk is still to be posted; an empty read has one chunk."""
        return self.error is None and (self.posted < self.total or not self.begun)

    @property
    def is_over(self) -> bool:
        """Whether no chunk is in flight or still to be posted."""
        return not self.in_flight and not self.has_more

    def cut(self, nbytes: int) -> ReadChunk:
        """The next ``nbytes`` bytes, or the rest."""
        start, self.begun = self.posted, True
        self.posted = end = min(self.total, start + nbytes)
        if end - start == self.total:
            return ReadChunk(self, self.spans, self.total)
        if self._ends is None:
            self._ends = np.cumsum(self.spans.nbytes)
        return ReadChunk(self, self.spans.between(self._ends, start, end), end - start)

    def note_chunk(self, stats: ReadStats, at: float) -> None:
        """Record a chunk that was observed to settle at ``at`` seconds."""
        self.stats.append(stats)
        self.periods.append((at - stats.transfer_s, at))

    def outcome(self) -> Settled:
        """How the whole read ended.  Chunks in flight at the same time count once."""
        if len(self.stats) == 1:
            return Settled(self.stats[0], self.error)
        stats = ReadStats(
            sum(part.nbytes for part in self.stats),
            sum(part.num_descriptors for part in self.stats),
            sum(part.post_s for part in self.stats),
            _union(self.periods),
        )
        return Settled(stats, self.error)


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """A part of a read that is posted at once."""

    read: QueuedRead
    spans: Spans
    nbytes: int


class PeerReadQueue:
    """The reads from one peer that have not settled.

    Two chunks may be in flight, so that one moves while the other settles.
    """

    def __init__(self, sizer: ChunkSizer) -> None:
        self._sizer = sizer
        self._queues: dict[Urgency, FairQueue[QueuedRead]] = {}
        self._open: dict[QueuedRead, None] = {}
        self._in_flight_nbytes = 0
        self._settled_at = self._expected_at = -math.inf

    def add_read(
        self,
        tag: object,
        peer: PeerId,
        spans: Spans,
        urgency: Urgency = Urgency.PULL,
        tenant: bytes = b"",
    ) -> None:
        """Queue a read for a request of ``tenant``."""
        read = QueuedRead.unposted(tag, peer, spans)
        self._open[read] = None
        self._queues.setdefault(urgency, FairQueue()).add_pull(read, read.total, tenant)

    def __iter__(self) -> Iterator[QueuedRead]:
        """Reads that have not settled, oldest first."""
        return iter(self._open)

    def __len__(self) -> int:
        """How many reads have not settled."""
        return len(self._open)

    def waiting(self) -> list[Urgency]:
        """The classes of reads of which a chunk is still to be posted."""
        return [urgency for urgency in self._queues if self._first(urgency) is not None]

    def may_post(self, urgency: Urgency) -> bool:
        """Whether a chunk of such a read may be posted now."""
        window = 2 * self._sizer.chunk_nbytes
        return self._in_flight_nbytes < window and self._first(urgency) is not None

    def next_chunk(self, urgency: Urgency) -> ReadChunk:
        """The chunk to post now; only while :meth:`may_post`."""
        read, queue = self._first(urgency), self._queues[urgency]
        assert read is not None
        nbytes = self._sizer.chunk_nbytes
        # The rest of a read that is alone may be as long as two chunks, which may be in flight.
        is_alone = len(self._open) == 1 and not self._in_flight_nbytes
        if is_alone and read.total - read.posted <= 2 * nbytes:
            nbytes *= 2
        part = read.cut(nbytes)
        read.in_flight += 1
        self._in_flight_nbytes += part.nbytes
        queue.served(read, part.nbytes)
        if not read.has_more:
            queue.remove_pull(read)
        return part

    def expected_at(self, part: ReadChunk, now: float) -> float:
        """When ``part``, posted at ``now`` seconds, is expected to arrive, after earlier ones."""
        self._expected_at = max(now, self._expected_at) + self._sizer.expected_s(part.nbytes)
        return self._expected_at

    def chunk_settled(self, part: ReadChunk, settled: Settled, at: float) -> bool:
        """Record that a chunk can no longer write, as observed at ``at`` seconds.

        Returns:
            Whether its read has settled.
        """
        read = part.read
        read.in_flight -= 1
        self._in_flight_nbytes -= part.nbytes
        read.note_chunk(settled.stats, at)
        if settled.error is None:
            self._sizer.learn_size(settled.stats)
            began = max(self._settled_at, at - settled.stats.transfer_s)
            self._sizer.learn_pace(part.nbytes, at - began)
        else:
            read.error = read.error or settled.error
            for queue in self._queues.values():  # it is in one of them, if it has more
                queue.remove_pull(read)
        self._settled_at = at
        if not self._in_flight_nbytes:
            self._expected_at = at
        if not read.is_over:
            return False
        del self._open[read]
        return True

    def _first(self, urgency: Urgency) -> QueuedRead | None:
        """The read to post next of a class."""
        queue = self._queues.get(urgency)
        return None if queue is None else queue.first()


def _union(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of ``intervals``."""
    covered, until = 0.0, -math.inf
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
