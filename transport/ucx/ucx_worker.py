"""One UCX worker and its connections, for the transport's own thread alone.

A message with a posted receive lands in the runs given to ``receive_runs``, which are in use until
the request is completed.  UCX completes a cancelled request only when it does not touch the runs
any more; a request that was matched with a message is not cancelled, it ends with its connection.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transport.errors import PeerLost, TransportUnavailable
from transport.ucx.control import MAX_FRAME_BYTES
from transport.ucx.library import UcxLibrary
from transport.ucx.pieces import Runs
from transport.ucx.run_messages import RunsMessages, RunsRequest
from transport.ucx.selftest import runs_calls

Bytes = NDArray[np.uint8]

FRAME_TAG = 0x7064636F6E6E
"""Tags all frames; tags of data have their highest bit set."""

_MAX_INCOMING = 64
"""Frames announced but not sent yet; ours are never announced, so these are attacks or bugs."""

_MAX_DRAIN = 256

_NO_CACHE = (
    "UCX does not start with a registration cache, without which this process would crash when "
    "a peer dies; unset UCX_MEM_EVENTS, UCX_MEM_MMAP_HOOK_MODE and other settings that disable its "
    "memory hooks, and load no other UCX, such as NIXL's, in the same process"
)


class UcxRequest:
    """A message of one buffer in flight; ``array`` is in use until ``done``."""

    __slots__ = ("_library", "_raw", "array")

    def __init__(self, library: UcxLibrary, raw: Any, array: Bytes) -> None:
        self._library, self._raw, self.array = library, raw, array

    @property
    def done(self) -> bool:
        """Whether UCX no longer reads or writes ``array``."""
        return bool(self._raw.completed)


class Endpoint:
    """A connection to one peer's worker."""

    def __init__(self, library: UcxLibrary, messages: RunsMessages, endpoint: Any) -> None:
        self._library = library
        self._messages = messages
        self._endpoint = endpoint
        self._handle = int(endpoint.handle)

    @property
    def alive(self) -> bool:
        """Whether the connection can be used; once False it stays False."""
        return self._endpoint is not None and bool(self._endpoint.alive)

    def send_array(self, array: Bytes, tag: int) -> UcxRequest:
        """Start sending ``array``, which may be empty, as one message."""
        with self._library.mapped("send"):
            api = self._library.api
            raw = self._endpoint.tag_send(self._library.array(array), api.UCXXTag(tag))
        return UcxRequest(self._library, raw, array)

    def send_runs(self, runs: Runs, tag: int) -> RunsRequest:
        """Start sending ``runs`` as one message.

        Raises:
            PeerLost, BackendFailure: the connection broke or was closed, or UCX refused.
        """
        if self._endpoint is None:
            raise PeerLost("send: the connection is closed")
        return self._messages.send_runs(self._handle, runs, tag)

    def close(self) -> None:
        """Close the connection at once, whatever the peer does; its requests end soon."""
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            with self._library.mapped("close"):
                endpoint.close_blocking(0, 1)


class UcxWorker:
    """Our worker.  ``wake_fd``: an eventfd that ends ``wait`` when it is written to.

    Raises:
        TransportUnavailable, BackendFailure: UCX does not start with these options, or its
            functions are not those expected.
    """

    def __init__(self, library: UcxLibrary, options: Mapping[str, str], wake_fd: int) -> None:
        self._library = library
        api = library.api
        features = (api.Feature.TAG, api.Feature.WAKEUP)
        with library.mapped(f"start UCX with {dict(options)}"):
            try:
                self._context = api.UCXContext(dict(options), features)
            except api.UCXUnsupportedError as error:
                raise TransportUnavailable(f"{_NO_CACHE}: {error}") from error
            self._worker = api.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            self._messages = RunsMessages(runs_calls(library), int(self._worker.handle))
            self.address: bytes = self._worker.address.tobytes()
        self.config: dict[str, str] = dict(self._context.config)
        self._any = (api.UCXXTag(0), api.UCXXTagMask(0))
        self._discard = library.array(np.empty(1, dtype=np.uint8))
        self._incoming: list[UcxRequest] = []
        self._wake_fd = wake_fd
        self._events = select.epoll()
        self._events.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._events.register(wake_fd, select.EPOLLIN)

    def connect(self, worker_address: bytes) -> Endpoint:
        """Connect to a worker.  UCX does not check the address: it must come from a trusted peer.

        Raises:
            PeerLost: no worker is there.
            BackendFailure: anything else.
        """
        with self._library.mapped("connect"):
            address = self._library.api.UCXAddress.create_from_buffer(worker_address)
            endpoint = self._worker.create_endpoint_from_worker_address(address, True)
            return Endpoint(self._library, self._messages, endpoint)

    def receive_runs(self, runs: Runs, tag: int) -> RunsRequest:
        """Post a receive into ``runs`` for a message tagged ``tag`` of at most their size."""
        return self._messages.receive_runs(runs, tag)

    def progress(self) -> bool:
        """Let UCX make progress; whether there was anything to do."""
        return bool(self._worker.progress_once())

    def cancel_lost(self) -> None:
        """Cancel the requests of connections that broke."""
        with self._library.mapped("cancel"):
            self._worker.cancel_inflight_requests(0, 1)

    def frames(self) -> Iterator[bytes]:
        """The frames among the next ``_MAX_DRAIN`` messages; other messages are dropped."""
        # Messages without a posted receive are taken off the worker at once, so that a foreign
        # process cannot fill our memory with messages that wait to be fetched.
        done: list[UcxRequest] = []
        for _ in range(_MAX_DRAIN):
            found = self._worker.tag_probe(*self._any, remove=True)
            if not found.matched:
                break
            request = self._take(found)
            if request is not None:
                self._incoming.append(request)
                if request.done:  # all but announced messages that were not sent yet
                    done.append(self._incoming.pop())
        done += [request for request in self._incoming if request.done]
        self._incoming = [request for request in self._incoming if not request.done]
        for request in done:
            yield request.array.tobytes()

    def wait_for_work(self, seconds: float) -> None:
        """Sleep until there is work, ``wake_fd`` is written to, or ``seconds`` have passed."""
        if self._worker.arm():
            self._events.poll(seconds)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def close(self) -> None:
        """Release everything.  All endpoints must be closed and all requests done."""
        self._events.close()
        self._incoming.clear()
        self._worker = None
        self._context = None

    def _take(self, found: Any) -> UcxRequest | None:
        """Take a message without a posted receive; None if it is not a frame."""
        is_frame = (
            int(found.sender_tag.value) == FRAME_TAG
            and found.length <= MAX_FRAME_BYTES
            and len(self._incoming) < _MAX_INCOMING
        )
        if not is_frame:  # UCX drops a message that is received into one byte
            self._worker.tag_recv_with_handle(self._discard, found)
            return None
        array = np.zeros(found.length, dtype=np.uint8)
        raw = self._worker.tag_recv_with_handle(self._library.array(array), found)
        return UcxRequest(self._library, raw, array)
