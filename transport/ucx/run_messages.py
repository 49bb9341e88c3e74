"""Messages made of runs: UCX sends and receives scattered memory without a copy of ours.

UCXX sends one buffer per message, UCX itself a list of them (``UCP_DATATYPE_IOV``).  So a few
functions of UCX are called directly, on UCXX's worker and endpoints:

    lender's runs   ██  ██████ ███          one message          ████ ███████   reader's runs
                    └───┴──────┴─► ucp_tag_send_nbx ──► ucp_tag_recv_nbx ─► ┴────┘

Layouts and numbers are those of ``ucp/api/ucp.h`` and ``ucs/type/status.h`` of UCX 1.21;
``transport.ucx.selftest`` checks them before use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from transport.errors import TransportError, TransportUnavailable
from transport.types import U64
from transport.ucx.library import UcxLibrary
from transport.ucx.pieces import Runs

_OK, _IN_PROGRESS = 0, 1
_LAST_ERROR = -100
"""A pointer whose signed value is in [-100, -1] is a status, and no request."""

_POINTERS = 1 << 64
_FIELD_DATATYPE = 1 << 3
_DATATYPE_IOV = 2
_ALL_BITS = (1 << 64) - 1
_OLDEST = (1, 19, 0)


class RequestParam(ctypes.Structure):
    """``ucp_request_param_t``; UCX reads the fields that ``op_attr_mask`` names."""

    _fields_ = (
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", ctypes.c_void_p),
        ("cb", ctypes.c_void_p),
        ("datatype", ctypes.c_uint64),
        ("user_data", ctypes.c_void_p),
        ("reply_buffer", ctypes.c_void_p),
        ("memory_type", ctypes.c_int),
        ("recv_info", ctypes.c_void_p),
        ("memh", ctypes.c_void_p),
    )


def iov(runs: Runs) -> U64:
    """``runs`` as an array of ``ucp_dt_iov_t``: uint64 of shape (n, 2), address and length."""
    # UCX selects a protocol once for each n, which takes some ms: so n is the next power of two,
    # and the additional runs are empty, at a registered address.
    count = len(runs.nbytes)
    array = np.zeros((1 << (count - 1).bit_length(), 2), dtype=np.uint64)
    array[:, 0] = runs.addresses[-1]
    array[:count, 0], array[:count, 1] = runs.addresses, runs.nbytes
    return array


class UcpCalls:
    """UCX's functions, as UCXX has loaded them.

    Args:
        param: the layout of ``ucp_request_param_t``.
        iov: makes an array of ``ucp_dt_iov_t``.

    Raises:
        TransportUnavailable: they are missing, or of another version than UCXX reports.
    """

    def __init__(
        self,
        library: UcxLibrary,
        param: type[ctypes.Structure] = RequestParam,
        iov: Callable[[Runs], U64] = iov,
    ) -> None:
        self.library, self.iov = library, iov
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
        status = ctypes.c_int8  # the enumeration is packed
        try:
            # In UCXX's module they are those of the UCX that UCXX uses, whatever else is loaded.
            # Posting releases the interpreter's lock (CDLL): it takes 25 µs over TCP, but some ms
            # when UCX selects a protocol or registers memory.  Testing a request keeps the lock
            # (PyDLL), which takes less time than releasing it.
            found, posting = ctypes.PyDLL(library.api.__file__), ctypes.CDLL(library.api.__file__)
            _check_version(found, library.ucx_version)
            self.send = _function(
                posting.ucp_tag_send_nbx, pointer, pointer, pointer, size, number, pointer
            )
            self.receive = _function(
                posting.ucp_tag_recv_nbx, pointer, pointer, pointer, size, number, number, pointer
            )
            self.status = _function(found.ucp_request_check_status, status, pointer)
            self.cancel = _function(found.ucp_request_cancel, None, pointer, pointer)
            self.free = _function(found.ucp_request_free, None, pointer)
            self._text = _function(found.ucs_status_string, ctypes.c_char_p, status)
        except (AttributeError, OSError) as error:
            raise TransportUnavailable(f"UCX's functions are not found: {error}") from error
        self._param = param(op_attr_mask=_FIELD_DATATYPE, datatype=_DATATYPE_IOV)
        self.param = ctypes.addressof(self._param)

    def failure(self, status: int, doing: str) -> TransportError:
        """``PeerLost`` or ``BackendFailure`` for a failed request's ``ucs_status_t``."""
        return self.library.failure(status, f"{doing}: {self._text(status).decode()}")


