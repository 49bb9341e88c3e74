"""The UCX backend against real UCX over TCP: hostile peers, vanishing ones, many reads at once."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.transport.ucx.ucx_process import TCP, content, process, shuffled
from transport.address import unpack
from transport.errors import BackendFailure, OutOfBounds, PeerLost, TransportUnavailable
from transport.types import Memory, ReadId, Settled, Spans
from transport.ucx import thread as ucx_thread
from transport.ucx.frames import (
    MAX_FRAME_BYTES,
    MAX_RUNS,
    PieceRefused,
    PieceRequest,
    ReaderHello,
    SessionId,
    encode,
)
from transport.ucx.lender import LenderLimits, RemoteReader, UcxLender
from transport.ucx.library import context_options, load_library
from transport.ucx.pieces import MAX_PIECE_BYTES, Runs
from transport.ucx.reader import WINDOW, RemoteLender
from transport.ucx.transport import UcxTransport, _remote_lender
from transport.ucx.worker import FRAME_TAG, Endpoint, UcxRequest, UcxWorker

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ucx, pytest.mark.usefixtures("only_one_ucx")]

MIB = 1 << 20
PATIENCE_S = 30.0
LIMITS = LenderLimits()


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


class Pair:
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
def pair(nbytes: int = MIB) -> Iterator[Pair]:
    with UcxTransport("lender", **TCP) as lender, UcxTransport("reader", **TCP) as reader:
        yield Pair(lender, reader, nbytes)


class Intruder:
    """A foreign UCX worker, connected to a lender, that sends whatever it likes."""

    def __init__(self, worker_address: bytes) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        options = {**context_options(TCP["options"])}
        self.worker = UcxWorker(load_library(), options, self._wake_fd)
        self.endpoint: Endpoint = self.worker.connect(worker_address)
        self._sending: list[UcxRequest] = []

    def send(self, data: bytes, tag: int = FRAME_TAG) -> None:
        self._sending.append(self.endpoint.send(np.frombuffer(data, dtype=np.uint8), tag))

    def flush(self) -> None:
        assert until(self._all_sent, self.worker.progress)
        self._sending.clear()

    def close(self) -> None:
        self.endpoint.close()
        self.worker.close()
        os.close(self._wake_fd)

    def _all_sent(self) -> bool:
        for _ in range(100):
            self.worker.progress()
        return all(request.done for request in self._sending)


@contextmanager
def intruding(lender: UcxTransport) -> Iterator[Intruder]:
    made = Intruder(remote(lender).worker_address)
    yield made
    made.close()


SESSION = SessionId(b"x" * 16)


def test_only_a_holder_of_the_secret_gets_a_session() -> None:
    with pair() as two, intruding(two.lender) as intruder:
        lending = two.lender._thread.lender
        secret = remote(two.lender).secret
        hello = ReaderHello(SESSION, intruder.worker.address)
        intruder.send(encode(hello, bytes(32)))
        intruder.send(encode(hello, secret)[:-1] + b"\0\0")
        assert until(lambda: lending.refused_frames == 2, intruder.worker.progress)
        assert lending.num_readers == 0
        intruder.send(encode(hello, secret))
        assert until(lambda: lending.num_readers == 1, intruder.worker.progress)
        assert two.is_fine()


def test_frames_of_another_boot_are_refused() -> None:
    with pair() as two, UcxTransport("other", **TCP) as other, intruding(other) as intruder:
        hello = ReaderHello(SESSION, intruder.worker.address)
        intruder.send(encode(hello, remote(two.lender).secret))
        lending = other._thread.lender
        assert until(lambda: lending.refused_frames == 1, intruder.worker.progress)
        assert lending.num_readers == 0


def test_a_flood_of_strange_messages_is_dropped_and_costs_no_memory() -> None:
    with pair() as two, intruding(two.lender) as intruder:
        assert two.is_fine()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        noise = os.urandom(MAX_FRAME_BYTES)
        for number in range(200):
            for _ in range(20):
                intruder.send(noise)
                intruder.send(noise, tag=number)
            intruder.send(bytes(8 * MIB), tag=number | 1 << 63)
            intruder.send(bytes(MIB))
            intruder.flush()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        sent_mib = 200 * 9 + 200 * 40 * len(noise) / MIB
        assert grown / 1024 < sent_mib / 10
        assert two.is_fine()
        assert two.lender._thread.lender.num_readers == 1


def test_an_authenticated_reader_is_held_to_what_is_lent() -> None:
    with pair() as two, intruding(two.lender) as intruder:
        secret, lending = remote(two.lender).secret, two.lender._thread.lender
        intruder.send(encode(ReaderHello(SESSION, intruder.worker.address), secret))
        base = two.held.ctypes.data
        for number, (address, nbytes) in enumerate(
            [(base - 1, 2), (base + MIB - 1, 2), (4096, 64), (base, 2**32 - 1)], 1
        ):
            run = np.array([address], np.uint64), np.array([nbytes], np.uint64)
            into = np.full(min(nbytes, MAX_PIECE_BYTES), 255, dtype=np.uint8)
            room = Runs(np.array([into.ctypes.data], np.uint64), np.array([into.size], np.uint64))
            answer = intruder.worker.receive_runs(room, 1 << 63 | number)
            intruder.send(encode(PieceRequest(SESSION, number, 1 << 63 | number, *run), secret))
            assert until(lambda answer=answer: answer.done, intruder.worker.progress)
            with pytest.raises(BackendFailure, match="truncated"):
                answer.check("receive")
            assert (into == 255).all()
        assert lending.num_readers == 1
        assert two.is_fine()


def test_unauthenticated_answers_change_nothing() -> None:
    with pair() as two, intruding(two.reader) as intruder:
        assert two.is_fine()
        session = next(iter(two.reader._thread.reader._lenders))
        intruder.send(encode(PieceRefused(session, 1, True, "no"), bytes(32)))
        intruder.send(encode(PieceRefused(SESSION, 1, True, "no"), bytes(32)))
        intruder.flush()
        assert two.is_fine()


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
        monkeypatch.setattr(two.reader._thread.reader, "handle", lambda data: None)
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
        two.lender._thread.post(lambda: gate.wait(PATIENCE_S) and None)
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


@pytest.mark.parametrize("run", [64 << 10, 4 * MIB])
def test_a_reader_that_vanishes_leaves_nothing_behind(run: int) -> None:
    nbytes = 64 * MIB
    with pair() as two:
        big = content(nbytes)
        two.lender.register([Memory(big.ctypes.data, nbytes)])
        lending = two.lender._thread.lender
        for _ in range(3):
            address = two.lender.address().hex()
            with process("read", address, big.ctypes.data, nbytes, run) as (child, _):
                assert until(lambda: lending.num_sending > 0)
                child.kill()
            assert until(lambda: lending.num_readers == 0 and lending.num_sending == 0)
        assert two.is_fine()


def test_a_reader_that_hangs_holds_a_bounded_share_and_others_go_on() -> None:
    nbytes = 64 * MIB
    with pair() as two:
        big = content(nbytes)
        two.lender.register([Memory(big.ctypes.data, nbytes)])
        lending = two.lender._thread.lender
        address = two.lender.address().hex()
        with process("read", address, big.ctypes.data, nbytes, 64 << 10) as (child, _):
            assert until(lambda: lending.num_sending > 0)
            child.send_signal(signal.SIGSTOP)
            for _ in range(20):
                assert two.is_fine()
                assert lending.num_sending <= 2 * LIMITS.sending  # its share and ours
            assert until(lambda: len(_busy(lending)) == 1), "ours has all that it asked for"
            (hung,) = _busy(lending)
            assert 0 < len(hung.sending) <= LIMITS.sending
            assert len(hung.requests) <= LIMITS.queued


def test_a_lender_outlives_its_readers_even_where_the_environment_turns_ucxs_cache_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nbytes = 16 * MIB
    monkeypatch.setenv("UCX_RCACHE_ENABLE", "n")  # read whenever a transport is made
    ours = np.full(nbytes, 255, dtype=np.uint8)
    with process("lend", nbytes) as (lender, line), UcxTransport("reader", **TCP) as reader:
        reader.register([Memory(ours.ctypes.data, nbytes)])
        address, base = json.loads(line)
        for reading_s in (0.01, 0.02, 0.05, 0.1, 0.2):  # to die connecting, and amid a message
            with process("read", address, base, nbytes, 64 << 10) as (child, _):
                time.sleep(reading_s)
                child.kill()
        spans = shuffled(ours.ctypes.data, base, nbytes, 64 << 10)
        settled = finish(reader, reader.read(reader.connect(bytes.fromhex(address)), spans))
        assert settled.ok, settled.error
        assert lender.poll() is None


def test_ucx_without_a_registration_cache_is_not_used_and_the_text_says_why() -> None:
    make = (
        "from transport.ucx.transport import UcxTransport as T; T('x', options={'TLS': 'tcp,self'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", make],
        env={**os.environ, "UCX_MEM_EVENTS": "n"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "TransportUnavailable" in done.stderr
    assert "unset UCX_MEM_EVENTS" in done.stderr


def _busy(lending: UcxLender) -> list[RemoteReader]:
    return [r for r in list(lending._readers.values()) if r.requests or r.sending]


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


def test_an_error_of_the_thread_fails_reads_and_is_not_hidden(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with UcxTransport("lender", **TCP) as lender:
        reader = UcxTransport("reader", close_wait_s=0.1, **TCP)
        two = Pair(lender, reader, MIB)
        reader.check()

        def broken() -> None:
            raise RuntimeError("broken")

        gate = threading.Event()
        reader._thread.post(lambda: gate.wait(PATIENCE_S) and None)
        pending = two.start(4096)
        reader._thread.post(broken)  # in the same round: before the lender can have answered
        gate.set()
        assert until(lambda: reader._thread._failure is not None)
        with pytest.raises(BackendFailure, match="broken"):
            reader.check()
        lender.check()
        assert reader.poll(pending) is None  # whether it can still write is unknown
        settled = finish(reader, two.start(4096))
        assert isinstance(settled.error, BackendFailure)
        assert "broken" in str(settled.error)
        with pytest.raises(BackendFailure):
            reader.close()
    assert "ucx thread ended" in caplog.text
    assert reader._thread in ucx_thread._failed, "collected, it would let UCX write again"


def test_without_ucxx_the_text_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(TransportUnavailable, match=r"pdconn\[ucx\]"):
        load_library()


def test_options_that_ucx_does_not_know_or_cannot_follow_are_errors() -> None:
    with pytest.raises((TransportUnavailable, BackendFailure), match="NO_SUCH"):
        UcxTransport("x", options={"NO_SUCH": "1"})
    with pytest.raises(ValueError, match="RNDV_THRESH"):
        UcxTransport("x", options={"RNDV_THRESH": "inf"})
    with pytest.raises(ValueError, match="RCACHE_ENABLE"):
        UcxTransport("x", options={"RCACHE_ENABLE": "try"})


_ALONE = """
import os
from transport.ucx.transport import UcxTransport
before = dict(os.environ)
def ucx():
    return UcxTransport("u", options={"TLS": "tcp,self"}, huge_pages=False)
