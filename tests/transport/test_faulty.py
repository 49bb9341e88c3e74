"""Laws of a faulty transport: each fault does what it says, and can be replayed."""

from __future__ import annotations

import signal
import subprocess
import sys
from random import Random

import numpy as np
import pytest

from transport.base import Transport
from transport.errors import BackendFailure, OutOfBounds, PeerLost, PeerUnknown, TransportClosed
from transport.faulty import FaultyTransport, ReadFaults
from transport.testing.contract import Arena, Rig
from transport.testing.inprocess.faults import Held, ManualClock
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport
from transport.types import Device, Memory, PeerId

RUN = (64, 4096, 1000)
"""Local offset, remote offset, bytes."""


class Reading:
    """A faulty reader and its lender, on a clock that stands still."""

    def __init__(self, faults: ReadFaults, seed: int = 7) -> None:
        self.clock = ManualClock()
        self.network = InProcessNetwork(clock=self.clock)
        self.kills = 0
        self.lending, reading = Arena.patterned(), Arena.blank()
        lender = InProcessTransport(self.network, "lender")
        lender.register([self.lending.memory])
        inner = InProcessTransport(self.network, "reader")
        self.reader = FaultyTransport(inner, faults, Random(seed), self.clock, self._kill)
        self.reader.register([reading.memory])
        peer = self.reader.connect(lender.address())
        self.rig = Rig(self.reader, peer, lender.address(), reading, self.lending.memory)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.reader.counts)

    def _kill(self) -> None:
        self.kills += 1


def wrong_bytes(reading: Reading) -> int:
    """How many bytes of ``RUN`` differ from what the lender holds."""
    local, remote, nbytes = RUN
    offset = reading.lending.memory.base - reading.lending.bytes.ctypes.data
    ours = reading.rig.arena.bytes[offset + local : offset + local + nbytes]
    theirs = reading.lending.bytes[offset + remote : offset + remote + nbytes]
    return int(np.count_nonzero(ours != theirs))


def test_without_faults_nothing_is_drawn_that_matters() -> None:
    reading = Reading(ReadFaults())
    for _ in range(100):
        reading.rig.check_read(RUN)
    assert reading.counts == {}
    assert not ReadFaults()
    assert not ReadFaults(delay_s=5.0)


def test_a_corrupt_read_says_it_went_well_and_has_one_wrong_byte() -> None:
    reading = Reading(ReadFaults(corrupt=1.0))
    settled = reading.rig.finish(reading.reader.read(reading.rig.peer, reading.rig.spans(RUN)))
    assert settled.ok
    assert wrong_bytes(reading) == 1
    assert reading.counts == {"corrupt": 1}


def test_a_read_that_is_not_corrupt_has_none() -> None:
    """Negative control of the byte count."""
    reading = Reading(ReadFaults(corrupt=0.0))
    reading.rig.check_read(RUN)
    assert wrong_bytes(reading) == 0


def test_a_read_that_did_not_go_well_is_not_corrupted_outside_our_memory() -> None:
    reading = Reading(ReadFaults(corrupt=1.0))
    outside = reading.rig.spans((-64, 0, 64))
    settled = reading.rig.finish(reading.reader.read(reading.rig.peer, outside))
    assert isinstance(settled.error, OutOfBounds)
    reading.rig.check_arena()
    assert reading.counts == {}


def test_the_wrong_byte_corrupts_a_float_beyond_any_tolerance() -> None:
    for value in (0.01, -1.0, 3.5):
        number = np.array([value, value], dtype=np.float32)
        corrupted = number.copy()
        corrupted.view(np.uint8)[-1] ^= 0x7B
        assert np.isfinite(corrupted).all()
        assert corrupted[0] == number[0]
        assert abs(corrupted[1] - number[1]) > 0.009


def test_only_host_memory_can_be_corrupted_and_registering_says_so() -> None:
    device_memory = Memory(1 << 40, 4096, Device("cuda", 0))
    with pytest.raises(BackendFailure, match="corrupt: expected host memory, got cuda:0"):
        Reading(ReadFaults(corrupt=0.1)).reader.register([device_memory])
    with pytest.raises(BackendFailure, match="moves host memory only"):  # the backend's own word
        Reading(ReadFaults(fail=0.1)).reader.register([device_memory])


def test_a_failed_read_writes_nothing() -> None:
    reading = Reading(ReadFaults(fail=1.0))
    settled = reading.reader.poll(reading.reader.read(reading.rig.peer, reading.rig.spans(RUN)))
    assert settled is not None
    assert isinstance(settled.error, BackendFailure)
    assert settled.stats.nbytes == 1000
    assert not reading.network.in_flight()
    reading.rig.check_arena()
    assert reading.counts == {"fail": 1}


def test_a_late_read_is_posted_late_and_copies_what_is_there_then() -> None:
    reading = Reading(ReadFaults(delay=1.0, delay_s=0.5))
    read = reading.reader.read(reading.rig.peer, reading.rig.spans((0, 0, 4)))
    reading.clock.advance(0.499)
    assert reading.reader.poll(read) is None
    assert not reading.network.in_flight()
    reading.rig.check_arena()
    reading.lending.bytes[:] = 42
    reading.clock.advance(0.001)
    settled = reading.reader.poll(read)
    assert settled is not None
    assert settled.ok
    assert (reading.rig.arena.bytes == 42).sum() == 4
    assert reading.counts == {"delay": 1}


def test_a_late_read_may_be_corrupt_as_well() -> None:
    reading = Reading(ReadFaults(delay=1.0, delay_s=0.5, corrupt=1.0))
    read = reading.reader.read(reading.rig.peer, reading.rig.spans(RUN))
    reading.clock.advance(0.5)
    assert reading.rig.finish(read).ok
    assert wrong_bytes(reading) == 1


