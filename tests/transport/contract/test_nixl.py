"""NIXL keeps the contract, with the lender in a process of its own.

Twice: over what UCX picks by itself on one host, where the reader copies alone,
and over TCP, where the lender takes part and can stall.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import pytest

from tests.transport.contract.rigs import Lender, nixl_options, nixl_rig
from transport.address import unpack
from transport.errors import BackendFailure, BadAddress, OutOfBounds, PeerLost
from transport.nixl.agent import Agent
from transport.nixl.progress import BACK_OFF_S, DRIVE_AFTER_S, DRIVE_S
from transport.nixl.transport import NixlTransport, load_library
from transport.testing.contract import (
    ARENA_BYTES,
    GUARD_BYTES,
    Arena,
    Rig,
    TransportContract,
    pattern,
)
from transport.types import Device, Memory

if importlib.util.find_spec("nixl") is None:
    pytest.skip("nixl is not installed", allow_module_level=True)

RAW_TCP = {"UCX": {"engine_config": "TLS=tcp"}}


@pytest.fixture(scope="module")
def lender() -> Iterator[Lender]:
    lender = Lender()
    yield lender
    lender.end()


class _WithLender:
    lender: Lender

    @pytest.fixture(autouse=True)
    def _borrow(self, lender: Lender) -> None:
        self.lender = lender


class TestNixlOverTcp(_WithLender, TransportContract):
    def open_rig(self) -> AbstractContextManager[Rig]:
        return nixl_rig(self.lender, tls="tcp", stalls=True)

    def test_a_peer_restarted_under_its_old_name_is_another_connection(self) -> None:
        options = nixl_options("tcp")
        with nixl_rig(self.lender, tls="tcp", stalls=True, boot="same") as rig:
            rig.check_read((0, 0, 64))
            self.lender.pause()
            stuck = rig.reader.read(rig.peer, rig.spans((64, 64, 64)))
            self.lender.kill()
            address, remote = self.lender.open("lender", "same", options)
            assert isinstance(rig.finish(stuck).error, PeerLost)
            assert rig.reader.connect(address) == rig.peer
            replace(rig, remote=remote).check_read((0, 0, 64))

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on a single core it rests")
    def test_the_thread_spins_while_a_read_lasts_and_for_half_a_second(self, rig: Rig) -> None:
        rig.check_read((0, 0, 64))
        time.sleep(BACK_OFF_S)  # it may have met others on its core
        resting = min(_cpu_share(0.1) for _ in range(3))
        self.lender.pause()
        stuck = rig.reader.read(rig.peer, rig.spans((64, 64, 64)))
        assert rig.reader.poll_pause_s == 0  # it may be over in a moment
        time.sleep(DRIVE_AFTER_S)
        assert rig.reader.poll(stuck) is None
        assert rig.reader.poll_pause_s > 0
        driven = max(_cpu_share(0.1) for _ in range(3))  # others may have the cores for a moment
        time.sleep(DRIVE_S)
        assert rig.reader.poll(stuck) is None  # it hangs
        assert rig.reader.poll_pause_s == 0
        rests = min(_cpu_share(0.1) for _ in range(3))
        self.lender.resume()
        assert rig.finish(stuck).ok
        assert driven > 0.2
        assert max(resting, rests) < driven / 3

    def test_without_a_core_for_it_the_thread_never_spins(self) -> None:
        with nixl_rig(
            self.lender, tls="tcp", stalls=True, reader_type=partial(NixlTransport, drive_on=())
        ) as rig:
            rig.check_read((0, 0, 64))  # while UCX connects, NIXL's thread spins by itself
            self.lender.pause()
            stuck = rig.reader.read(rig.peer, rig.spans((64, 64, 64)))
            time.sleep(DRIVE_AFTER_S)
            assert rig.reader.poll(stuck) is None
            assert rig.reader.poll_pause_s == 0
            assert min(_cpu_share(0.1) for _ in range(3)) < 0.1
            self.lender.resume()
            assert rig.finish(stuck).ok
            assert "progress_cores" in rig.reader.describe()["progress"]

    def test_why_reads_are_not_cancelled__nixl_writes_after_releasing_them(self, rig: Rig) -> None:
        raw = Agent(load_library(), "raw", RAW_TCP, progress_delay_us=1000)
        raw.register_memory(rig.arena.memory)
        peer = raw.add_peer(unpack("nixl", rig.address).payload)
        first = raw.prepare(peer, rig.spans((0, 0, 64)))
        raw.post_transfer(first)
        while raw.check_transfer(first) == "pending":
            time.sleep(0.001)
        raw.release_transfer(first)
        self.lender.pause()
        transfer = raw.prepare(peer, rig.spans((4096, 0, ARENA_BYTES // 2)))
        assert raw.post_transfer(transfer) == "pending"
        raw.release_transfer(transfer)  # as if that ended it
        rig.check_arena((0, 0, 64))
        self.lender.resume()
        deadline = time.monotonic() + 20.0
        expected = Arena.blank().bytes
        expected[GUARD_BYTES : GUARD_BYTES + 64] = pattern(64)
        while (rig.arena.bytes == expected).all() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not (rig.arena.bytes == expected).all(), "NIXL cancels now: simplify Reads"
        raw.remove_peer(peer)
        raw.close()


class TestNixlOnOneHost(_WithLender, TransportContract):
    def open_rig(self) -> AbstractContextManager[Rig]:
        return nixl_rig(self.lender)

    def test_a_restart_that_no_read_noticed_is_another_connection(self) -> None:
        with nixl_rig(self.lender, boot="same") as rig:
            rig.check_read((0, 0, 64))
            self.lender.kill()
            address, remote = self.lender.open("lender", "same", nixl_options(None))
            assert rig.reader.connect(address) == rig.peer
            replace(rig, remote=remote).check_read((0, 0, 64))

    def test_a_copy_that_ends_within_the_post_drives_nothing(self, rig: Rig) -> None:
        rig.check_read((0, 0, ARENA_BYTES))
        assert rig.reader.poll_pause_s == 0

    def test_neighbours_are_one_descriptor(self, rig: Rig) -> None:
        stats = rig.check_read(*[(i * 64, i * 64, 64) for i in range(100)]).stats
        assert stats.num_descriptors == 1

    def test_nothing_is_read_from_oneself(self, rig: Rig) -> None:
        with pytest.raises(BadAddress, match="itself"):
            rig.reader.connect(rig.reader.address())

    def test_memory_of_an_absent_device_is_refused(self, rig: Rig) -> None:
        with pytest.raises(BackendFailure):
            rig.reader.register([rig.arena.guard, Memory(1 << 40, 4096, Device("cuda", 7))])
        rig.reader.register([rig.arena.guard])  # nothing of the refused call was kept

    def test_memory_registered_later_is_read_through_a_newer_address(self) -> None:
        lending, reading = Arena.patterned(), Arena.blank()
        options = nixl_options("tcp")
        with NixlTransport("p", **options) as lender, NixlTransport("d", **options) as reader:
            lender.register([lending.guard])
            reader.register([reading.memory])
            rig = Rig(reader, lender.peer_id, b"", reading, lending.memory)
            assert reader.connect(lender.address()) == lender.peer_id
            lender.register([lending.memory])
            refused = rig.finish(reader.read(lender.peer_id, rig.spans((0, 0, 64))))
            assert isinstance(refused.error, OutOfBounds)
            assert reader.connect(lender.address()) == lender.peer_id
            rig.check_read((0, 0, 64))

    def test_what_is_in_use_is_reported(self, rig: Rig) -> None:
        facts = rig.reader.describe()
        assert facts["nixl"][0].isdigit()
        assert facts["ucx"].startswith("1.")
        assert "TCP_TX_SEG_SIZE=520K" in facts["UCX"]


def test_an_idle_agent_rests_and_without_a_delay_it_spins() -> None:
    with NixlTransport("idle"):
        assert min(_cpu_share(0.5) for _ in range(3)) < 0.03  # of rounds: others live here too
    spinning = Agent(load_library(), "spin", {"UCX": {}}, progress_delay_us=0)
    try:
        shares = [_cpu_share(0.5) for _ in range(6)]
    finally:
        spinning.close()
    assert statistics.median(shares) > 0.03  # the measurement can fail
    assert max(shares) > 0.06


def _cpu_share(seconds: float) -> float:
    """CPU time of this process per second of wall time."""
    before, began = os.times(), time.monotonic()
    time.sleep(seconds)
    after = os.times()
    used = after.user + after.system - before.user - before.system
    return used / (time.monotonic() - began)