import numpy as np
from transport.types import Memory, Spans
ours, theirs = np.zeros(1 << 20, np.uint8), np.ones(1 << 20, np.uint8)
with ucx() as lender, ucx() as reader:
    lender.register([Memory(theirs.ctypes.data, 1 << 20)])
    reader.register([Memory(ours.ctypes.data, 1 << 20)])
    column = lambda value: np.array([value], np.uint64)
    spans = Spans(column(ours.ctypes.data), column(theirs.ctypes.data), column(1 << 20))
    read = reader.read(reader.connect(lender.address()), spans)
    while (settled := reader.poll(read)) is None:
        pass
    assert settled.ok and ours.all()
left = {k for k in set(os.environ) - set(before) if k.startswith("UCX_")}
assert not left, left
import sys
assert not {"rmm", "cupy", "librmm"} & set(sys.modules)
print("fine")
"""


def test_a_read_loads_no_gpu_library_and_leaves_the_environment_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _ALONE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "fine" in done.stdout, done.stderr


def test_the_thread_ends_with_the_transport() -> None:
    reader = UcxTransport("reader", **TCP)
    thread = reader._thread._thread
    assert thread.is_alive()
    reader.close()
    assert not thread.is_alive()
    assert ucx_thread._MAX_WAIT_S <= 1.0
