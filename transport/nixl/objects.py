"""Objects of an S3 bucket through NIXL's OBJ back end: writes whole objects, reads ranges of them.

NIXL moves bytes between registered memory and registered object keys, each with a device id of its
own.  It does not say why a request has failed: a missing object looks like a server that is down.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from transport.errors import BackendFailure, TransportUnavailable
from transport.nixl.agent_errors import error_classes, mapper
from transport.nixl.transport import load_library

_BACKEND = "OBJ"
_NAP_S, _LONGEST_NAP_S = 100e-6, 2e-3
_AT_ONCE = 4 << 20
"""Bytes that one connection reads; larger ranges are read over several."""
_LEAST_RATE = 4 << 20
"""Bytes per second; a slower transfer is given up."""
_FEW_TRIES = {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "2"}
"""For the client library, which reads them when it is created; the user's settings take precedence.

By default it tries ten times: for half a minute where nothing listens, for two where nothing
answers."""

Move = tuple[str, int, int, int]
"""Key, offset in the object, offset in our memory, bytes."""

_environment = threading.Lock()
_hanging: list[Any] = []
"""Agents with requests that have not ended: releasing one would wait for them."""


class NixlObjects:
    """One agent with the OBJ back end, for one bucket.  One thread.

    Args:
        options: parameters of the back end: ``bucket``, ``endpoint_override``, ``access_key``, …
        wait_s: how long a transfer may take, besides a second for every 4 MiB.

    Raises:
        TransportUnavailable: NIXL is missing, or its back end does not load.
        TransportError: its back end cannot be created.
    """

    def __init__(self, name: str, options: Mapping[str, str], wait_s: float = 20.0) -> None:
        library = load_library()
        self._name, self._wait_s = name, wait_s
        self._mapped = mapper(error_classes(library.bindings))
        self._numbers = itertools.count(1)
        self._memory = mmap.mmap(-1, _AT_ONCE)
        self._stuck: list[_Request] = []
        # NIXL lists plugins by their files, so one that does not load fails only here: that of
        # nixl-cu13 1.5.1 needs libcuobjclient.so.1 of NVIDIA's cuObject, which no wheel has.
        unloadable = {"nixlNotFoundError": TransportUnavailable}
        with self._mapped(f"load nixl's plugin {_BACKEND}", unloadable), _few_tries():
            empty = library.api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._raw: Any = library.api.nixl_agent(name, empty)
            self._raw.create_backend(_BACKEND, dict(options))

    def put_object(self, key: str, pieces: Sequence[memoryview]) -> None:
        """Write an object that consists of all pieces, or replace it.

        Raises:
            BackendFailure: it may not have been written.
        """
        nbytes = sum(map(len, pieces))
        memory = self._room(nbytes)
        at = 0
        for piece in pieces:
            memory[at : at + len(piece)] = piece
            at += len(piece)
        self._transfer("WRITE", [(key, 0, 0, nbytes)])

    def read_ranges(self, reads: Sequence[tuple[str, int, memoryview]]) -> None:
        """Fill each buffer from its offset in an object.

        Raises:
            BackendFailure: an object is missing, or was not read in time.
        """
        memory = self._room(sum(len(into) for _, _, into in reads))
        # NIXL reports no error for an object that is too short: the rest would be old bytes.
        ctypes.memset(_address(self._memory), 0, len(memory))
        self._transfer("READ", _moves(reads))
        at = 0
        for _, _, into in reads:
            into[:] = memory[at : at + len(into)]
            at += len(into)

    def close(self) -> None:
        """Release the agent, unless it has requests that hang."""
        self._stuck = [request for request in self._stuck if not self._is_over(request)]
        if self._stuck:
            _hanging.append((self._raw, self._stuck))
        self._raw = None

    def _room(self, nbytes: int) -> memoryview:
        if nbytes > len(self._memory):
            self._memory = mmap.mmap(-1, nbytes)
        return memoryview(self._memory)[:nbytes]

    def _transfer(self, kind: Literal["READ", "WRITE"], moves: Sequence[Move]) -> None:
        if not moves:
            return
        if self._raw is None:
            raise BackendFailure("expected an open agent, got one that was closed")
        self._stuck = [request for request in self._stuck if not self._is_over(request)]
        # A request that hangs cannot be cancelled and goes on using its memory.  So bytes go
        # through memory of ours, which a request keeps if it does not end in time.
        base = _address(self._memory)
        memory = [(base + at, nbytes, 0, "") for _, _, at, nbytes in moves]
        objects = [(start, nbytes, next(self._numbers), key) for key, start, _, nbytes in moves]
        request = _Request(self._memory)
        is_over = False
        with self._mapped(f"{kind.lower()} {moves[0][0]}"):
            try:
                for rows, segment in ((memory, "DRAM"), (objects, "OBJ")):
                    request.regions.append(self._raw.register_memory(rows, segment, [_BACKEND]))
                ours, theirs = (region.trim() for region in request.regions)
                request.handle = self._raw.initialize_xfer(
                    kind, ours, theirs, self._name, b"", [_BACKEND]
                )
                nbytes = sum(move[3] for move in moves)
                is_over = self._wait(request, self._wait_s + nbytes / _LEAST_RATE)
            except BaseException:
                is_over = True  # NIXL returns an error only when all parts of a request have ended
                raise
            finally:
                if is_over:
                    self._release(request)
        if not is_over:
            self._stuck.append(request)
            self._memory = mmap.mmap(-1, _AT_ONCE)
            raise BackendFailure(f"{kind.lower()} {moves[0][0]}: no answer in {self._wait_s:.0f} s")

    def _wait(self, request: _Request, wait_s: float) -> bool:
        """Whether the request has succeeded in time.

        Raises:
            BackendFailure: it has failed.
        """
        until = time.monotonic() + wait_s
        nap_s = _NAP_S
        state = self._raw.transfer(request.handle)
        while state == "PROC":
            if time.monotonic() > until:
                return False
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
            state = self._raw.check_xfer_state(request.handle)
        if state != "DONE":
            raise BackendFailure(f"nixl ended a transfer of objects in state {state!r}")
        return True

    def _is_over(self, request: _Request) -> bool:
        """Whether a request that was given up has ended; it is released then."""
        try:
            with self._mapped("look at a request"):
                if self._raw.check_xfer_state(request.handle) == "PROC":
                    return False
        except BackendFailure:
            pass  # it has failed
        self._release(request)
        return True

    def _release(self, request: _Request) -> None:
        if request.handle is not None:
            self._raw.release_xfer_handle(request.handle)
        for region in reversed(request.regions):
            self._raw.deregister_memory(region, [_BACKEND])


def _moves(reads: Sequence[tuple[str, int, memoryview]]) -> list[Move]:
    """Moves for ``reads``, to consecutive memory: neighbours joined, large ones cut."""
    moves: list[Move] = []
    at = 0
    for key, offset, into in reads:
        for start in range(0, len(into), _AT_ONCE):
            nbytes = min(_AT_ONCE, len(into) - start)
            if moves:
                last, first, began, length = moves[-1]
                if last == key and first + length == offset + start and length + nbytes <= _AT_ONCE:
                    moves[-1] = (key, first, began, length + nbytes)
                    continue
            moves.append((key, offset + start, at + start, nbytes))
        at += len(into)
    return moves


class _Request:
    """The regions and the memory of one transfer."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.regions: list[Any] = []
        self.handle: Any = None


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


@contextmanager
def _few_tries() -> Iterator[None]:
    with _environment:
        ours = {name: value for name, value in _FEW_TRIES.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                del os.environ[name]
