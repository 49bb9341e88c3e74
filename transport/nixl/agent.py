"""One NIXL agent, with workarounds for NIXL 1.5.1 at the lines that need them.

This module does not import nixl: ``transport.nixl.transport`` does, and passes it in.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from transport.errors import BackendFailure, TransportError, TransportUnavailable
from transport.nixl.agent_errors import (
    INVALIDATED,
    UNLOADABLE,
    UNREGISTERED,
    as_ours,
    error_classes,
    mapper,
)
from transport.types import U64, Device, Memory, Spans

_log = logging.getLogger(__name__)

_SEGMENTS = {"cpu": "DRAM", "cuda": "VRAM"}
_OURS = "NIXL_INIT_AGENT"

Progress = Literal["pending", "done"]
Backends = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class NixlLibrary:
    """The two modules of the nixl package that are needed."""

    api: Any
    bindings: Any
    version: str


@dataclass(slots=True)
class Transfer:
    """A READ that was prepared, and perhaps posted; its handles are released exactly once."""

    peer: str
    request: Any
    handles: tuple[Any, ...] = field(repr=False)


class Agent:
    """A NIXL agent called ``name``, with ``backends`` by name and their options.

    Raises:
        TransportUnavailable: a backend is missing or does not start.
    """

    def __init__(
        self,
        library: NixlLibrary,
        name: str,
        backends: Backends,
        *,
        progress_delay_us: int,
    ) -> None:
        self.name = name
        self._errors = error_classes(library.bindings)
        self._mapped = mapper(self._errors)
        self._backends = list(backends)
        self._regions: list[Any] = []
        with self._mapped(f"create agent {name}"):
            self._raw: Any = _bare_agent(library, name, progress_delay_us)
        for backend, options in backends.items():
            self._start(backend, dict(options))

    def register_memory(self, memory: Memory) -> None:
        """Pin one memory as one region.

        Raises:
            BackendFailure: NIXL refused it.
        """
        row = (memory.base, memory.nbytes, memory.device.index, "")
        with self._mapped(f"register {memory}"):
            region = self._raw.register_memory([row], _SEGMENTS[memory.device.kind], self._backends)
        self._regions.append(region)

    def unregister_newest(self) -> None:
        """Undo the last :meth:`register_memory`.

        A failure is logged: closing the agent unpins the region anyway.
        """
        try:
            self._raw.deregister_memory(self._regions.pop())
        except self._errors:
            _log.exception(
                "pdconn: nixl did not deregister a region; it stays pinned until the agent closes "
                "agent=%s",
                self.name,
            )

    def metadata(self) -> bytes:
        """For a peer's :meth:`add_peer`: how to connect, and the regions registered so far."""
        with self._mapped("get metadata"):
            return bytes(self._raw.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Add a peer, or newly registered regions of a known one; returns its name.

        Damaged metadata of a known agent makes NIXL forget that agent: check them before.

        Raises:
            ChangedConnection: a known peer was restarted; remove it first.
            BadAddress: the metadata cannot be used.
        """
        with self._mapped("load a peer's metadata", UNLOADABLE):
            name = self._raw.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, peer: str) -> None:
        """Remove a peer.  No READ from it may be in flight: NIXL could not report its end."""
        with self._mapped(f"remove {peer}"):
            self._raw.remove_remote_agent(peer)

    def prepare(self, peer: str, spans: Spans) -> Transfer:
        """Prepare a READ; nothing is moved yet.

        Raises:
            OutOfBounds: a run lies in no registered memory, ours or the peer's.
            PeerLost: NIXL has dropped the peer by itself.
            BackendFailure: anything else.
        """
        try:
            # NIXL does not check arrays: an empty one raises IndexError, one of another shape gives
            # None, floats are rounded.  ``Spans`` is checked, and these are uint64, C-contiguous.
            rows = np.empty((2, len(spans), 3), dtype=np.uint64)  # both sides at once: fewer calls
            rows[0, :, 0], rows[1, :, 0], rows[:, :, 1] = spans.local, spans.remote, spans.nbytes
            rows[0, :, 2], rows[1, :, 2] = spans.local_device.index, spans.remote_device.index
            ours = self._listed(rows[0], spans.local_device)
            theirs = self._listed(rows[1], spans.remote_device)
            request = self._raw.initialize_xfer("READ", ours, theirs, peer, backends=self._backends)
        except self._errors:
            return self._prepare_by_steps(peer, spans)
        return Transfer(peer, request, (request,))

    def _prepare_by_steps(self, peer: str, spans: Spans) -> Transfer:
        """Prepare a READ that has failed in one step; the error names the side that is wrong."""
        # Three times as slow as in one step: 0.34 against 0.12 ms for 2057 runs.
        indices = np.arange(len(spans), dtype=np.int32)
        handles = ExitStack()
        try:
            with self._mapped("local runs", UNREGISTERED):
                local = self._side(_OURS, spans.local, spans.nbytes, spans.local_device)
            handles.callback(self._release, local)
            known = self._raw.check_remote_metadata(peer)
            with self._mapped(f"remote runs, by {peer}", UNREGISTERED if known else INVALIDATED):
                remote = self._side(peer, spans.remote, spans.nbytes, spans.remote_device)
            handles.callback(self._release, remote)
            with self._mapped(f"prepare a read from {peer}", INVALIDATED):
                request = self._raw.make_prepped_xfer(
                    "READ", local, indices, remote, indices, backends=self._backends
                )
        except TransportError:
            handles.close()
            raise
        return Transfer(peer, request, (local, remote, request))

    def post_transfer(self, transfer: Transfer) -> Progress:
        """Post a prepared READ; over shared memory it has ended when this returns.

        Raises:
            PeerLost: the connection is gone; nothing can be written.
            BackendFailure: anything else; runs posted before the bad one may be in flight.
        """
        try:
            return _progress(self._raw.transfer(transfer.request))
        except self._errors as error:
            raise as_ours(error, f"read from {transfer.peer}", INVALIDATED) from error

    def check_transfer(self, transfer: Transfer) -> Progress:
        """Whether a posted READ has ended.

        Raises:
            PeerLost, BackendFailure: it has failed.
        """
        try:
            return _progress(self._raw.check_xfer_state(transfer.request))
        except self._errors as error:
            raise as_ours(error, f"read from {transfer.peer}", INVALIDATED) from error

    def release_transfer(self, transfer: Transfer) -> None:
        """Release NIXL's handles of a READ that has ended.  Releasing does not cancel a READ."""
        for handle in reversed(transfer.handles):
            self._release(handle)

    def close(self) -> None:
        """Unregister everything and end the progress thread.  No READ may be in flight."""
        while self._regions:
            self.unregister_newest()
        self._raw = None

    def _start(self, backend: str, options: dict[str, str]) -> None:
        plugins = self._raw.get_plugin_list()
        if backend not in plugins:
            raise TransportUnavailable(f"nixl has no plugin {backend!r}, only {', '.join(plugins)}")
        try:
            self._raw.create_backend(backend, options)
        except self._errors as error:
            raise TransportUnavailable(
                f"nixl cannot start {backend} with {options}: {error}"
            ) from error

    def _listed(self, rows: U64, device: Device) -> Any:
        return self._raw.get_xfer_descs(rows, _SEGMENTS[device.kind])

    def _side(self, agent: str, addresses: U64, nbytes: U64, device: Device) -> Any:
        rows = _rows(addresses, nbytes, device)
        return self._raw.prep_xfer_dlist(agent, rows, _SEGMENTS[device.kind], self._backends)

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except self._errors as error:
            _log.warning("pdconn: nixl did not release %r: %s agent=%s", handle, error, self.name)


def _bare_agent(library: NixlLibrary, name: str, progress_delay_us: int) -> Any:
    """A nixl_agent without backends whose progress thread sleeps between events."""
    # nixl_agent fixes the delay of its progress thread at 0, with which it spins (65 to 99 % of a
    # core while idle).  So its inner agent is replaced, before it has a backend.  With a delay the
    # thread still wakes for events at once; the delay bounds the cost of a missed event.
    empty = library.api.nixl_agent_config(enable_prog_thread=False, backends=[])
    raw = library.api.nixl_agent(name, empty)
    config = library.bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = progress_delay_us
    # Our thread and the progress thread use the same UCX worker.
    config.syncMode = library.bindings.NIXL_THREAD_SYNC_STRICT
    raw.agent = library.bindings.nixlAgent(name, config)
    return raw


def _rows(addresses: U64, nbytes: U64, device: Device) -> U64:
    """NIXL's descriptors: shape (n, 3), with address, bytes and device."""
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device.index
    return rows


def _progress(state: str) -> Progress:
    if state not in ("DONE", "PROC"):
        raise BackendFailure(f"nixl reports state {state!r} and no error")
    return "done" if state == "DONE" else "pending"
