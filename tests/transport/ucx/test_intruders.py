"""A lender and a reader among foreign workers that send whatever they like."""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.transport.ucx.pairs import MIB, pair, remote, until
from tests.transport.ucx.ucx_process import TCP
from transport.errors import BackendFailure
from transport.ucx.control import (
    MAX_FRAME_BYTES,
    PieceRefused,
    PieceRequest,
    ReaderHello,
    SessionId,
    encode,
)
from transport.ucx.library import context_options, load_library
from transport.ucx.pieces import MAX_PIECE_BYTES, Runs
from transport.ucx.transport import UcxTransport
from transport.ucx.ucx_worker import FRAME_TAG, Endpoint, UcxRequest, UcxWorker

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ucx, pytest.mark.usefixtures("only_one_ucx")]

SESSION = SessionId(b"x" * 16)


class Intruder:
    """A foreign UCX worker, connected to a lender, that sends whatever it likes."""

    def __init__(self, worker_address: bytes) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        options = {**context_options(TCP["options"])}
        self.worker = UcxWorker(load_library(), options, self._wake_fd)
        self.endpoint: Endpoint = self.worker.connect(worker_address)
        self._sending: list[UcxRequest] = []

    def send(self, data: bytes, tag: int = FRAME_TAG) -> None:
        self._sending.append(self.endpoint.send_array(np.frombuffer(data, dtype=np.uint8), tag))

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
                answer.raise_failure("receive")
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
