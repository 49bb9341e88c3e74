"""NIXL keeps the transport contract with memory of a GPU, as it does with the host's."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from tests.gpu.bytes_on import ArenaOn, BytesOn
from tests.gpu.rigs import DeviceLender, device_rig
from transport import Device
from transport.testing.contract import BLANK, Arena, Rig, TransportContract


class TestNixlOnADevice(TransportContract):
    lender: DeviceLender

    @pytest.fixture(autouse=True)
    def _borrow(self, lender: DeviceLender) -> None:
        self.lender = lender

    def open_rig(self) -> AbstractContextManager[Rig]:
        return device_rig(self.lender)

    def test_everything_of_the_rig_is_on_the_device(self, rig: Rig, device: Device) -> None:
        spans = rig.spans((0, 0, 64))
        assert rig.arena.memory.device == rig.arena.guard.device == device
        assert spans.local_device == spans.remote_device == device

    def test_a_byte_that_is_wrong_is_noticed(self, rig: Rig) -> None:
        """Negative control."""
        rig.check_read((64, 4096, 1000))
        rig.arena.bytes.flip(9000)  # type: ignore[attr-defined]
        with pytest.raises(AssertionError, match="1 bytes are wrong"):
            rig.check_arena((64, 4096, 1000))


def test_bytes_on_a_device_are_written_and_read_as_an_arrays(device: Device) -> None:
    array = Arena.patterned().bytes
    held = BytesOn(array, device)
    assert not (held != array).any()
    held[10:20] = BLANK
    array[10:20] = BLANK
    held[30] = array[30] = 7
    assert not (held != array).any()
    assert ArenaOn.on(device, Arena.blank()).memory.device == device
