"""A lender and a reader over real UCX in one process, and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tests.transport.ucx.ucx_process import TCP, content, shuffled
from transport.address import unpack
from transport.types import Memory, ReadId, Settled
from transport.ucx.reader_side import RemoteLender
from transport.ucx.transport import UcxTransport, _remote_lender

MIB = 1 << 20
PATIENCE_S = 30.0


def until(done: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> bool:
    """Whether ``done`` came true in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            return False
        meanwhile()
        time.sleep(0.001)
    return True


def finish(reader: UcxTransport, read: ReadId) -> Settled:
    settled: list[Settled] = []

    def over() -> bool:
        settled.extend(filter(None, [reader.poll(read)]))
        return bool(settled)

    assert until(over), "the read did not settle"
    return settled[0]


def remote(lender: UcxTransport) -> RemoteLender:
    return _remote_lender(unpack("ucx", lender.address()))


class UcxPair:
    """A lender and a reader in this process, ``nbytes`` on each side."""

    def __init__(self, lender: UcxTransport, reader: UcxTransport, nbytes: int) -> None:
        self.lender, self.reader, self.nbytes = lender, reader, nbytes
        self.held, self.ours = content(nbytes), np.full(nbytes, 255, dtype=np.uint8)
        lender.register([Memory(self.held.ctypes.data, nbytes)])
        reader.register([Memory(self.ours.ctypes.data, nbytes)])
        self.peer = reader.connect(lender.address())

    def start(self, run: int, *, part: slice = slice(None)) -> ReadId:
        spans = shuffled(self.ours.ctypes.data, self.held.ctypes.data, self.nbytes, run)
        spans = type(spans)(spans.local[part], spans.remote[part], spans.nbytes[part])
        return self.reader.read(self.peer, spans)

    def expected(self, run: int) -> NDArray[np.uint8]:
        order = np.random.default_rng(5).permutation(self.nbytes // run)
        return self.held.reshape(-1, run)[order].ravel()

    def is_fine(self, run: int = 4096) -> bool:
        self.ours[:] = 255
        settled = finish(self.reader, self.start(run))
        return settled.ok and bool((self.ours == self.expected(run)).all())


@contextmanager
def pair(nbytes: int = MIB) -> Iterator[UcxPair]:
    with UcxTransport("lender", **TCP) as lender, UcxTransport("reader", **TCP) as reader:
        yield UcxPair(lender, reader, nbytes)
