"""Faults of the in-process network; what it does without faults is the contract's business."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.address import pack
from transport.errors import BackendFailure, BadAddress, PeerLost, TransportClosed
from transport.testing.inprocess.transport import (
    Failing,
    Held,
    InProcessNetwork,
    InProcessTransport,
    Late,
    Lost,
    ManualClock,
    ReadRequest,
)
from transport.types import Device, Memory, PeerId, Spans

SIZE = 64


class World:
    """A lender and a reader on a network whose clock stands still."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.network = InProcessNetwork(clock=self.clock)
        self.theirs = np.arange(1, SIZE + 1, dtype=np.uint8)
        self.ours = np.zeros(SIZE, dtype=np.uint8)
        self.lender = InProcessTransport(self.network, "p")
        self.lender.register([Memory(self.theirs.ctypes.data, SIZE)])
        self.reader = InProcessTransport(self.network, "d")
        self.reader.register([Memory(self.ours.ctypes.data, SIZE)])
        self.peer = self.reader.connect(self.lender.address())

    def spans(self, *runs: tuple[int, int]) -> Spans:
        offsets, nbytes = np.array(runs, dtype=np.uint64).T.copy()
        local = offsets + np.uint64(self.ours.ctypes.data)
        return Spans(local, offsets + np.uint64(self.theirs.ctypes.data), nbytes)


@pytest.fixture
def world() -> World:
    return World()


def test_late_bytes_are_those_of_the_moment_they_land(world: World) -> None:
    world.network.inject(world.reader.peer_id, world.peer, Late(2.0))
    read = world.reader.read(world.peer, world.spans((0, SIZE)))
    world.clock.advance(1.5)
    assert world.reader.poll(read) is None
    assert not world.ours.any()
    world.theirs[:] = 99  # its lease ended and the block was reused
    world.clock.advance(0.5)
    settled = world.reader.poll(read)
    assert settled is not None
    assert settled.ok
    assert settled.stats.transfer_s == 2.0
    assert (world.ours == 99).all()


def test_late_reads_land_in_the_order_they_are_due_whichever_transport_polls(world: World) -> None:
    world.network.inject(world.reader.peer_id, world.peer, Late(2.0), Late(1.0))
    first = world.reader.read(world.peer, world.spans((0, 8)))
    second = world.reader.read(world.peer, world.spans((8, 8)))
    world.clock.advance(1.0)
    assert world.reader.poll(first) is None
    assert world.ours.nonzero()[0].tolist() == list(range(8, 16))
    assert world.reader.poll(second) is not None


def test_a_failing_read_writes_its_first_bytes_only(world: World) -> None:
    error = PeerLost("cable cut")
    world.network.inject(world.reader.peer_id, world.peer, Failing(error, after_bytes=10))
    read = world.reader.read(world.peer, world.spans((0, 8), (16, 8)))
    settled = world.reader.poll(read)
    assert settled is not None
    assert settled.error is error
    assert world.ours.nonzero()[0].tolist() == [*range(8), 16, 17]


def test_a_lost_read_ends_with_its_connection(world: World) -> None:
    world.network.inject(world.reader.peer_id, world.peer, Lost())
    read = world.reader.read(world.peer, world.spans((0, 8)))
    world.clock.advance(1e9)
    assert world.reader.poll(read) is None
    world.reader.disconnect(world.peer)
    settled = world.reader.poll(read)
    assert settled is not None
    assert isinstance(settled.error, PeerLost)
    assert not world.ours.any()


def test_closing_is_refused_while_a_read_can_land(world: World) -> None:
    world.network.inject(world.reader.peer_id, world.peer, Held(), Lost())
    for at in (0, 8):
        world.reader.read(world.peer, world.spans((at, 8)))
    with pytest.raises(BackendFailure, match="1 reads can still write"):
        world.reader.close()
    world.network.release_held()
    world.network.progress()
    world.reader.close()


def test_held_reads_land_when_released(world: World) -> None:
    world.network.script = lambda _: Held()
    reads = [world.reader.read(world.peer, world.spans((at, 8))) for at in (0, 8)]
    assert [world.reader.poll(read) for read in reads] == [None, None]
    assert world.network.release_held(PeerId("another")) == 0
    assert world.network.release_held(world.peer) == 2
    assert all(world.reader.poll(read) for read in reads)
    assert world.network.in_flight() == ()


