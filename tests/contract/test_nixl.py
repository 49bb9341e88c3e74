"""NIXL keeps the contract, with the lender in a process of its own.

Twice: over what UCX picks by itself on one host, where the reader copies alone,
and over TCP, where the lender takes part and can stall.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from tests.contract.rigs import Lender, nixl_rig
from transport.testing import Rig, TransportContract

pytest.importorskip("nixl")


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


class TestNixlOnOneHost(_WithLender, TransportContract):
    def open_rig(self) -> AbstractContextManager[Rig]:
        return nixl_rig(self.lender)


class TestNixlOverTcp(_WithLender, TransportContract):
    def open_rig(self) -> AbstractContextManager[Rig]:
        return nixl_rig(self.lender, tls="tcp", stalls=True)
