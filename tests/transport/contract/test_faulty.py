"""A faulty transport keeps the contract: with no faults, and with reads that are only late."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from random import Random
from typing import Any

import pytest

from tests.transport.contract.rigs import Lender, memory_rig, nixl_rig
from transport.base import Transport
from transport.faulty import FaultyTransport, ReadFaults
from transport.nixl.transport import NixlTransport
from transport.testing.contract import Rig, TransportContract
from transport.testing.inprocess.transport import InProcessTransport


@pytest.fixture(scope="module")
def lender() -> Iterator[Lender]:
    lender = Lender()
    yield lender
    lender.end()


def faulty(backend: Callable[..., Transport], faults: ReadFaults) -> Callable[..., Transport]:
    """A maker of ``backend`` transports with ``faults``."""

    def make(*args: Any, **options: Any) -> Transport:
        return FaultyTransport(backend(*args, **options), faults, Random(7))

    return make


class TestWithoutFaults(TransportContract):
    def open_rig(self) -> AbstractContextManager[Rig]:
        return memory_rig(faulty(InProcessTransport, ReadFaults()))


class TestEveryReadLate(TransportContract):
    def open_rig(self) -> AbstractContextManager[Rig]:
        return memory_rig(faulty(InProcessTransport, ReadFaults(delay=1.0, delay_s=0.002)))


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
class TestNixlWithoutFaults(TransportContract):
    lender: Lender

    @pytest.fixture(autouse=True)
    def _borrow(self, lender: Lender) -> None:
        self.lender = lender

    def open_rig(self) -> AbstractContextManager[Rig]:
        reader_type = faulty(NixlTransport, ReadFaults())
        return nixl_rig(self.lender, tls="tcp", stalls=True, reader_type=reader_type)


@pytest.mark.parametrize(
    ("faults", "test"),
    [
        (ReadFaults(corrupt=1.0), "test_bytes_arrive_exactly_and_nothing_else_changes"),
        (ReadFaults(fail=1.0), "test_bytes_arrive_exactly_and_nothing_else_changes"),
        (ReadFaults(stall=1.0), "test_many_reads_at_once_keep_apart"),
    ],
    ids=str,
)
def test_the_contract_notices_faults(faults: ReadFaults, test: str) -> None:
    """Negative control."""
    rig_of_faults = memory_rig(faulty(InProcessTransport, faults), settle_s=0.1)
    with rig_of_faults as rig, pytest.raises(AssertionError):
        getattr(TransportContract(), test)(rig)
