"""Reads are cut, take turns and settle as a whole, over the in-process transport."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.lifecycle.turns import Urgency
from pdconn.puller.read_queue import CHUNK_S, MOST_NBYTES, ChunkSizer, PeerReadQueue, QueuedRead
from pdconn.puller.reads import (
    HeldTransport,
    JobResult,
    Read,
    ReaderThread,
    ReadSettled,
    TransportJobs,
)
from pdconn.threads import Box
from transport import BackendFailure, Memory, PeerId, PeerUnknown, ReadStats, Settled, Spans
from transport.testing.inprocess.faults import Failing, Held
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport

SLICE = 1024


def spans_of(*runs: tuple[int, int, int]) -> Spans:
    local, remote, nbytes = np.array(runs, dtype=np.uint64).reshape(-1, 3).T
    return Spans(local.copy(), remote.copy(), nbytes.copy())


def copied(parts: list[Spans]) -> dict[int, int]:
    """Which remote byte goes to which local one."""
    found = {}
    for part in parts:
        for local, remote, nbytes in zip(part.local, part.remote, part.nbytes, strict=True):
            for byte in range(int(nbytes)):
                assert int(local) + byte not in found, "a byte is copied twice"
                found[int(local) + byte] = int(remote) + byte
    return found


# Cutting


def in_parts(spans: Spans, nbytes: int) -> list[Spans]:
    whole, parts = QueuedRead.unposted("r", PeerId("p"), spans), []
    while whole.has_more:
        part = whole.cut(nbytes)
        assert part.nbytes == part.spans.total_bytes
        parts.append(part.spans)
    return parts


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 50))
def test_slices_copy_the_same_bytes_and_none_is_too_long(lengths: list[int], nbytes: int) -> None:
    runs = [(1000 * i + 7, 5000 - 100 * i, length) for i, length in enumerate(lengths)]
    whole = spans_of(*runs)
    parts = in_parts(whole, nbytes)
    assert copied(parts) == copied([whole])
    assert all(part.total_bytes == nbytes for part in parts[:-1])
    assert 0 < parts[-1].total_bytes <= nbytes


def test_a_short_read_is_not_cut() -> None:
    whole = spans_of((10, 20, 30))
    assert in_parts(whole, 30) == [whole]


# How long slices are


def taken(nbytes: int, seconds: float) -> ReadStats:
    return ReadStats(nbytes, 1, 0.0, seconds)


def test_slices_are_as_long_as_the_link_takes_a_slices_time_for() -> None:
    pace = ChunkSizer()
    pace.learn_size(taken(64 << 20, 0.016))
    assert pace.chunk_nbytes == int((64 << 20) / 0.016 * CHUNK_S)
    pace.learn_size(taken(64 << 20, 0.1))
    assert pace.chunk_nbytes == int((64 << 20) / 0.1 * CHUNK_S)


def test_short_reads_teach_nothing_and_there_is_a_least_and_a_most() -> None:
    pace = ChunkSizer()
    first = pace.chunk_nbytes
    pace.learn_size(taken(4096, 1.0))
    pace.learn_size(taken(64 << 20, 0.0))
    assert pace.chunk_nbytes == first
    pace.learn_size(taken(64 << 20, 100.0))
    assert pace.chunk_nbytes == 16 << 20
    pace.learn_size(taken(64 << 20, 1e-6))
    assert pace.chunk_nbytes == MOST_NBYTES


# Lanes


def test_no_more_than_two_slices_are_in_flight() -> None:
    queue = PeerReadQueue(ChunkSizer(SLICE))
    queue.add_read("long", PeerId("p"), spans_of((0x1000, 0x9000, 5 * SLICE)))
    begun = [queue.next_chunk(Urgency.PULL), queue.next_chunk(Urgency.PULL)]
    assert not queue.may_post(Urgency.PULL)
    queue.chunk_settled(begun[0], _done(begun[0].spans), 0.0)
    assert queue.may_post(Urgency.PULL)
    assert len(queue) == 1


@pytest.mark.parametrize(
    ("slices", "others", "parts"),
    [(2, 0, [2]), (2, 1, [1, 1]), (3, 0, [1, 1, 1]), (2.5, 0, [1, 1, 0.5])],
)
def test_a_read_of_two_slices_is_posted_whole_if_it_is_alone(
    slices: float, others: int, parts: list[float]
) -> None:
    queue = PeerReadQueue(ChunkSizer(SLICE))
    for number in range(others):
        queue.add_read(f"other{number}", PeerId("p"), spans_of((0x900000, 0x9000, 9 * SLICE)))
    queue.add_read("read", PeerId("p"), spans_of((0x100000, 0x9000, int(slices * SLICE))))
    posted = []
    while len(posted) < len(parts):
        part = queue.next_chunk(Urgency.PULL)
        if part.read.tag == "read":
            posted.append(part.nbytes / SLICE)
        if not queue.may_post(Urgency.PULL):
            queue.chunk_settled(part, _done(part.spans), 0.0)
    assert posted == parts


@pytest.mark.parametrize(
    ("settled", "seconds"),
    [
        ([(11.0, 1.0)], 1.0),
        ([(11.0, 1.0), (13.0, 2.0)], 3.0),
        ([(11.0, 1.0), (12.0, 2.0)], 2.0),
        ([(11.0, 1.0), (12.0, 1.5), (14.0, 1.0)], 3.0),
        ([(11.0, 1.0), (11.0, 0.5)], 1.0),
        ([(11.0, 0.5), (11.0, 1.0)], 1.0),
        ([(10.0, 5.0), (12.0, 12.0)], 12.0),
        ([(11.0, 2.0), (11.5, 0.0)], 2.0),
    ],
    ids=[
        "one",
        "one after the other",
        "both at once",
        "two at once, then one",
        "seen together, the longer first",
        "seen together, the shorter first",
        "one within the other",
        "one that was never posted",
    ],
)
def test_time_in_which_two_slices_are_in_flight_counts_once(
    settled: list[tuple[float, float]], seconds: float
) -> None:
    whole = QueuedRead.unposted("r", PeerId("p"), spans_of((0x1000, 0x9000, SLICE)))
    for at, took in settled:
        whole.note_chunk(ReadStats(10, 2, 0.25, took), at)
    stats = whole.outcome().stats
    assert (stats.nbytes, stats.num_descriptors) == (10 * len(settled), 2 * len(settled))
    assert stats.post_s == 0.25 * len(settled)
    assert stats.transfer_s == pytest.approx(seconds)


def test_a_short_read_goes_before_the_rest_of_a_long_one() -> None:
    queue = PeerReadQueue(ChunkSizer(SLICE))
    queue.add_read("long", PeerId("p"), spans_of((0x1000, 0x9000, 5 * SLICE)))
    first = queue.next_chunk(Urgency.PULL)
    queue.add_read("short", PeerId("p"), spans_of((0x100, 0x200, 10)))
    assert (first.read.tag, queue.next_chunk(Urgency.PULL).read.tag) == ("long", "short")


# The reader over real bytes


class Rig:
    """A reader with 64 KiB of its own and a lender with as many."""

    def __init__(self) -> None:
        self.network = InProcessNetwork(clock=lambda: 0.0)
        self.lender = InProcessTransport(self.network, "prefill")
        self.reader = InProcessTransport(self.network, "decode")
        self.theirs = np.random.default_rng(1).integers(0, 255, 1 << 16, dtype=np.uint8)
        self.ours = np.zeros(1 << 16, dtype=np.uint8)
        for transport, room in ((self.lender, self.theirs), (self.reader, self.ours)):
            transport.register([Memory(room.ctypes.data, room.nbytes)])
        self.peer = self.reader.connect(self.lender.address())
        self.settled_reads: list[ReadSettled] = []
        self.reading = TransportJobs(self.reader, self._hear, sizer=ChunkSizer(SLICE))

    def _hear(self, news: JobResult) -> None:
        assert isinstance(news, ReadSettled)
        self.settled_reads.append(news)

    def read(self, tag: str, start: int, nbytes: int, peer: PeerId | None = None) -> None:
        run = (self.ours.ctypes.data + start, self.theirs.ctypes.data + start, nbytes)
        self.reading.do_job(Read(tag, peer or self.peer, spans_of(run)))

    def finish(self) -> list[object]:
        while self.reading.post_chunk() | self.reading.poll_reads():
            pass
        return [news.tag for news in self.settled_reads]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_long_read_arrives_whole_and_is_reported_once(rig: Rig) -> None:
    rig.read("long", 100, 10 * SLICE + 5)
    assert rig.finish() == ["long"]
    [news] = rig.settled_reads
    assert news.settled.ok
    assert news.settled.stats.nbytes == 10 * SLICE + 5
    assert news.settled.stats.num_descriptors == 10, "the last is posted with five bytes more"
    arrived = slice(100, 100 + 10 * SLICE + 5)
    assert (rig.ours[arrived] == rig.theirs[arrived]).all()
    rig.ours[arrived] = 0
    assert not rig.ours.any()
    assert not rig.reading.is_ready
    assert len(rig.reading) == 0


def test_a_short_read_is_over_before_the_long_one_that_came_first(rig: Rig) -> None:
    rig.read("long", 0, 20 * SLICE)
    rig.reading.post_chunk()
    rig.read("short", 30 * SLICE, 64)
    assert rig.finish() == ["short", "long"]


def test_a_read_with_a_failed_slice_has_no_further_slice_posted(rig: Rig) -> None:
    rig.network.inject(rig.reader.peer_id, rig.peer, Held(), Failing(BackendFailure("no")))
    rig.read("bad", 0, 8 * SLICE)
    rig.read("good", 16 * SLICE, 8 * SLICE)
    assert rig.finish() == ["good"], "its first slice can still write"
    rig.network.release_held()
    assert rig.finish() == ["good", "bad"]
    assert isinstance(rig.settled_reads[1].settled.error, BackendFailure)
    assert rig.settled_reads[0].settled.ok
    assert not rig.ours[2 * SLICE : 8 * SLICE].any()


def test_a_peer_that_hangs_holds_up_no_other(rig: Rig) -> None:
    other = InProcessTransport(rig.network, "other")
    other.register([Memory(rig.theirs.ctypes.data, rig.theirs.nbytes)])
    second = rig.reader.connect(other.address())
    rig.network.inject(rig.reader.peer_id, rig.peer, *[Held()] * 9)
    rig.read("hanging", 0, 8 * SLICE)
    rig.read("also", 8 * SLICE, SLICE)
    rig.read("well", 16 * SLICE, 8 * SLICE, second)
    assert rig.finish() == ["well"]
    assert rig.reading.tags == {"hanging", "also"}
    assert len(rig.reading) == 2, "slices in flight"


def test_what_waits_for_a_peer_that_was_disconnected_fails_when_nothing_can_write(
    rig: Rig,
) -> None:
    rig.network.inject(rig.reader.peer_id, rig.peer, Held(), Held())
    rig.read("r", 0, 8 * SLICE)
    assert rig.finish() == []
    rig.reader.disconnect(rig.peer)
    rig.network.release_held()
    assert rig.finish() == ["r"]
    assert rig.settled_reads[0].settled.error is not None


def test_reads_from_an_unknown_peer_fail_each(rig: Rig) -> None:
    rig.read("a", 0, 3 * SLICE, PeerId("unknown"))
    rig.read("b", 0, 8, PeerId("unknown"))
    assert sorted(map(str, rig.finish())) == ["a", "b"]
    assert all(isinstance(news.settled.error, PeerUnknown) for news in rig.settled_reads)


def test_an_empty_read_is_over_at_once(rig: Rig) -> None:
    empty = np.array([], dtype=np.uint64)
    rig.reading.do_job(Read("none", rig.peer, Spans(empty, empty, empty)))
    assert rig.finish() == ["none"]
    assert rig.settled_reads[0].settled.ok


def test_the_thread_lets_a_late_short_read_pass(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a transport that copies while it posts, as shared memory does."""
    posted, gate = threading.Event(), threading.Event()
    read = rig.reader.read

    def slow_at_first(peer: PeerId, spans: Spans) -> object:
        posted.set()
        assert gate.wait(20)
        return read(peer, spans)

    monkeypatch.setattr(rig.reader, "read", slow_at_first)
    results: Box[JobResult | HeldTransport] = Box()
    thread = ReaderThread(rig.reader, results, sizer=ChunkSizer(SLICE))
    settled_reads: list[object] = []
    try:
        where, there = rig.ours.ctypes.data, rig.theirs.ctypes.data
        thread.post_job(Read("long", rig.peer, spans_of((where, there, 20 * SLICE))))
        assert posted.wait(20)
        thread.post_job(Read("short", rig.peer, spans_of((where, there, 8))))
        gate.set()
        while len(settled_reads) < 2:
            item = results.take_one(20)
            assert item is not None
            settled_reads += [item.tag] if isinstance(item, ReadSettled) else []
    finally:
        gate.set()
        thread.close()
    assert settled_reads == ["short", "long"]


def _done(spans: Spans) -> Settled:
    return Settled(ReadStats(spans.total_bytes, len(spans), 0.0, 0.0))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 60))
def test_chunks_copy_the_same_bytes_and_cut_only_runs_that_are_too_long(
    lengths: list[int], nbytes: int
) -> None:
    runs = [(1000 * i + 7, 5000 - 100 * i, length) for i, length in enumerate(lengths)]
    whole = spans_of(*runs)
    parts = list(whole.chunks(nbytes))
    assert copied(parts) == copied([whole])
    assert all(part.total_bytes <= nbytes for part in parts)
    begun = {local for local, _, _ in runs}
    for part in parts:
        for local in map(int, part.local):
            is_cut = local not in begun
            assert not is_cut or lengths[(local - 7) // 1000] > nbytes
