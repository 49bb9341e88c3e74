"""Short reads are posted by the thread that asks for them, where that cannot take long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pdconn.puller.read_queue import ChunkSizer
from pdconn.puller.reads import (
    QUICK_NBYTES,
    QUICK_RUNS,
    Connect,
    Connected,
    Disconnect,
    HeldTransport,
    JobResult,
    Read,
    ReaderThread,
    ReadSettled,
    TransportJobs,
)
from pdconn.threads import Box
from transport import BackendFailure, Device, Memory, PeerId, ReadId, Spans
from transport.testing.inprocess.faults import Failing, Fault, Late
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport

NBYTES = QUICK_NBYTES + 1
GIVE_UP_S = 20.0


class World:
    """A reader thread and a lender, as the puller's thread has them."""

    def __init__(self) -> None:
        self.network = InProcessNetwork()
        self.ours, self.theirs = (np.full(NBYTES, value, np.uint8) for value in (0, 7))
        self.lender = InProcessTransport(self.network, "prefill")
        self.lender.register([Memory(self.theirs.ctypes.data, NBYTES)])
        self.results: Box[JobResult | HeldTransport] = Box()
        self.open(ChunkSizer())

    def open(self, sizer: ChunkSizer) -> None:
        """A reader with a transport of its own, connected."""
        self.transport = InProcessTransport(self.network, "decode")
        self.transport.register([Memory(self.ours.ctypes.data, NBYTES)])
        self.reader = ReaderThread(self.transport, self.results, sizer=sizer)
        self.peer = self.connect()

    def next_result(self) -> JobResult:
        """The next result; the transport is taken in hand where the reader lets go of it."""
        while isinstance(item := self.results.take_one(GIVE_UP_S), HeldTransport):
            self.reader.hold(item)
        assert item is not None
        return item

    def connect(self) -> PeerId:
        self.reader.post_job(Connect("c", self.lender.address()))
        result = self.next_result()
        assert isinstance(result, Connected)
        assert result.peer is not None
        return result.peer

    def read(self, nbytes: int, *faults: Fault, num_runs: int = 1) -> tuple[ReadSettled, bool]:
        """How a read ended, and whether that was known on this thread at once."""
        self.network.inject(self.transport.peer_id, self.peer, *faults)
        results = self.post(nbytes, num_runs)
        (result,) = results or [self.next_result()]
        assert isinstance(result, ReadSettled)
        return result, bool(results)

    def post(self, nbytes: int, num_runs: int = 1) -> list[JobResult]:
        self.ours[:] = 0
        job = self.job(nbytes, num_runs)
        results = self.reader.read_now(job)
        if results is None:
            self.reader.post_job(job)
        return results or []

    def job(self, nbytes: int, num_runs: int = 1) -> Read:
        """The first ``nbytes`` bytes, in pieces that do not touch at the lender's."""
        at = np.arange(num_runs, dtype=np.uint64) * np.uint64(nbytes // num_runs)
        spans = Spans(
            at + np.uint64(self.ours.ctypes.data),
            at[::-1] + np.uint64(self.theirs.ctypes.data),
            np.full(num_runs, nbytes // num_runs, np.uint64),
        )
        return Read("r", self.peer, spans)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.reader.close()


def test_a_short_read_is_posted_and_settles_on_the_callers_thread(world: World) -> None:
    world.read(1)
    settled, is_here = world.read(QUICK_NBYTES)
    assert (settled.settled.ok, is_here) == (True, True)
    assert world.ours[:QUICK_NBYTES].min() == 7
    assert world.ours[QUICK_NBYTES:].max() == 0


@pytest.mark.parametrize(
    "why", ["first of its peer", "long", "in many pieces", "after a failed one", "known anew"]
)
def test_what_may_take_long_is_posted_by_the_reader(world: World, why: str) -> None:
    nbytes, num_runs = 1, 1
    if why == "long":
        world.read(1)
        nbytes = NBYTES
    elif why == "in many pieces":
        world.read(1)
        nbytes = num_runs = QUICK_RUNS + 1
    elif why == "after a failed one":
        world.read(1, Failing(BackendFailure("made to fail")))
    elif why == "known anew":
        world.read(1)
        world.reader.post_job(Disconnect(world.peer))
        world.peer = world.connect()
    settled, is_here = world.read(nbytes, num_runs=num_runs)
    assert (settled.settled.ok, is_here) == (True, False)


def test_one_of_several_chunks_is_finished_by_the_reader(world: World) -> None:
    world.reader.close()
    world.open(ChunkSizer(8, 8))
    world.read(1)
    settled, is_here = world.read(64)
    assert (settled.settled.ok, is_here) == (True, False)
    assert world.ours[:64].min() == 7


@pytest.mark.parametrize("device", ["local_device", "remote_device"])
def test_device_memory_is_read_by_the_thread_that_is_bound_to_it(world: World, device: str) -> None:
    jobs = TransportJobs(world.transport, lambda _: None)
    jobs.do_job(Connect("c", world.lender.address()))
    jobs.do_job(world.job(1))
    while jobs.post_chunk() or not jobs.poll_reads():
        pass
    host = world.job(1)
    assert jobs.is_quick(host), "the control"
    spans = replace(host.spans, **{device: Device("cuda", 0)})
    assert not jobs.is_quick(replace(host, spans=spans))


def test_one_that_does_not_settle_at_once_is_polled_by_the_reader(world: World) -> None:
    world.read(1)
    settled, is_here = world.read(1, Late(0.05))
    assert (settled.settled.ok, is_here) == (True, False)


def test_a_failure_that_is_known_at_once_is_delivered_like_any_other(world: World) -> None:
    world.read(1)
    settled, is_here = world.read(1, Failing(BackendFailure("made to fail")))
    assert is_here
    assert "made to fail" in str(settled.settled.error)


def test_the_caller_never_waits_for_a_reader_that_is_posting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.read(1)
    posting, gate = threading.Event(), threading.Event()
    read = world.transport.read

    def held(peer: PeerId, spans: Spans) -> ReadId:
        if spans.total_bytes == NBYTES:
            posting.set()
            assert gate.wait(GIVE_UP_S)
        return read(peer, spans)

    monkeypatch.setattr(world.transport, "read", held)
    world.post(NBYTES)
    assert posting.wait(GIVE_UP_S)
    try:
        world.post(1)  # returns although the reader holds the transport
        assert not world.results.items
    finally:
        gate.set()
    for _ in range(2):
        settled = world.next_result()
        assert isinstance(settled, ReadSettled)
        assert settled.settled.ok


def test_jobs_that_meet_the_transport_on_its_way_are_done(world: World) -> None:
    """The reader lets go of it just as it is given another job."""
    world.post(NBYTES)
    held = world.results.take_one(GIVE_UP_S)
    assert isinstance(held, HeldTransport)
    world.reader.post_job(world.job(1))  # not known yet that it is here
    assert isinstance(world.results.take_one(GIVE_UP_S), ReadSettled)
    assert world.results.take_one(0.05) is None
    world.reader.hold(held)
    settled = world.next_result()
    assert isinstance(settled, ReadSettled)
    assert settled.settled.ok


@pytest.mark.parametrize("where", ["in hand", "on its way", "with the reader"])
def test_closing_closes_the_transport_wherever_it_is(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, closed = World(), threading.Event()
    monkeypatch.setattr(world.transport, "close", closed.set)
    if where == "in hand":
        assert world.reader._held is not None
    elif where == "on its way":
        world.post(NBYTES)
        while len(world.results.items) < 2:
            threading.Event().wait(0.001)
    world.reader.close()
    assert closed.is_set()
