"""Tests that this UCX sends runs as expected, once per process.

A worker sends messages to itself, within the process: one of several runs, into other runs; one
that is too long, which must fail and write nothing; and a receive is cancelled.  This covers all
that ``transport.ucx.run_messages`` relies on: layouts, status numbers, and when a request is done.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from transport.errors import TransportError, TransportUnavailable
from transport.ucx.library import UcxLibrary
from transport.ucx.pieces import Runs
from transport.ucx.run_messages import RunsMessages, RunsRequest, UcpCalls

_CANCELED, _TRUNCATED = -16, -9

_UNDELIVERED: list[Any] = []
"""Memory that UCX may still use after a failure."""

_ATTEMPTS = 100_000
"""Rounds of progress within which a message to ourselves arrives; it takes some tens."""


@lru_cache(maxsize=1)
def runs_calls(library: UcxLibrary) -> UcpCalls:
    """UCX's functions, checked once in this process.

    Raises:
        TransportUnavailable: this UCX does not do what is expected of it.
    """
    calls = UcpCalls(library)
    check_calls(calls)
    return calls


def check_calls(calls: UcpCalls) -> None:
    """Send messages of runs from a worker to itself, and check that they arrive.

    Raises:
        TransportUnavailable: they do not arrive as expected; the message has what was seen.
    """
    library = calls.library
    try:
        with library.mapped("check UCX"):
            api = library.api
            context = api.UCXContext({"TLS": "self", "RNDV_THRESH": "8192"}, (api.Feature.TAG,))
            worker = api.UCXWorker(context)
            endpoint = worker.create_endpoint_from_worker_address(worker.address, False)
            try:
                for unit in (3, 5000):  # sent at once, and announced first
                    _LayoutCheck(calls, worker, endpoint).check_messages(unit)
            finally:
                endpoint.close_blocking()
    except TransportError as error:
        raise TransportUnavailable(
            f"UCX {library.ucx_version} does not send runs as pdconn expects of UCX 1.21: {error}"
        ) from error


class _LayoutCheck:
    """Messages from a worker to itself."""

    def __init__(self, calls: UcpCalls, worker: Any, endpoint: Any) -> None:
        self._worker, self._endpoint = worker, endpoint.handle
        self._messages = RunsMessages(calls, worker.handle)
        self._arrays: tuple[Any, ...] = ()

    def check_messages(self, unit: int) -> None:
        """Send messages of ``4 * unit`` bytes.

        Raises:
            TransportUnavailable: they do not arrive as expected.
        """
        sent = np.arange(1, 8 * unit + 1, dtype=np.uint64).astype(np.uint8) | np.uint8(1)
        received = np.zeros(8 * unit, dtype=np.uint8)
        self._arrays = sent, received
        three = _parts(sent, (4 * unit, unit), (0, 2 * unit), (6 * unit, unit))
        two = _parts(received, (5 * unit, 3 * unit), (unit, unit))
        expected = received.copy()
        order = np.concatenate(
            (sent[4 * unit : 5 * unit], sent[: 2 * unit], sent[6 * unit : 7 * unit])
        )
        expected[5 * unit :], expected[unit : 2 * unit] = order[: 3 * unit], order[3 * unit :]
        self._finish(self._messages.receive_runs(two, 7), three, 7).raise_failure(
            "a message of runs"
        )
        if not (received == expected).all():
            raise TransportUnavailable(f"a message of {4 * unit} bytes in 3 runs did not arrive")
        received[:] = 0
        small = _parts(received, (unit, unit), (4 * unit, unit))
        self._expect(self._finish(self._messages.receive_runs(small, 8), three, 8), _TRUNCATED)
        withdrawn = self._messages.receive_runs(two, 9)
        withdrawn.cancel()
        self._expect(withdrawn, _CANCELED)
        if received.any():
            raise TransportUnavailable("a receive that failed was written to")

    def _finish(self, receive: RunsRequest, runs: Runs, tag: int) -> RunsRequest:
        send = self._messages.send_runs(self._endpoint, runs, tag)
        for _ in range(_ATTEMPTS):
            if send.done and receive.done:
                return receive
            self._worker.progress_once()
        receive.cancel()
        _UNDELIVERED.append((send, receive, *self._arrays))
        raise TransportUnavailable("a message of runs does not arrive")

    @staticmethod
    def _expect(request: RunsRequest, status: int) -> None:
        if not request.done or request.status != status:
            raise TransportUnavailable(f"status {request.status}, expected {status}")


def _parts(array: Any, *parts: tuple[int, int]) -> Runs:
    base = array.ctypes.data
    return Runs(
        np.array([base + at for at, _ in parts], dtype=np.uint64),
        np.array([nbytes for _, nbytes in parts], dtype=np.uint64),
    )
