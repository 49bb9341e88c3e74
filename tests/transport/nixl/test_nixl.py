"""What NixlTransport makes of NIXL's answers, given by a scripted NIXL.

The contract suite runs it on the real one; here are answers that a healthy NIXL
gives rarely: a post that fails half way, peers that it forgets by itself.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.transport.nixl.scripted import ERRORS, World, failing
from transport.address import pack
from transport.errors import (
    BackendFailure,
    BadAddress,
    OutOfBounds,
    PeerLost,
    PeerUnknown,
    TransportClosed,
)
from transport.types import Memory, Spans


def test_stats_count_the_descriptors_and_time_posting_and_transfer_apart(world: World) -> None:
    settled = world.settle("PROC", "DONE")
    assert settled is not None
    assert settled.ok
    assert settled.stats.num_descriptors == 1
    assert 0 < settled.stats.post_s < settled.stats.transfer_s
    assert world.nixl.all_released_once()


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        ("prep_local", "nixlNotFoundError", OutOfBounds),
        ("prep_remote", "nixlNotFoundError", OutOfBounds),
        ("make_prepped_xfer", "nixlNotFoundError", PeerLost),
        ("make_prepped_xfer", "nixlBackendError", BackendFailure),
        ("transfer", "nixlRemoteDisconnectError", PeerLost),
        ("transfer", "nixlNotFoundError", PeerLost),
        ("check", "nixlRemoteDisconnectError", PeerLost),
        ("check", "nixlNotFoundError", PeerLost),
        ("check", "nixlCancelledError", BackendFailure),
    ],
)
def test_failures_settle_the_read(
    world: World, call: str, error: str, expected: type[Exception]
) -> None:
    world.nixl.will(call, failing(error))
    settled = world.reader.poll(world.reader.read(world.peer, world.spans))
    assert settled is not None
    assert type(settled.error) is expected
    assert type(settled.error.__cause__) is ERRORS[error]
    assert world.nixl.all_released_once()


def test_neighbours_are_merged_unless_that_leaves_a_registered_memory(world: World) -> None:
    runs = np.array([4096, 5120], np.uint64)
    spans = Spans(runs, runs, np.array([1024, 1024], np.uint64))
    world.nixl.will("transfer", "DONE")
    world.reader.read(world.peer, spans)
    assert world.nixl.rows[-1] == 1
    world.nixl.will("prep_remote", failing("nixlNotFoundError"))
    world.nixl.will("transfer", "DONE")
    settled = world.reader.poll(world.reader.read(world.peer, spans))
    assert settled is not None
    assert settled.ok
    assert world.nixl.rows[-2:] == [2, 2]
    assert world.nixl.all_released_once()


def test_the_local_run_that_lies_outside_is_named(world: World) -> None:
    world.reader.register([Memory(1 << 20, 1 << 20)])
    world.nixl.will("prep_local", failing("nixlNotFoundError"))
    runs = np.array([1 << 20, 1 << 22], np.uint64)
    read = world.reader.read(world.peer, Spans(runs, runs, np.array([64, 64], np.uint64)))
    settled = world.reader.poll(read)
    assert settled is not None
    assert "local run 1, [0x400000, 0x400040)" in str(settled.error)


def test_a_peer_that_nixl_forgot_is_lost_and_not_out_of_bounds(world: World) -> None:
    world.nixl.known.clear()
    world.nixl.will("prep_remote", failing("nixlNotFoundError"))
    settled = world.reader.poll(world.reader.read(world.peer, world.spans))
    assert settled is not None
    assert isinstance(settled.error, PeerLost)


def test_a_lost_peer_is_not_asked_again_until_it_is_connected_again(world: World) -> None:
    world.settle(failing("nixlRemoteDisconnectError"))
    calls = len(world.nixl.log)
    settled = world.reader.poll(world.reader.read(world.peer, world.spans))
    assert settled is not None
    assert isinstance(settled.error, PeerLost)
    assert len(world.nixl.log) == calls
    assert world.reader.connect(world.address) == world.peer
    assert world.nixl.log[-2:] == ["remove_remote_agent", "add_remote_agent"]
    settled = world.settle("DONE")
    assert settled is not None
    assert settled.ok


def test_a_half_posted_read_is_pending_until_nixl_takes_it() -> None:
    world = World(repost_s=0.0)
    refusal = failing("nixlBackendError")
    world.nixl.will("transfer", refusal, refusal, "PROC")
    read = world.reader.read(world.peer, world.spans)
    assert world.reader.poll(read) is None  # refused again
    assert world.reader.poll(read) is None  # taken
    assert world.nixl.log.count("transfer") == 3
    world.nixl.will("check", "DONE")
    settled = world.reader.poll(read)
    assert settled is not None
    assert settled.ok
    assert world.nixl.all_released_once()


def test_a_half_posted_read_is_not_posted_again_at_every_poll() -> None:
    world = World(repost_s=60.0)
    world.nixl.will("transfer", failing("nixlBackendError"))
    read = world.reader.read(world.peer, world.spans)
    assert all(world.reader.poll(read) is None for _ in range(100))
    assert world.nixl.log.count("transfer") == 1


def test_a_peer_is_removed_with_its_last_read(world: World) -> None:
    reads = [world.reader.read(world.peer, world.spans) for _ in range(2)]
    world.reader.disconnect(world.peer)
    with pytest.raises(PeerUnknown):
        world.reader.read(world.peer, world.spans)
    for left, read in enumerate(reversed(reads)):
        assert world.reader.poll(read) is None
        assert "remove_remote_agent" not in world.nixl.log
        world.nixl.will("check", "DONE")
        settled = world.reader.poll(read)
        assert settled is not None
        assert isinstance(settled.error, PeerLost)
        assert ("remove_remote_agent" in world.nixl.log) == (left == 1)
    assert world.nixl.all_released_once()


def test_connecting_again_keeps_a_leaving_peer_but_fails_its_reads(world: World) -> None:
    failed = world.reader.read(world.peer, world.spans)
    world.reader.disconnect(world.peer)
    assert world.reader.connect(world.address) == world.peer
    world.nixl.will("check", "DONE", "DONE")
    settled = world.reader.poll(failed)
    assert settled is not None
    assert isinstance(settled.error, PeerLost)
    assert "remove_remote_agent" not in world.nixl.log
    settled = world.settle()
    assert settled is not None
    assert settled.ok


def test_a_restarted_peer_waits_for_the_reads_from_before(world: World) -> None:
    read = world.reader.read(world.peer, world.spans)
    newer = pack("nixl", "p", b"p 2")
    world.nixl.will("add_remote_agent", failing("nixlNotAllowedError"))
    with pytest.raises(BackendFailure, match="p was restarted, and 1 reads"):
        world.reader.connect(newer)
    world.nixl.will("check", failing("nixlRemoteDisconnectError"))
    assert world.reader.poll(read) is not None
    assert world.reader.connect(newer) == world.peer
    settled = world.settle("DONE")
    assert settled is not None
    assert settled.ok


def test_an_address_for_another_name_is_refused(world: World) -> None:
    with pytest.raises(BadAddress, match="'q' holds metadata of 'r'"):
        world.reader.connect(pack("nixl", "q", b"r 1"))
    assert world.nixl.known == {"p"}
    with pytest.raises(BadAddress, match="itself"):
        world.reader.connect(pack("nixl", "d-1", b"d-1 1"))


def test_closing_waits_and_keeps_memory_registered_while_reads_can_write(world: World) -> None:
    world.reader.register([Memory(1 << 20, 1 << 20)])
    read = world.reader.read(world.peer, world.spans)
    with pytest.raises(BackendFailure, match="1 reads from p can still write"):
        world.reader.close()
    assert "deregister_memory" not in world.nixl.log
    assert "remove_remote_agent" not in world.nixl.log
    with pytest.raises(TransportClosed, match="closing"):
        world.reader.read(world.peer, world.spans)
    assert world.reader.poll(read) is None
    world.nixl.will("check", "DONE")
    world.reader.close()
    assert world.nixl.log[-2:] == ["remove_remote_agent", "deregister_memory"]
    world.reader.close()
    assert world.nixl.all_released_once()


def test_a_refused_region_takes_back_those_before_it(world: World) -> None:
    memories = [Memory(base << 20, 1 << 20) for base in (1, 2, 3)]
    world.nixl.will("register_memory", [1], [2], failing("nixlBackendError"))
    with pytest.raises(BackendFailure):
        world.reader.register(memories)
    assert world.nixl.log.count("deregister_memory") == 2
    world.reader.register(memories)
