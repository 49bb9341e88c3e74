"""Reads from one peer: cut into slices, posted in turn, few bytes at a time.

A backend that copies while it posts (shared memory) holds the reader's thread until it
is done, and one that does not (TCP, RDMA) serves what was posted first.  Either way a
short pull would wait for every long one that came before it.  So a read is cut into
slices, no more than a window of bytes is in flight, and ``lifecycle.turns`` says whose
slice is next.  A read whose slice failed has no further slice posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pdconn.lifecycle.turns import Turns
from transport import PeerId, ReadStats, Settled, Spans, TransportError

SLICE_NBYTES = 64 << 20
"""A slice costs about half a millisecond of our own, and takes a slow link (CMA with
4 KiB pages, TCP on loopback) some fifteen."""


@dataclass(slots=True, eq=False)
class Whole:
    """A read as it was asked for; ``tag`` is whose it is."""

    tag: object
    peer: PeerId
    slices: deque[Spans]
    in_flight: int = 0
    stats: list[ReadStats] = field(default_factory=list)
    error: TransportError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it can be written any more, nor will be posted."""
        return not self.in_flight and not self.slices

    def settled(self) -> Settled:
        """How the whole of it ended."""
        return Settled(_joined(self.stats), self.error)


class Lane:
    """The reads from one peer that are not over.

    Two slices' bytes may be in flight: while one settles the other is under way.
    """

    def __init__(self, slice_nbytes: int) -> None:
        self._slice_nbytes = slice_nbytes
        self._window_nbytes = 2 * slice_nbytes
        self._turns: Turns[Whole] = Turns()
        self._open: dict[Whole, None] = {}
        self._in_flight_nbytes = 0

    def add(self, tag: object, peer: PeerId, spans: Spans) -> None:
        """Queue a read."""
        whole = Whole(tag, peer, deque(slices(spans, self._slice_nbytes)))
        self._open[whole] = None
        self._turns.add(whole, spans.total_bytes)

    def __iter__(self) -> Iterator[Whole]:
        """Reads that are not over, oldest first."""
        return iter(self._open)

    def __len__(self) -> int:
        """How many reads are not over."""
        return len(self._open)

    @property
    def is_ready(self) -> bool:
        """Whether a slice may be posted now."""
        return self._first() is not None and self._in_flight_nbytes < self._window_nbytes

    def next(self) -> tuple[Whole, Spans]:
        """The slice to post now; only while the lane is ready."""
        whole = self._first()
        assert whole is not None
        spans = whole.slices.popleft()
        whole.in_flight += 1
        self._in_flight_nbytes += spans.total_bytes
        self._turns.served(spans.total_bytes)
        if not whole.slices:
            self._turns.done()
        return whole, spans

    def settled(self, whole: Whole, spans: Spans, settled: Settled) -> None:
        """A slice can write nothing any more."""
        whole.in_flight -= 1
        self._in_flight_nbytes -= spans.total_bytes
        whole.stats.append(settled.stats)
        if settled.error is not None:
            whole.error = whole.error or settled.error
            whole.slices.clear()
        if whole.is_over:
            del self._open[whole]

    def _first(self) -> Whole | None:
        """Whose turn it is, of those that did not fail while they waited for it."""
        while (whole := self._turns.first()) is not None and not whole.slices:
            self._turns.done()
        return whole


def slices(spans: Spans, nbytes: int) -> Iterator[Spans]:
    """``spans`` in parts of ``nbytes`` bytes each, in their order; the last may be shorter.

    A run that crosses from one part into the next is cut in two.
    """
    total = spans.total_bytes
    if total <= nbytes:
        yield spans
        return
    starts = np.cumsum(spans.nbytes) - spans.nbytes
    cuts = np.arange(0, total, nbytes, dtype=np.uint64)
    at = np.union1d(starts, cuts)
    run = np.searchsorted(starts, at, side="right") - 1
    within = at - starts[run]
    local, remote = spans.local[run] + within, spans.remote[run] + within
    lengths = np.diff(at, append=np.uint64(total))
    firsts = np.searchsorted(at, cuts)
    for first, end in zip(firsts, [*firsts[1:], len(at)], strict=True):
        part = slice(first, end)
        yield Spans(
            local[part], remote[part], lengths[part], spans.local_device, spans.remote_device
        )


def _joined(parts: list[ReadStats]) -> ReadStats:
    """Bytes, descriptors and time of all parts; slices of one read overlap at most in pairs."""
    return ReadStats(
        sum(part.nbytes for part in parts),
        sum(part.num_descriptors for part in parts),
        sum(part.post_s for part in parts),
        sum(part.transfer_s for part in parts),
    )