class RunsRequest:
    """A message of runs in flight; their memory is in use until ``done``."""

    __slots__ = ("_calls", "_iov", "_pointer", "_status", "_worker")

    def __init__(self, calls: UcpCalls, worker: int, pointer: int | None, iov: U64) -> None:
        self._calls, self._worker = calls, worker
        self._pointer = pointer
        self._iov = iov  # UCX reads it until the request is done
        self._status = _OK

    @property
    def done(self) -> bool:
        """Whether UCX no longer reads or writes the runs."""
        if self._pointer is not None:
            status = self._calls.status(self._pointer)
            if status == _IN_PROGRESS:
                return False
            self._calls.free(self._pointer)
            self._pointer, self._status = None, status
        return True

    def cancel(self) -> None:
        """Cancel a receive that no message was matched with; it is done then.

        Any other request ends with its message or its connection.
        """
        if self._pointer is not None:
            self._calls.cancel(self._worker, self._pointer)

    @property
    def status(self) -> int:
        """Its ``ucs_status_t``, once it is ``done``; 0 on success."""
        return self._status

    def raise_failure(self, doing: str) -> None:
        """Raise if the request has failed, once it is ``done``.

        Raises:
            PeerLost, BackendFailure: it has failed.
        """
        if self._status != _OK:
            raise self._calls.failure(self._status, doing)


class RunsMessages:
    """Sends and receives messages of runs on one worker, given by its handle."""

    def __init__(self, calls: UcpCalls, worker: int) -> None:
        self._calls, self._worker = calls, worker

    def send_runs(self, endpoint: int, runs: Runs, tag: int) -> RunsRequest:
        """Start sending ``runs`` as one message, over the endpoint with this handle.

        Raises:
            PeerLost, BackendFailure: it failed at once; UCX does not use the runs.
        """
        calls, array = self._calls, self._calls.iov(runs)
        answer = calls.send(endpoint, array.ctypes.data, len(array), tag, calls.param)
        return self._request(answer, array, "send")

    def receive_runs(self, runs: Runs, tag: int) -> RunsRequest:
        """Post a receive into ``runs`` for a message tagged ``tag`` of at most their size.

        Raises:
            PeerLost, BackendFailure: it failed at once; UCX does not use the runs.
        """
        calls, array = self._calls, self._calls.iov(runs)
        answer = calls.receive(
            self._worker, array.ctypes.data, len(array), tag, _ALL_BITS, calls.param
        )
        return self._request(answer, array, "receive")

    def _request(self, answer: int | None, array: U64, doing: str) -> RunsRequest:
        status = 0 if answer is None else answer - _POINTERS
        if _LAST_ERROR <= status < 0:
            raise self._calls.failure(status, doing)
        return RunsRequest(self._calls, self._worker, answer, array)


def _check_version(found: ctypes.PyDLL, expected: str) -> None:
    numbers = [ctypes.c_uint() for _ in range(3)]
    _function(found.ucp_get_version, None, *[ctypes.POINTER(ctypes.c_uint)] * 3)(
        *map(ctypes.byref, numbers)
    )
    version = tuple(number.value for number in numbers)
    if ".".join(map(str, version)) != expected:
        raise TransportUnavailable(f"UCX {version} is found beside UCXX's, which is {expected}")
    if not _OLDEST <= version < (2, 0, 0):
        raise TransportUnavailable(f"UCX {expected}: pdconn knows the layouts of 1.19 to 1.x")


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
