"""The in-process backend keeps the contract."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tests.transport.contract.rigs import memory_rig
from transport.testing.contract import Rig, TransportContract


class TestMemory(TransportContract):
    def open_rig(self) -> AbstractContextManager[Rig]:
        return memory_rig()
