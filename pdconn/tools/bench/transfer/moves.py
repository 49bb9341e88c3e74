"""Measures one method once: moves the bytes and records the time and CPU."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdconn.planning.plan import Need, Pairing
from pdconn.protocol.ticket import BlockList
from pdconn.puller.reads import HeldTransport, JobResult, Read, ReaderThread, ReadSettled
from pdconn.sidechannel.clock import steady
from pdconn.threads import Box, ThreadDied
from pdconn.tools.bench.bench_errors import BenchError
from pdconn.tools.bench.interrupts import interruptible, raise_noted
from pdconn.tools.bench.transfer.methods import Method, ReadsByRank
from transport import PeerId, Settled, Transport

READ_TIMEOUT_S = 120.0
"""Seconds after which a pull fails."""

_PAUSES_S = (0.0, 0.00005, 0.001)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one method.

    ``runs`` are descriptors after merging.  ``plan_s`` and ``post_s`` are summed over the requests;
    ``wall_s`` is from the first plan to the last byte, ``each_s`` likewise for every request, all
    from the same start.  CPU is user and system time.
    """

    method: Method
    nbytes: int
    runs: int
    wall_s: float
    each_s: tuple[float, ...] = ()
    plan_s: float = 0.0
    post_s: float = 0.0
    reader_cpu_s: float = 0.0
    lender_cpu_s: float = 0.0


@dataclass(slots=True)
class MoveTally:
    """The running sums of one measurement."""

    nbytes: int = 0
    runs: int = 0
    post_s: float = 0.0
    _open: dict[int, int] = field(default_factory=dict)
    _ends: dict[int, float] = field(default_factory=dict)

    def expect(self, request: int, reads: int) -> None:
        """Expect ``reads`` reads of ``request``."""
        self._open[request] = reads

    @property
    def is_over(self) -> bool:
        """Whether every read of every request has settled."""
        return len(self._ends) == len(self._open)

    def add_settled(self, request: int, settled: Settled, at: float) -> None:
        """Add a read that settled at ``at``."""
        if settled.error is not None:
            raise BenchError(f"a read failed: {settled.error}") from settled.error
        self.nbytes += settled.stats.nbytes
        self.runs += settled.stats.num_descriptors
        self.post_s += settled.stats.post_s
        self._open[request] -= 1
        if self._open[request] == 0:
            self._ends[request] = at

    def sample(self, method: Method, began: float, plan_s: float) -> Sample:
        """The finished measurement; the caller adds CPU times."""
        each = tuple(self._ends[request] - began for request in sorted(self._ends))
        return Sample(method, self.nbytes, self.runs, max(each), each, plan_s, self.post_s)


class Mover:
    """Moves bytes over ``transport`` from ``peers``, by rank.

    The transport belongs to the reader's thread, which sleeps while nothing is posted; only then is
    the transport used from here.  :meth:`close` closes both.
    """

    def __init__(self, transport: Transport, peers: Mapping[int, PeerId]) -> None:
        self._transport = transport
        self._peers = peers
        self._news: Box[JobResult | HeldTransport | ThreadDied] = Box()
        self._reader = ReaderThread(transport, self._news)

    def close(self) -> None:
        """End the thread and close the transport."""
        self._reader.close()

    def pull(
        self, method: Method, pairing: Pairing, wanted: Sequence[tuple[Need, Sequence[BlockList]]]
    ) -> Sample:
        """Plan on this thread and read on the reader's, as a decode engine does.

        Raises:
            BenchError: a read failed, or timed out.
        """
        tally, plan_s, began = MoveTally(), 0.0, steady()
        for request, (need, lent) in enumerate(wanted):
            planning = steady()
            plan = pairing.plan(need, lent)
            plan_s += steady() - planning
            tally.expect(request, len(plan.reads))
            for rank, spans in plan.reads:
                self._reader.post_job(Read(request, self._peers[rank], spans))
        while not tally.is_over:
            with interruptible():
                news = self._news.take_one(READ_TIMEOUT_S)
            if news is None:
                raise BenchError(f"a pull did not end within {READ_TIMEOUT_S} s")
            if isinstance(news, HeldTransport):
                self._reader.hold(news)
                continue
            if not isinstance(news, ReadSettled) or not isinstance(news.tag, int):
                raise BenchError(f"unexpected report of the reader: {news}")
            tally.add_settled(news.tag, news.settled, news.at)
        return tally.sample(method, began, plan_s)

    def read_planned(
        self, method: Method, planned: Sequence[ReadsByRank], pause_s: float
    ) -> Sample:
        """Post all reads and poll, sleeping ``pause_s`` in between.

        Raises:
            BenchError: a read failed, or timed out.
        """
        tally, began = MoveTally(), steady()
        posted = {}
        for request, reads in enumerate(planned):
            tally.expect(request, len(reads))
            for rank, spans in reads:
                posted[self._transport.read(self._peers[rank], spans)] = request
        while posted:
            raise_noted()
            for read in list(posted):
                settled = self._transport.poll(read)
                if settled is not None:
                    tally.add_settled(posted.pop(read), settled, steady())
            if posted and pause_s:
                time.sleep(pause_s)
            if steady() - began > READ_TIMEOUT_S:
                raise BenchError(f"a read did not end within {READ_TIMEOUT_S} s")
        return tally.sample(method, began, 0.0)

    def best_pause(self, planned: Sequence[ReadsByRank]) -> float:
        """The faster pause between polls: none, or one that leaves a core to the copying side."""
        return min(
            _PAUSES_S,
            key=lambda pause_s: min(
                self.read_planned(Method.RAW, planned, pause_s).wall_s for _ in range(3)
            ),
        )