@pytest.mark.parametrize("faults", [ReadFaults(delay=1.0), ReadFaults(stall=1.0)], ids=str)
def test_a_waiting_read_is_lost_with_its_peer_and_never_posted(faults: ReadFaults) -> None:
    reading = Reading(faults)
    read = reading.reader.read(reading.rig.peer, reading.rig.spans(RUN))
    reading.reader.disconnect(reading.rig.peer)
    reading.clock.advance(60.0)
    assert reading.reader.connect(reading.rig.address) == reading.rig.peer
    settled = reading.reader.poll(read)
    assert settled is not None
    assert isinstance(settled.error, PeerLost)
    reading.rig.check_arena()


def test_disconnecting_another_peer_loses_nothing() -> None:
    """Negative control."""
    reading = Reading(ReadFaults(delay=1.0, delay_s=0.5))
    read = reading.reader.read(reading.rig.peer, reading.rig.spans(RUN))
    reading.reader.disconnect(PeerId("another"))
    reading.clock.advance(0.5)
    assert reading.rig.finish(read).ok


def test_a_stalled_read_is_pending_for_ever() -> None:
    reading = Reading(ReadFaults(stall=1.0))
    read = reading.reader.read(reading.rig.peer, reading.rig.spans(RUN))
    for _ in range(10):
        reading.clock.advance(3600.0)
        assert reading.reader.poll(read) is None
    reading.rig.check_arena()
    assert reading.counts == {"stall": 1}


def test_closing_forgets_stalled_reads() -> None:
    reading = Reading(ReadFaults(stall=1.0))
    read = reading.reader.read(reading.rig.peer, reading.rig.spans(RUN))
    reading.reader.close()
    reading.reader.close()
    with pytest.raises(KeyError):
        reading.reader.poll(read)
    with pytest.raises(TransportClosed):
        reading.reader.read(reading.rig.peer, reading.rig.spans(RUN))


def test_where_closing_is_refused_stalled_reads_are_lost_and_posted_ones_polled() -> None:
    reading = Reading(ReadFaults(stall=0.5))
    reading.network.script = lambda _: Held()
    spans = reading.rig.spans(RUN)
    reads = [reading.reader.read(reading.rig.peer, spans) for _ in range(16)]
    assert 0 < reading.counts["stall"] < 16
    with pytest.raises(BackendFailure, match="can still write"):
        reading.reader.close()
    with pytest.raises(TransportClosed):
        reading.reader.read(reading.rig.peer, spans)
    reading.network.release_held()
    for read in reads:
        settled = reading.reader.poll(read)
        assert settled is not None
        assert isinstance(settled.error, PeerLost)
    reading.reader.close()


def test_a_killed_process_has_posted_the_read() -> None:
    reading = Reading(ReadFaults(kill=1.0))
    reading.rig.check_read(RUN)
    assert (reading.kills, reading.counts) == (1, {"kill": 1})


def test_a_kill_is_a_crash() -> None:
    script = "from transport.faulty import kill_ourselves; kill_ourselves(); print('alive')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


def test_a_read_that_waits_kills_when_it_is_posted() -> None:
    reading = Reading(ReadFaults(kill=1.0, delay=1.0, delay_s=0.5))
    read = reading.reader.read(reading.rig.peer, reading.rig.spans(RUN))
    assert reading.kills == 0
    reading.clock.advance(0.5)
    assert reading.rig.finish(read).ok
    assert reading.kills == 1


def test_reading_nothing_is_never_faulty() -> None:
    reading = Reading(ReadFaults(fail=1.0, stall=1.0, delay=1.0))
    settled = reading.reader.poll(reading.reader.read(reading.rig.peer, reading.rig.spans()))
    assert settled is not None
    assert settled.ok


def test_an_unknown_peer_is_refused_and_takes_no_draw() -> None:
    reading = Reading(ReadFaults(stall=1.0))
    for _ in range(3):
        with pytest.raises(PeerUnknown):
            reading.reader.read(PeerId("unknown"), reading.rig.spans(RUN))
    assert reading.counts == {}


def fates(faults: ReadFaults, seed: int) -> list[str]:
    """What befell each of 60 reads."""
    reading = Reading(faults, seed)
    seen = []
    for _ in range(60):
        before = dict(reading.counts)
        read = reading.reader.read(reading.rig.peer, reading.rig.spans(RUN))
        reading.reader.poll(read)
        seen.append(" ".join(k for k, n in reading.counts.items() if n > before.get(k, 0)))
    return seen


MIXED = ReadFaults(fail=0.1, stall=0.1, delay=0.2, corrupt=0.3, kill=0.2)


def test_the_same_seed_befalls_the_same_reads() -> None:
    assert fates(MIXED, 7) == fates(MIXED, 7)
    assert fates(MIXED, 7) != fates(MIXED, 8)


def test_turning_one_fault_off_moves_no_other() -> None:
    without = fates(ReadFaults(fail=0.1, stall=0.1, delay=0.2, corrupt=0.3), 7)
    assert [fate.replace("kill", "").strip() for fate in fates(MIXED, 7)] == without


def test_the_description_names_the_faults() -> None:
    reader: Transport = Reading(ReadFaults(corrupt=1.0, delay=0.5)).reader
    assert reader.describe()["faults"] == "delay 0.5, corrupt 1.0"
    assert reader.describe()["backend"] == reader.name == "memory"
    assert Reading(ReadFaults()).reader.describe()["faults"] == "none"
