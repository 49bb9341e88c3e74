"""The thread that connects and reads is bound to the GPU whose memory is registered.

Without that UCX leaves NVLink out for its connections, and says nothing.  There is no GPU here:
CUDA's driver and NIXL are scripted, threads and transport are real.  ``tests/gpu`` asks a card.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from pdconn.puller.reads import Connect, Connected, HeldTransport, JobResult, Read, ReaderThread
from pdconn.threads import Box
from tests.transport.nixl.scripted import World
from transport.address import pack
from transport.errors import BackendFailure
from transport.nixl.cuda import bind_thread
from transport.types import Device, Memory, Spans

GPU = Device("cuda", 1)
PRIMARY = {0: 0xA000, 1: 0xA001}
"""The primary contexts of the devices."""
OTHER_PEER = pack("nixl", "q", b"q 1")


class FakeDriver:
    """CUDA's driver: what was called, in which thread, and what that thread's context is."""

    def __init__(self, failing: str | None = None) -> None:
        self.calls: list[str] = []
        self.failing = failing
        self.current: dict[int, int | None] = {}

    def _called(self, name: str) -> int:
        self.calls.append(name)
        return 101 if name == self.failing else 0

    def cuInit(self, flags: int) -> int:
        return self._called("cuInit")

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = ordinal
        return self._called("cuDeviceGet")

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = PRIMARY[handle.value]
        return self._called("cuDevicePrimaryCtxRetain")

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current[threading.get_ident()] = context.value
        return self._called("cuCtxSetCurrent")


@pytest.mark.parametrize("index", [0, 1])
def test_a_thread_gets_the_primary_context_of_the_device(index: int) -> None:
    """Device 0 too: torch's ``set_device(0)`` calls nothing on a new thread."""
    driver = FakeDriver()
    assert bind_thread(Device("cuda", index), lambda: driver)
    assert driver.current == {threading.get_ident(): PRIMARY[index]}


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_driver_that_refuses_is_an_error_that_names_the_call(call: str) -> None:
    driver = FakeDriver(failing=call)
    with pytest.raises(BackendFailure, match=f"{call} for cuda:1 failed with CUDA error 101"):
        bind_thread(GPU, lambda: driver)
    assert not driver.current


def test_a_machine_without_the_driver_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert not bind_thread(GPU, lambda: None)
    assert "no CUDA driver" in caplog.text


class BoundWorld(World):
    """NIXL that says which thread called it, and whether that thread was bound by then."""

    def __init__(self, device: Device) -> None:
        self.bound: list[tuple[str, Device]] = []
        super().__init__(bind=self._bind)
        self.nixl.log.clear()
        self.reader.register([Memory(1 << 20, 1 << 20, device)])

    def _bind(self, device: Device) -> None:
        self.bound.append((threading.current_thread().name, device))
        self.nixl.log.append("bind")


def after_connecting_and_reading(world: BoundWorld, reads: int = 2) -> None:
    """A reader's thread connects to a peer, and reads from it."""
    results: Box[JobResult | HeldTransport] = Box()
    reader = ReaderThread(world.reader, results)

    def next_result() -> JobResult | None:
        while isinstance(item := results.take_one(20), HeldTransport):
            reader.hold(item)
        return item

    try:
        reader.post_job(Connect("peer", OTHER_PEER))
        connected = next_result()
        assert isinstance(connected, Connected), connected
        assert connected.peer is not None, connected
        [memory] = world.reader._registered
        runs = np.array([memory.base], np.uint64)
        spans = Spans(runs, runs, np.array([64], np.uint64), memory.device, memory.device)
        for number in range(reads):
            world.nixl.will("transfer", "DONE")
            reader.post_job(Read(number, connected.peer, spans))
            assert next_result() is not None
    finally:
        reader.close()


def test_the_readers_thread_is_bound_before_it_connects_and_once() -> None:
    world = BoundWorld(GPU)
    after_connecting_and_reading(world)
    assert world.bound == [("pdconn-reader", GPU)]
    log = world.nixl.log
    assert log.index("bind") < log.index("add_remote_agent") < log.index("transfer")


def test_a_thread_that_reads_what_another_connected_is_bound_too() -> None:
    world = BoundWorld(GPU)
    world.reader.connect(OTHER_PEER)
    after_connecting_and_reading(world)
    assert [name for name, _ in world.bound] == ["MainThread", "pdconn-reader"]


def test_host_memory_binds_nothing() -> None:
    """Negative control, and a machine without a GPU needs no driver."""
    world = BoundWorld(Device("cpu"))
    after_connecting_and_reading(world)
    assert world.bound == []
    assert "transfer" in world.nixl.log


def test_a_device_that_cannot_be_bound_fails_the_connection() -> None:
    world = BoundWorld(GPU)

    def refuse(device: Device) -> None:
        raise BackendFailure(f"no {device}")

    world.reader._bind = refuse
    with pytest.raises(BackendFailure, match="no cuda:1"):
        world.reader.connect(OTHER_PEER)
    assert "add_remote_agent" not in world.nixl.log
