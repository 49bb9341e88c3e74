"""Reads over real UCX: of every size, many at once, and refused ones among others."""

from __future__ import annotations

import importlib.util
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from tests.transport.ucx.pairs import MIB, PATIENCE_S, finish, pair, until
from tests.transport.ucx.ucx_process import TCP, shuffled
from transport.errors import BackendFailure, OutOfBounds
from transport.types import Memory, Spans
from transport.ucx.control import MAX_RUNS
from transport.ucx.reader_side import WINDOW
from transport.ucx.transport import UcxTransport

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ucx, pytest.mark.usefixtures("only_one_ucx")]


def test_many_reads_at_once_all_arrive_and_keep_apart() -> None:
    with pair(8 * MIB) as two:
        run = 16 << 10
        reads = [two.start(run, part=slice(i, None, 64)) for i in range(64)]
        assert all(finish(two.reader, read).ok for read in reversed(reads))
        assert (two.ours == two.expected(run)).all()


@pytest.mark.parametrize("run", [64, 1000, 4096, 64 << 10, 256 << 10, MIB, 8 * MIB])
def test_runs_of_every_size_arrive(run: int) -> None:
    with pair(8 * MIB // run * run) as two:
        assert two.is_fine(run)


def test_a_short_read_does_not_wait_for_the_long_one_before_it() -> None:
    with pair(64 * MIB) as two:
        assert two.is_fine(MIB)
        long, short = two.start(64 << 10), two.start(4096, part=slice(0, 1))
        assert finish(two.reader, short).ok
        assert two.reader.poll(long) is None, "the long one ended first: nothing was shown"
        assert finish(two.reader, long).ok


def test_a_refused_piece_fails_its_read_and_no_other() -> None:
    with pair(4 * MIB) as two:
        spans = shuffled(two.ours.ctypes.data, two.held.ctypes.data, 4 * MIB, 64 << 10)
        remote = spans.remote.copy()
        remote[40] = two.held.ctypes.data + 4 * MIB
        bad = two.reader.read(two.peer, type(spans)(spans.local, remote, spans.nbytes))
        good = two.start(64 << 10)
        assert isinstance(finish(two.reader, bad).error, OutOfBounds)
        assert finish(two.reader, good).ok


@pytest.mark.parametrize("nbytes", [1, 64, 64 << 10, 4 * MIB])
def test_a_refused_piece_fails_even_if_its_reader_does_not_learn_why(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames from foreign workers may push the lender's frame out."""
    with pair(4 * MIB) as two:
        assert two.is_fine()
        monkeypatch.setattr(two.reader._thread.reader, "handle_frame", lambda data: None)
        before = two.ours.copy()
        ours, outside = two.ours.ctypes.data, two.held.ctypes.data + 4 * MIB
        read = two.reader.read(two.peer, shuffled(ours, outside, nbytes, nbytes))
        settled = finish(two.reader, read)
        assert isinstance(settled.error, BackendFailure)
        assert (two.ours == before).all()
        assert two.is_fine()


def test_more_frames_may_come_at_once_than_may_be_announced() -> None:
    """Ten readers ask for a window of pieces each while the lender's thread is busy."""
    run, runs, readers = 64, WINDOW * MAX_RUNS, 10
    with pair(run * runs) as two, ExitStack() as stack:
        gate = threading.Event()
        address = two.lender.address()
        two.lender._thread.run_soon(lambda: gate.wait(PATIENCE_S) and None)
        reads = []
        for number in range(readers):
            reader = stack.enter_context(UcxTransport(f"reader{number}", **TCP))
            room = np.zeros((runs, run + 64), dtype=np.uint8)
            reader.register([Memory(room.ctypes.data, room.nbytes)])
            at = np.arange(runs, dtype=np.uint64)
            spans = Spans(
                at * np.uint64(run + 64) + np.uint64(room.ctypes.data),
                at * np.uint64(run) + np.uint64(two.held.ctypes.data),
                np.full(runs, run, dtype=np.uint64),
            )
            reads.append((reader, reader.read(reader.connect(address), spans), room))
        for reader, _, _ in reads:
            assert until(lambda reader=reader: reader._thread.reader.num_outstanding >= WINDOW)
        gate.set()
        for reader, read, room in reads:
            assert finish(reader, read).ok
            assert (room[:, :run] == two.held.reshape(runs, run)).all()
