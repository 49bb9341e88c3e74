"""UCX keeps the contract, with the lender in a process of its own, over TCP."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from tests.transport.contract.rigs import Lender
from tests.transport.contract.ucx_rig import TCP, UcxLender, ucx_rig
from transport.errors import BackendFailure, BadAddress, PeerLost
from transport.testing.contract import Arena, Rig, TransportContract
from transport.types import Device, Memory
from transport.ucx.transport import UcxTransport

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ucx, pytest.mark.usefixtures("only_one_ucx")]


@pytest.fixture(scope="module")
def lender() -> Iterator[Lender]:
    lender = UcxLender()
    yield lender
    lender.end()


class TestUcxOverTcp(TransportContract):
    lender: Lender

    @pytest.fixture(autouse=True)
    def _borrow(self, lender: Lender) -> None:
        self.lender = lender

    def open_rig(self) -> AbstractContextManager[Rig]:
        return ucx_rig(self.lender)

    def test_a_peer_restarted_under_its_old_name_is_another_connection(self) -> None:
        with ucx_rig(self.lender, boot="same") as rig:
            rig.check_read((0, 0, 64))
            self.lender.pause()
            stuck = rig.reader.read(rig.peer, rig.spans((64, 64, 64)))
            self.lender.kill()
            address, remote = self.lender.open("lender", "same", TCP)
            assert isinstance(rig.finish(stuck).error, PeerLost)
            assert rig.reader.connect(address) == rig.peer
            replace(rig, remote=remote).check_read((0, 0, 64))

    def test_a_restart_that_no_read_noticed_is_another_connection(self) -> None:
        with ucx_rig(self.lender, boot="same") as rig:
            rig.check_read((0, 0, 64))
            self.lender.kill()
            address, remote = self.lender.open("lender", "same", TCP)
            assert rig.reader.connect(address) == rig.peer
            replace(rig, remote=remote).check_read((0, 0, 64))

    def test_nothing_is_read_from_oneself(self, rig: Rig) -> None:
        with pytest.raises(BadAddress, match="itself"):
            rig.reader.connect(rig.reader.address())

    def test_device_memory_is_refused_and_the_text_names_the_way_out(self, rig: Rig) -> None:
        with pytest.raises(BackendFailure, match=r"cuda:7: .* nixl"):
            rig.reader.register([rig.arena.guard, Memory(1 << 40, 4096, Device("cuda", 7))])
        rig.reader.register([rig.arena.guard])  # nothing of the refused call was kept

    def test_memory_registered_later_is_lent_as_well(self) -> None:
        lending, reading = Arena.patterned(), Arena.blank()
        with UcxTransport("p", **TCP) as lender, UcxTransport("d", **TCP) as reader:
            lender.register([lending.guard])
            reader.register([reading.memory])
            rig = Rig(reader, reader.connect(lender.address()), b"", reading, lending.memory)
            refused = rig.finish(reader.read(rig.peer, rig.spans((0, 0, 64))))
            assert "lies in no registered memory" in str(refused.error)
            lender.register([lending.memory])
            rig.check_read((0, 0, 64))

    def test_disconnecting_ends_a_read_though_its_peer_hangs(self, rig: Rig) -> None:
        rig.check_read((0, 0, 64))
        self.lender.pause()
        read = rig.reader.read(rig.peer, rig.spans((4096, 0, 4096)))
        assert rig.reader.poll(read) is None
        rig.reader.disconnect(rig.peer)
        assert isinstance(rig.finish(read).error, PeerLost)
        rig.check_arena((0, 0, 64))

    def test_what_is_in_use_is_reported(self, rig: Rig) -> None:
        facts = rig.reader.describe()
        assert facts["ucxx"].startswith("0.")
        assert facts["ucx"].startswith("1.")
        assert facts["UCX_TLS"] == "tcp,self"


def test_an_idle_transport_rests() -> None:
    with UcxTransport("idle", **TCP):
        # Of rounds: others live in this process, too.
        assert min(_cpu_share(0.5, spin=False) for _ in range(3)) < 0.03
        assert max(_cpu_share(0.5, spin=True) for _ in range(6)) > 0.04  # the measurement can fail


def _cpu_share(seconds: float, *, spin: bool) -> float:
    """CPU time of this process per second of wall time, while this thread sleeps or spins."""
    before, began = os.times(), time.monotonic()
    while time.monotonic() - began < seconds:
        if not spin:
            time.sleep(seconds)
    after = os.times()
    used = after.user + after.system - before.user - before.system
    return used / (time.monotonic() - began)
