"""When reads in flight are polled: rarely while they may be expected to last, then often."""

from __future__ import annotations

import numpy as np
import pytest

from pdconn.lifecycle.turns import Urgency
from pdconn.puller.read_queue import ChunkSizer, PeerReadQueue
from pdconn.puller.reads import JobResult, Read, TransportJobs
from transport import Memory, PeerId, ReadStats, Settled, Spans
from transport.testing.inprocess.faults import Lost
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport

RARELY_S = 0.004
LEAST = 1000
NBYTES = 10_000


class Reader:
    """Jobs over a transport whose reads never settle; time is set by hand."""

    def __init__(self, *, nbytes_per_s: float | None) -> None:
        network = InProcessNetwork(script=lambda _: Lost())
        self._ours, theirs = np.zeros(NBYTES, np.uint8), np.ones(NBYTES, np.uint8)
        lender = InProcessTransport(network, "prefill")
        lender.register([Memory(theirs.ctypes.data, NBYTES)])
        reader = InProcessTransport(network, "decode")
        reader.register([Memory(self._ours.ctypes.data, NBYTES)])
        self._peer: PeerId = reader.connect(lender.address())
        self._remote = theirs
        self.now = 100.0
        self.results: list[JobResult] = []
        sizer = ChunkSizer(NBYTES, LEAST)
        if nbytes_per_s is not None:
            sizer.learn_pace(LEAST, LEAST / nbytes_per_s)
        sizer.chunk_nbytes = NBYTES
        self.jobs = TransportJobs(reader, self.results.append, lambda: self.now, sizer)

    def read(self, nbytes: int) -> None:
        spans = Spans(
            np.array([self._ours.ctypes.data], np.uint64),
            np.array([self._remote.ctypes.data], np.uint64),
            np.array([nbytes], np.uint64),
        )
        self.jobs.do_job(Read("r", self._peer, spans))
        assert self.jobs.post_chunk()

    def pauses(self, until: float) -> list[tuple[float, float]]:
        """Every pause with the time at which it began, until ``until`` seconds after now."""
        began, found, idle_polls = self.now, [], 0
        while self.now < began + until:
            assert not self.jobs.poll_reads()
            pause = self.jobs.pause_s(idle_polls)
            found.append((self.now - began, pause))
            self.now += max(pause, 1e-6)
            idle_polls += 1
        return found


def test_a_read_that_lasts_is_polled_rarely_until_it_is_nearly_due() -> None:
    reader = Reader(nbytes_per_s=100_000.0)  # the read of 10 000 bytes takes 0.1 s
    reader.read(NBYTES)
    pauses = reader.pauses(0.1)
    early = [pause for at, pause in pauses if at < 0.08 - RARELY_S]
    late = [pause for at, pause in pauses if at >= 0.08]
    assert set(early) == {RARELY_S}
    assert max(late) <= 0.001
    assert len(early) == pytest.approx(0.08 / RARELY_S, abs=2)


def test_without_a_long_read_before_it_is_polled_often_at_once() -> None:
    """The control: nothing is expected of the same read, so it is looked for all the time."""
    reader = Reader(nbytes_per_s=None)
    reader.read(NBYTES)
    assert max(pause for _, pause in reader.pauses(0.1)) <= 0.001


def test_a_short_read_is_polled_often_at_once() -> None:
    reader = Reader(nbytes_per_s=100_000.0)
    reader.read(100)  # 1 ms
    assert max(pause for _, pause in reader.pauses(0.05)) <= 0.001


def test_the_soonest_of_several_reads_decides() -> None:
    reader = Reader(nbytes_per_s=100_000.0)
    reader.read(100)
    reader.read(NBYTES - 100)
    assert reader.jobs.pause_s(0) <= 0.001


def test_a_chunk_behind_another_is_expected_after_it() -> None:
    reader = Reader(nbytes_per_s=100_000.0)
    reader.read(NBYTES // 2)  # due at 0.05 s
    reader.now += 0.04
    reader.read(NBYTES // 2)  # due at 0.1 s
    assert reader.jobs.pause_s(0) <= 0.001, "the first is due soon"
    first = next(iter(reader.jobs._in_flight))
    del reader.jobs._in_flight[first]
    pauses = reader.pauses(0.06)
    early = [pause for at, pause in pauses if at < 0.048 - RARELY_S]  # of the 0.06 s left
    assert set(early) == {RARELY_S}
    assert max(pause for at, pause in pauses if at >= 0.048) <= 0.001


def test_what_waits_behind_another_chunk_is_expected_after_it() -> None:
    reader = Reader(nbytes_per_s=100_000.0)
    reader.read(NBYTES // 2)
    reader.now += 0.05  # the first is due, and late
    reader.read(NBYTES // 2)
    assert reader.jobs.pause_s(0) <= 0.001, "the first may settle at any time"


def test_a_sizer_expects_the_pace_of_the_last_long_chunk() -> None:
    sizer = ChunkSizer(LEAST, LEAST)
    assert sizer.expected_s(10**12) == 0.0
    sizer.learn_pace(LEAST - 1, 1.0)
    assert sizer.expected_s(10**12) == 0.0, "a short one tells of latencies"
    sizer.learn_pace(5 * LEAST, 0.5)
    assert sizer.expected_s(LEAST) == pytest.approx(0.1)
    assert sizer.expected_s(LEAST - 1) == 0.0, "latencies decide"


def test_the_wait_behind_another_chunk_is_no_part_of_the_pace() -> None:
    """Two chunks posted at once, at 10 000 bytes a second: the second settles after 0.2 s."""
    sizer = ChunkSizer(LEAST, LEAST)
    queue = PeerReadQueue(sizer)
    one = np.array([0], np.uint64)
    queue.add_read("r", PeerId("p"), Spans(one, one, np.array([3 * LEAST], np.uint64)))
    chunks = [queue.next_chunk(Urgency.PULL), queue.next_chunk(Urgency.PULL)]
    for chunk, at in zip(chunks, (0.1, 0.2), strict=True):
        stats = ReadStats(LEAST, 1, 0.0, at)
        queue.chunk_settled(chunk, Settled(stats), 50.0 + at)
        assert sizer.expected_s(LEAST) == pytest.approx(0.1)