def test_a_killed_peer_settles_its_readers_and_writes_nothing_more(world: World) -> None:
    world.network.inject(world.reader.peer_id, world.peer, Late(1.0), Lost())
    reads = [world.reader.read(world.peer, world.spans((at, 8))) for at in (0, 8)]
    world.network.kill_peer(world.peer)
    world.clock.advance(5.0)
    for read in reads:
        settled = world.reader.poll(read)
        assert settled is not None
        assert isinstance(settled.error, PeerLost)
    assert not world.ours.any()
    with pytest.raises(TransportClosed):
        world.lender.address()


def test_a_killed_reader_is_written_to_no_more(world: World) -> None:
    world.network.inject(world.reader.peer_id, world.peer, Late(1.0))
    world.reader.read(world.peer, world.spans((0, 8)))
    world.network.kill_peer(world.reader.peer_id)
    world.clock.advance(5.0)
    assert world.network.progress() == 0
    assert not world.ours.any()
    world.reader.close()


def test_a_restarted_peer_is_another_peer(world: World) -> None:
    world.network.kill_peer(world.peer)
    again = InProcessTransport(world.network, "p")
    again.register([Memory(world.theirs.ctypes.data, SIZE)])
    peer = world.reader.connect(again.address())
    assert peer != world.peer
    read = world.reader.read(peer, world.spans((0, SIZE)))
    settled = world.reader.poll(read)
    assert settled is not None
    assert settled.ok


def test_an_address_covers_what_was_registered_when_it_was_taken() -> None:
    world = World()
    more = np.full(SIZE, 7, dtype=np.uint8)
    world.lender.register([Memory(more.ctypes.data, SIZE)])
    spans = Spans(
        np.array([world.ours.ctypes.data], np.uint64),
        np.array([more.ctypes.data], np.uint64),
        np.array([SIZE], np.uint64),
    )
    refused = world.reader.poll(world.reader.read(world.peer, spans))
    assert refused is not None
    assert not refused.ok
    assert world.reader.connect(world.lender.address()) == world.peer
    settled = world.reader.poll(world.reader.read(world.peer, spans))
    assert settled is not None
    assert settled.ok


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=30))
def test_a_script_decides_and_every_read_settles_in_its_time(delays: list[float]) -> None:
    world = World()
    seen: list[ReadRequest] = []

    def script(request: ReadRequest) -> Late:
        seen.append(request)
        return Late(delays[request.number])

    world.network.script = script
    reads = [world.reader.read(world.peer, world.spans((i, 1))) for i in range(len(delays))]
    assert [request.number for request in seen] == list(range(len(delays)))
    for now in (0.0, 0.5, 1.0, 3.0):
        world.clock.advance(now - world.clock())
        due = [i for i, delay in enumerate(delays) if delay == now]
        for i in due:
            settled = world.reader.poll(reads[i])
            assert settled is not None
            assert settled.stats.transfer_s == now
        assert len(world.network.in_flight()) == sum(delay > now for delay in delays)
    assert (world.ours[: len(delays)] == world.theirs[: len(delays)]).all()


def test_injected_faults_come_before_the_script(world: World) -> None:
    world.network.script = lambda _: Held()
    world.network.inject(world.reader.peer_id, world.peer, Late(0.0))
    read = world.reader.read(world.peer, world.spans((0, 8)))
    assert world.reader.poll(read) is not None


def test_only_host_memory_is_taken(world: World) -> None:
    with pytest.raises(BackendFailure, match="cuda:0"):
        world.reader.register([Memory(1 << 40, 64, Device("cuda"))])


def test_an_address_with_impossible_memories_is_refused(world: World) -> None:
    for payload in (b"\xc1", b"\x91\x92\x00\x00", b"\x92\x92\x05\x05\x92\x05\x05"):
        with pytest.raises(BadAddress):
            world.reader.connect(pack("memory", "p#0", payload))


def test_nonsense_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="below 0"):
        Late(-1.0)
    with pytest.raises(ValueError, match="below 0"):
        Failing(PeerLost("x"), after_bytes=-1)
    with pytest.raises(ValueError, match="go back"):
        ManualClock().advance(-1.0)
