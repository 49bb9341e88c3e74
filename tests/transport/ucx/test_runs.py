"""Messages of runs by real UCX, and that a UCX that differs from what we know is noticed."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.transport.ucx.ucx_process import TCP
from transport.errors import BackendFailure, PeerLost, TransportUnavailable
from transport.types import U64
from transport.ucx.library import _LOST, context_options, load_library
from transport.ucx.pieces import Runs
from transport.ucx.run_messages import RequestParam, UcpCalls, iov
from transport.ucx.selftest import check_calls, runs_calls
from transport.ucx.ucx_worker import Endpoint, UcxWorker

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ucx, pytest.mark.usefixtures("only_one_ucx")]


class ParamWithoutCallback(ctypes.Structure):
    """Wrong: as ``RequestParam``, but the datatype comes where the callback is."""

    _fields_ = (
        *(field for field in RequestParam._fields_ if field[0] != "cb"),
        ("room", ctypes.c_uint64),
    )


class Param(RequestParam):
    """Right."""


def unfilled(runs: Runs) -> U64:
    """Wrong: as ``iov`` with the lengths elsewhere."""
    array = iov(runs)
    array[:, 1] = 0
    return array


def reversed_runs(runs: Runs) -> U64:
    """Wrong: as ``iov`` with the runs in reverse."""
    return iov(Runs(runs.addresses[::-1], runs.nbytes[::-1]))


def test_the_layouts_fit_the_ucx_that_is_installed() -> None:
    check_calls(UcpCalls(load_library()))
    runs_calls(load_library())
    assert ctypes.sizeof(RequestParam) == 72


@pytest.mark.parametrize("wrong", [unfilled, reversed_runs])
def test_a_wrong_layout_of_runs_is_noticed(wrong: object) -> None:
    with pytest.raises(TransportUnavailable, match="does not send runs as pdconn expects"):
        check_calls(UcpCalls(load_library(), iov=wrong))  # type: ignore[arg-type]


def test_a_wrong_layout_of_parameters_is_noticed() -> None:
    with pytest.raises(TransportUnavailable, match="does not send runs as pdconn expects"):
        check_calls(UcpCalls(load_library(), param=ParamWithoutCallback))


def test_another_version_than_ucxx_has_loaded_is_not_used() -> None:
    library = load_library()
    with pytest.raises(TransportUnavailable, match=r"beside UCXX's, which is 1\.2\.3"):
        UcpCalls(replace(library, ucx_version="1.2.3"))


_WRONG = """
from transport.ucx import selftest
from transport.ucx.run_messages import UcpCalls
from tests.transport.ucx.test_runs import Param, ParamWithoutCallback
from transport.ucx.transport import UcxTransport
selftest.UcpCalls = lambda library: UcpCalls(library, param={})
UcxTransport("x", options={{"TLS": "tcp,self"}}, huge_pages=False).close()
print("fine")
"""


@pytest.mark.parametrize("wrong", [True, False])
def test_no_transport_starts_on_a_ucx_that_differs(wrong: bool) -> None:
    param = (
        "ParamWithoutCallback"
        if wrong
        else "__import__('transport.ucx.run_messages').ucx.run_messages.RequestParam"
    )
    done = subprocess.run(
        [sys.executable, "-c", _WRONG.format(param)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ("fine" in done.stdout) is not wrong, done.stderr
    assert ("TransportUnavailable" in done.stderr) is wrong


def test_statuses_are_those_of_the_exceptions_that_ucxx_raises_for_them() -> None:
    library = load_library()
    calls = runs_calls(library)
    text = {
        "UCXConnectionResetError": "Connection reset by remote peer",
        "UCXEndpointTimeoutError": "Endpoint timeout",
        "UCXUnreachableError": "Destination is unreachable",
        "UCXNotConnectedError": "Endpoint is not connected",
        "UCXRejectedError": "Operation rejected by remote peer",
        "UCXCanceledError": "Request canceled",
        "UCXIOError": "Input/output error",
        "UCXTimedOutError": "Operation timed out",
    }
    for name, status in _LOST.items():
        assert hasattr(library.api, name)
        if status is not None:
            error = calls.failure(status, "read")
            assert isinstance(error, PeerLost)
            assert text[name].lower() in str(error).lower()
    assert isinstance(calls.failure(-9, "read"), BackendFailure)
    assert "truncated" in str(calls.failure(-9, "read"))


class TwoWorkers:
    """Two workers of UCX over TCP in this process, and connections both ways."""

    def __init__(self) -> None:
        self.fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        options = context_options(TCP["options"])
        self.ours, self.theirs = (UcxWorker(load_library(), options, fd) for fd in self.fds)
        self.to_us: Endpoint = self.theirs.connect(self.ours.address)
        self.to_them: Endpoint = self.ours.connect(self.theirs.address)

    def progress(self, rounds: int = 2000) -> None:
        for _ in range(rounds):
            self.ours.progress()
            self.theirs.progress()

    def close(self) -> None:
        self.to_us.close()
        self.to_them.close()
        self.ours.close()
        self.theirs.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def two() -> Iterator[TwoWorkers]:
    workers = TwoWorkers()
    yield workers
    workers.close()


def parts(array: np.ndarray[tuple[int], np.dtype[np.uint8]], run: int) -> Runs:
    """Every second ``run`` bytes of ``array``."""
    at = np.arange(0, len(array), 2 * run, dtype=np.uint64) + np.uint64(array.ctypes.data)
    return Runs(at, np.full(len(at), run, dtype=np.uint64))


def until_done(two: TwoWorkers, *requests: object) -> bool:
    for _ in range(2000):
        two.progress(50)
        if all(request.done for request in requests):  # type: ignore[attr-defined]
            return True
        select.select([], [], [], 0.001)
    return False


@pytest.mark.parametrize(
    ("from_run", "into_run"), [(7, 64), (64, 7), (4096, 1 << 20), (1 << 20, 4096)]
)
def test_runs_arrive_in_other_runs_and_nothing_else_is_written(
    two: TwoWorkers, from_run: int, into_run: int
) -> None:
    nbytes = 448 if from_run * into_run == 448 else 2 << 20
    sent = np.random.default_rng(1).integers(0, 255, 2 * nbytes, dtype=np.uint8)
    came = np.full(2 * nbytes, 255, dtype=np.uint8)
    receive = two.ours.receive_runs(parts(came, into_run), 5)
    send = two.to_us.send_runs(parts(sent, from_run), 5)
    assert until_done(two, receive, send)
    receive.raise_failure("receive")
    rows = came.reshape(-1, 2, into_run)
    assert (rows[:, 0].ravel() == sent.reshape(-1, 2, from_run)[:, 0].ravel()).all()
    assert (rows[:, 1] == 255).all()


def test_a_matched_receive_that_is_cancelled_still_arrives(two: TwoWorkers) -> None:
    """So memory is in use until a request is done, not until it is cancelled."""
    sent = np.random.default_rng(1).integers(0, 255, 64 << 20, dtype=np.uint8)
    came = np.full(64 << 20, 255, dtype=np.uint8)
    receive = two.ours.receive_runs(parts(came, 65536), 5)
    send = two.to_us.send_runs(parts(sent, 65536), 5)
    for _ in range(100_000):
        two.theirs.progress()
        two.ours.progress()
        if (came[:65536] != 255).any():
            break
    assert not receive.done, "it is over: nothing was shown"
    receive.cancel()
    assert not receive.done
    assert until_done(two, receive, send)
    receive.raise_failure("receive")
    assert (came.reshape(-1, 2, 65536)[:, 0] == sent.reshape(-1, 2, 65536)[:, 0]).all()


def test_a_receive_without_a_message_is_done_once_cancelled(two: TwoWorkers) -> None:
    came = np.full(1 << 16, 255, dtype=np.uint8)
    receive = two.ours.receive_runs(parts(came, 4096), 5)
    two.progress()
    assert not receive.done
    receive.cancel()
    assert receive.done
    with pytest.raises(PeerLost, match="canceled"):
        receive.raise_failure("receive")
    two.to_us.send_array(np.zeros(64, dtype=np.uint8), 5)
    two.progress()
    assert (came == 255).all()


def test_closing_a_connection_ends_its_messages(two: TwoWorkers) -> None:
    sent, came = np.zeros(8 << 20, dtype=np.uint8), np.full(8 << 20, 255, dtype=np.uint8)
    receive = two.ours.receive_runs(parts(came, 65536), 5)
    send = two.to_us.send_runs(parts(sent, 65536), 5)
    unmatched = two.to_us.send_runs(parts(sent, 65536), 6)
    two.progress(5)
    two.to_us.close()
    two.to_them.close()
    receive.cancel()
    assert until_done(two, send, unmatched, receive)
    with pytest.raises(PeerLost):
        unmatched.raise_failure("send")
    with pytest.raises(PeerLost):
        two.to_us.send_runs(parts(sent, 65536), 7)


def test_a_transport_that_closes_has_freed_its_requests() -> None:
    calls = runs_calls(load_library())
    posted: list[int] = []
    freed: list[int] = []
    watched = replace_calls(calls, posted, freed)
    try:
        from tests.transport.ucx.pairs import MIB, pair

        with pair(8 * MIB) as pairs:
            assert pairs.is_fine(64 << 10)
            pairs.start(64 << 10)
        assert posted
        assert sorted(posted) == sorted(freed)
    finally:
        watched()


def replace_calls(calls: UcpCalls, posted: list[int], freed: list[int]) -> object:
    """Note what is posted and freed, until the function that is returned is called."""
    send, receive, free = calls.send, calls.receive, calls.free

    def noted(function: object) -> object:
        def call(*arguments: object) -> object:
            answer = function(*arguments)  # type: ignore[operator]
            if answer is not None and answer < (1 << 64) - 100:
                posted.append(answer)
            return answer

        return call

    def freeing(request: int) -> None:
        freed.append(request)
        free(request)

    calls.send, calls.receive, calls.free = noted(send), noted(receive), freeing

    def restore() -> None:
        calls.send, calls.receive, calls.free = send, receive, free

    return restore
