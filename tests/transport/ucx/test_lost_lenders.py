"""Lenders that are killed, hang or are cut off: what still writes, and when a read settles."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.transport.ucx.pairs import MIB, finish, until
from tests.transport.ucx.ucx_process import TCP, process, shuffled
from transport.errors import PeerLost
from transport.types import Memory
from transport.ucx.reader_side import WINDOW
from transport.ucx.transport import UcxTransport

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ucx, pytest.mark.usefixtures("only_one_ucx")]


@pytest.mark.parametrize("run", [64 << 10, 4 * MIB])
def test_a_lender_killed_amid_a_read_settles_it_as_lost(run: int) -> None:
    nbytes = 64 * MIB
    ours = np.full(nbytes, 255, dtype=np.uint8)
    with UcxTransport("reader", **TCP) as reader:
        reader.register([Memory(ours.ctypes.data, nbytes)])
        for _ in range(3):
            ours[:] = 255
            with process("lend", nbytes) as (child, line):
                address, base = json.loads(line)
                peer = reader.connect(bytes.fromhex(address))
                read = reader.read(peer, shuffled(ours.ctypes.data, base, nbytes, run))
                assert until(lambda: bool((ours[::4096] != 255).any()))
                child.kill()
                settled = finish(reader, read)
                if settled.ok:
                    continue  # it was over before: on a busy machine we may look late
                assert isinstance(settled.error, PeerLost)
            _nothing_is_written_later(ours)
        assert until(lambda: reader._thread.reader.num_outstanding == 0)


@pytest.mark.parametrize("run", [64 << 10, 4 * MIB])
def test_once_a_cut_read_settled_nothing_is_written(run: int) -> None:
    nbytes = 64 * MIB
    ours = np.full(nbytes, 255, dtype=np.uint8)
    with process("lend", nbytes) as (child, line), UcxTransport("reader", **TCP) as reader:
        reader.register([Memory(ours.ctypes.data, nbytes)])
        address, base = json.loads(line)
        cut = 0
        for _ in range(4):
            ours[:] = 255
            peer = reader.connect(bytes.fromhex(address))
            read = reader.read(peer, shuffled(ours.ctypes.data, base, nbytes, run))
            assert until(lambda: bool((ours[::4096] != 255).any()))
            child.send_signal(signal.SIGSTOP)
            reader.disconnect(peer)
            settled = finish(reader, read)
            cut += isinstance(settled.error, PeerLost)
            _nothing_is_written_later(ours, lambda: child.send_signal(signal.SIGCONT))
        assert cut, "every read was over before it was cut: nothing was shown"
        ours[:] = 255
        peer = reader.connect(bytes.fromhex(address))
        assert finish(reader, reader.read(peer, shuffled(ours.ctypes.data, base, nbytes, run))).ok
        assert (ours[::4096] != 255).any()  # the watch would have seen a write


def _nothing_is_written_later(
    ours: NDArray[np.uint8], wake: Callable[[], object] = lambda: None
) -> None:
    ours[:] = 255
    wake()
    time.sleep(0.2)
    assert (ours == 255).all()


def test_the_window_bounds_what_one_lender_can_write_at_a_time() -> None:
    with process("lend", 64 * MIB) as (child, line), UcxTransport("reader", **TCP) as reader:
        ours = np.full(64 * MIB, 255, dtype=np.uint8)
        reader.register([Memory(ours.ctypes.data, ours.nbytes)])
        address, base = json.loads(line)
        child.send_signal(signal.SIGSTOP)
        peer = reader.connect(bytes.fromhex(address))
        spans = shuffled(ours.ctypes.data, base, 64 * MIB, 64 << 10)
        reads = [reader.read(peer, spans) for _ in range(3)]
        time.sleep(0.2)
        (theirs,) = reader._thread.reader._lenders.values()
        assert len(theirs.outstanding) == WINDOW
        reader.disconnect(peer)
        for read in reads:
            assert isinstance(finish(reader, read).error, PeerLost)
