"""Reads from one peer: cut into slices, posted in turn, few bytes at a time.

A backend that copies while it posts (shared memory) holds the reader's thread until it
is done, and one that does not (TCP, RDMA) serves what was posted first.  Either way a
short pull would wait for every long one that came before it.  So a read is cut into
slices, no more than two of them are in flight, and ``lifecycle.turns`` says whose slice
is next.  A read whose slice failed has no further slice posted.

Each slice costs half a millisecond of our own, whatever the link; how long others wait
for it depends on the link.  So slices are as long as the link takes ``SLICE_S`` for, and
the last of a read that is alone may take twice as long: what can be in flight at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pdconn.puller.fair_queue import FairQueue
from transport import PeerId, ReadStats, Settled, Spans, TransportError
from transport.types import U64

SLICE_S = 0.1

FIRST_NBYTES = 128 << 20
LEAST_NBYTES = 16 << 20
MOST_NBYTES = 1 << 30


class ChunkSizer:
    """How many bytes a slice may have, learnt from the slices before it.

    Args:
        nbytes: of the first one; also the least of one that something is learnt from.
        least: of any.
    """

    def __init__(self, nbytes: int = FIRST_NBYTES, least: int = LEAST_NBYTES) -> None:
        self.slice_nbytes = nbytes
        self._least = least

    def learn(self, stats: ReadStats) -> None:
        """A slice took so long.  Short ones tell of latencies and not of the link."""
        seconds = max(stats.post_s, stats.transfer_s)
        if stats.nbytes >= self._least and seconds > 0:
            wanted = int(stats.nbytes / seconds * SLICE_S)
            self.slice_nbytes = min(max(wanted, self._least), MOST_NBYTES)


@dataclass(slots=True, eq=False)
class QueuedRead:
    """A read as it was asked for; ``tag`` is whose it is.

    ``ends`` are the running sums of its runs' bytes, ``posted`` the bytes that were
    posted so far; ``flights`` are when each settled slice was posted and seen to settle.
    """

    tag: object
    peer: PeerId
    spans: Spans
    ends: U64
    total: int
    posted: int = 0
    begun: bool = False
    in_flight: int = 0
    stats: list[ReadStats] = field(default_factory=list)
    flights: list[tuple[float, float]] = field(default_factory=list)
    error: TransportError | None = None

    @classmethod
    def of(cls, tag: object, peer: PeerId, spans: Spans) -> QueuedRead:
        """Nothing of it is posted yet."""
        ends = np.cumsum(spans.nbytes)
        return cls(tag, peer, spans, ends, int(ends[-1]) if len(ends) else 0)

    @property
    def has_more(self) -> bool:
        """Whether a slice of it is still to be posted; an empty read has one, too."""
        return self.error is None and (self.posted < self.total or not self.begun)

    @property
    def is_over(self) -> bool:
        """Whether nothing of it can be written any more, nor will be posted."""
        return not self.in_flight and not self.has_more

    def cut(self, nbytes: int) -> ReadChunk:
        """The next ``nbytes`` bytes, or what is left of them."""
        start, self.begun = self.posted, True
        self.posted = min(self.total, start + nbytes)
        spans = _between(self.spans, self.ends, start, self.posted)
        return ReadChunk(self, spans, self.posted - start)

    def add(self, stats: ReadStats, at: float) -> None:
        """A slice settled, seen at ``at`` seconds."""
        self.stats.append(stats)
        self.flights.append((at - stats.transfer_s, at))

    def settled(self) -> Settled:
        """How the whole of it ended.  Slices in flight at once do not count twice."""
        stats = ReadStats(
            sum(part.nbytes for part in self.stats),
            sum(part.num_descriptors for part in self.stats),
            sum(part.post_s for part in self.stats),
            _union(self.flights),
        )
        return Settled(stats, self.error)


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """A part of a read, to be posted in one piece."""

    whole: QueuedRead
    spans: Spans
    nbytes: int


class PeerReadQueue:
    """The reads from one peer that are not over.

    Two slices' bytes may be in flight: while one settles the other is under way.
    """

    def __init__(self, pace: ChunkSizer) -> None:
        self._pace = pace
        self._turns: FairQueue[QueuedRead] = FairQueue()
        self._open: dict[QueuedRead, None] = {}
        self._in_flight_nbytes = 0

    def add(self, tag: object, peer: PeerId, spans: Spans) -> None:
        """Queue a read."""
        whole = QueuedRead.of(tag, peer, spans)
        self._open[whole] = None
        self._turns.add(whole, whole.total)

    def __iter__(self) -> Iterator[QueuedRead]:
        """Reads that are not over, oldest first."""
        return iter(self._open)

    def __len__(self) -> int:
        """How many reads are not over."""
        return len(self._open)

    @property
    def is_ready(self) -> bool:
        """Whether a slice may be posted now."""
        window = 2 * self._pace.slice_nbytes
        return self._first() is not None and self._in_flight_nbytes < window

    def next(self) -> ReadChunk:
        """The slice to post now; only while the lane is ready."""
        whole = self._first()
        assert whole is not None
        nbytes = self._pace.slice_nbytes
        is_alone = len(self._open) == 1 and not self._in_flight_nbytes
        if is_alone and whole.total - whole.posted <= 2 * nbytes:
            nbytes *= 2
        part = whole.cut(nbytes)
        whole.in_flight += 1
        self._in_flight_nbytes += part.nbytes
        self._turns.served(part.nbytes)
        if not whole.has_more:
            self._turns.done()
        return part

    def settled(self, part: ReadChunk, settled: Settled, at: float) -> None:
        """A slice can write nothing any more, seen at ``at`` seconds."""
        whole = part.whole
        whole.in_flight -= 1
        self._in_flight_nbytes -= part.nbytes
        whole.add(settled.stats, at)
        if settled.error is None:
            self._pace.learn(settled.stats)
        else:
            whole.error = whole.error or settled.error
        if whole.is_over:
            del self._open[whole]

    def _first(self) -> QueuedRead | None:
        """Whose turn it is, of those that did not fail while they waited for it."""
        while (whole := self._turns.first()) is not None and not whole.has_more:
            self._turns.done()
        return whole


def _union(intervals: list[tuple[float, float]]) -> float:
    """Length of what any of them covers."""
    covered, until = 0.0, -math.inf
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _between(spans: Spans, ends: U64, start: int, end: int) -> Spans:
    """Bytes ``[start, end)`` of ``spans``; a run that crosses either bound is cut in two."""
    if (start, end) == (0, int(ends[-1]) if len(ends) else 0):
        return spans
    first = int(np.searchsorted(ends, np.uint64(start), side="right"))
    last = int(np.searchsorted(ends, np.uint64(end), side="left"))
    part = slice(first, last + 1)
    local, remote, nbytes = (
        column[part].copy() for column in (spans.local, spans.remote, spans.nbytes)
    )
    nbytes[-1] -= ends[last] - np.uint64(end)
    skipped = np.uint64(start) - (ends[first] - spans.nbytes[first])
    local[0] += skipped
    remote[0] += skipped
    nbytes[0] -= skipped
    return Spans(local, remote, nbytes, spans.local_device, spans.remote_device)
