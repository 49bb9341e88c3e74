"""What is asked of a wrapped transport reaches the one that it wraps."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from transport import HOST, BackendFailure, Memory, PeerId, ReadId, Spans, Transport
from transport.faulty import FaultyTransport, ReadFaults
from transport.forwarding import ForwardingTransport

EMPTY = np.empty(0, np.uint64)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "register": ([Memory(4096, 4096)],),
    "connect": (b"address",),
    "disconnect": (PeerId("p"),),
    "read": (PeerId("p"), Spans(EMPTY, EMPTY, EMPTY, HOST, HOST)),
    "poll": (ReadId(0),),
}
ASKED = sorted(name for name in vars(Transport) if not name.startswith("_"))


class Recorder:
    """Answers everything, and remembers what it was asked."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.log.append(name)
        return lambda *arguments: None


@pytest.mark.parametrize("name", ASKED)
def test_every_question_of_the_interface_is_passed_on(name: str) -> None:
    inner: Any = Recorder()
    asked = getattr(ForwardingTransport(inner), name)
    if callable(asked) and not isinstance(vars(Transport)[name], property):
        asked(*ARGUMENTS.get(name, ()))
    assert inner.log == [name]


class DeadTransport(ForwardingTransport):
    def check(self) -> None:
        raise BackendFailure("its thread died")


def test_faults_on_demand_do_not_hide_a_backend_that_died() -> None:
    dead = DeadTransport(Recorder())  # type: ignore[arg-type]
    faulty = FaultyTransport(dead, ReadFaults(), Random(1))
    with pytest.raises(BackendFailure, match="died"):
        faulty.check()
