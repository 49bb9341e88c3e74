"""One NIXL agent, with what is peculiar about it kept in one place.

Each oddity that the code below answers to was measured on NIXL 1.5.1:

* The stock agent's progress thread spins (65 to 99 % of a core while idle), as
  its delay is fixed at 0.  The delay can be set on the inner agent, so the inner
  agent is replaced before it has a backend.  A thread with a delay still wakes
  for events at once; the delay bounds what a missed event costs.
* Unchecked arguments: an empty array raises IndexError, one of the wrong shape
  gives None, float indices are rounded.  ``Spans`` is checked already and the
  arrays are built here, from columns, always uint64 and C-contiguous.
* Neighbouring descriptors merge in ``make_prepped_xfer`` and only there.
* Errors are exceptions without a common base class.
* Loading damaged metadata of a known agent makes NIXL forget that agent, which
  is why addresses carry a checksum.

Nothing here imports nixl: ``transport.nixl`` does and passes the modules in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from transport.errors import (
    BackendFailure,
    BadAddress,
    OutOfBounds,
    PeerLost,
    PeerUnknown,
    TransportError,
    TransportUnavailable,
)
from transport.types import U64, Device, Memory, Spans

_log = logging.getLogger(__name__)

_SEGMENTS = {"cpu": "DRAM", "cuda": "VRAM"}
_OURS = "NIXL_INIT_AGENT"

Progress = Literal["pending", "done"]


@dataclass(frozen=True, slots=True)
class Library:
    """The two modules of the nixl package that are needed."""

    api: Any
    bindings: Any
    version: str


@dataclass(slots=True)
class Transfer:
    """A READ that was prepared, and perhaps posted; released exactly once."""

    peer: str
    request: Any
    handles: ExitStack = field(repr=False)

    def release(self) -> None:
        """Give back NIXL's handles.  The READ must have ended: releasing cancels nothing."""
        self.handles.close()


@dataclass(frozen=True, slots=True)
class Telemetry:
    """NIXL's own account of one finished READ; ``num_descriptors`` is after merging."""

    num_descriptors: int
    post_s: float
    transfer_s: float


class Agent:
    """A NIXL agent called ``name`` with the given backends and their options."""

    def __init__(
        self,
        library: Library,
        name: str,
        backends: Mapping[str, Mapping[str, str]],
        *,
        progress_delay_us: int,
        telemetry: bool,
    ) -> None:
        self.name = name
        self._library = library
        self._errors = _error_classes(library.bindings)
        self._regions: list[Any] = []
        self._raw: Any = self._create(backends, progress_delay_us, telemetry)
        self._backends = list(backends)

    def register(self, memory: Memory) -> None:
        """Pin one memory as one region.

        Raises:
            BackendFailure: NIXL refused it.
        """
        row = (memory.base, memory.nbytes, memory.device.index, "")
        with self._mapped(f"register {memory}"):
            region = self._raw.register_memory([row], _SEGMENTS[memory.device.kind], self._backends)
        self._regions.append(region)

    def unregister_newest(self) -> None:
        """Take back the latest ``register``."""
        with self._mapped("unregister"):
            self._raw.deregister_memory(self._regions.pop())

    def metadata(self) -> bytes:
        """What a peer's ``add`` needs: how to connect, and the regions of this moment."""
        with self._mapped("get metadata"):
            return bytes(self._raw.get_agent_metadata())

    def add(self, metadata: bytes) -> str:
        """Learn a peer, or newly registered regions of a known one; returns its name.

        Raises:
            BadAddress: NIXL cannot read it, or it was made by another boot of a known peer.
            BackendFailure: anything else.
        """
        refusals = {
            kind: BadAddress
            for kind in ("nixlMismatchError", "nixlNotAllowedError", "nixlInvalidParamError")
        }
        with self._mapped("load a peer's metadata", refusals):
            name = self._raw.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, peer: str) -> None:
        """Forget a peer.  No READ from it may be in flight: its end could not be seen."""
        with self._mapped(f"remove {peer}"):
            self._raw.remove_remote_agent(peer)

    def prepare(self, peer: str, spans: Spans) -> Transfer:
        """Get a READ ready; nothing is moved yet.

        Raises:
            OutOfBounds: a run lies in no registered memory, ours or as the peer told us.
            PeerLost: NIXL dropped the peer on its own.
            BackendFailure: anything else.
        """
        indices = np.arange(len(spans), dtype=np.int32)
        outside = {"nixlNotFoundError": OutOfBounds}
        with ExitStack() as handles:
            with self._mapped("local runs", outside):
                local = self._side(_OURS, spans.local, spans.nbytes, spans.local_device)
            handles.callback(self._release, local)
            gone = outside if self._raw.check_remote_metadata(peer) else _INVALIDATED
            with self._mapped(f"runs of {peer}", gone):
                remote = self._side(peer, spans.remote, spans.nbytes, spans.remote_device)
            handles.callback(self._release, remote)
            with self._mapped(f"prepare a read from {peer}", _INVALIDATED):
                request = self._raw.make_prepped_xfer(
                    "READ", local, indices, remote, indices, backends=self._backends
                )
            handles.callback(self._release, request)
            return Transfer(peer, request, handles.pop_all())
        raise AssertionError("unreachable: ExitStack swallows nothing")

    def post(self, transfer: Transfer) -> Progress:
        """Start a prepared READ; over shared memory it is over when this returns.

        Raises:
            PeerLost: the connection is gone; nothing can be written.
            BackendFailure: anything else; earlier runs may be on their way.
        """
        with self._mapped(f"read from {transfer.peer}", _INVALIDATED):
            return self._progress(self._raw.transfer(transfer.request))

    def check(self, transfer: Transfer) -> Progress:
        """Whether a posted READ is over.

        Raises:
            PeerLost, BackendFailure: it is over, and failed.
        """
        with self._mapped(f"read from {transfer.peer}", _INVALIDATED):
            return self._progress(self._raw.check_xfer_state(transfer.request))

    def telemetry(self, transfer: Transfer) -> Telemetry | None:
        """What a READ that is done cost, or None where telemetry is off."""
        try:
            seen = self._raw.get_xfer_telemetry(transfer.request)
        except self._errors:
            return None
        return Telemetry(int(seen.descCount), seen.postDuration / 1e6, seen.xferDuration / 1e6)

    def close(self) -> None:
        """Unregister everything and end the progress thread.  No READ may be in flight."""
        while self._regions:
            try:
                self.unregister_newest()
            except TransportError:
                _log.exception("%s: a region stays registered until the agent is gone", self.name)
        self._raw = None

    def _create(
        self, backends: Mapping[str, Mapping[str, str]], progress_delay_us: int, telemetry: bool
    ) -> Any:
        api, bindings = self._library.api, self._library.bindings
        with self._mapped(f"create agent {self.name}"):
            bare = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            raw = api.nixl_agent(self.name, bare)
            config = bindings.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = progress_delay_us
            config.captureTelemetry = telemetry
            config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
            raw.agent = bindings.nixlAgent(self.name, config)
        for backend, options in backends.items():
            if backend not in raw.get_plugin_list():
                known = ", ".join(raw.get_plugin_list())
                raise TransportUnavailable(f"nixl has no plugin {backend!r}; it has {known}")
            try:
                raw.create_backend(backend, dict(options))
            except self._errors as error:
                raise TransportUnavailable(
                    f"nixl cannot start {backend} with {dict(options)}: {error}"
                ) from error
        return raw

    def _side(self, agent: str, addresses: U64, nbytes: U64, device: Device) -> Any:
        rows = np.empty((len(addresses), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device.index
        return self._raw.prep_xfer_dlist(agent, rows, _SEGMENTS[device.kind], self._backends)

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except self._errors as error:
            _log.warning("%s: nixl did not release %r: %s", self.name, handle, error)

    def _progress(self, state: str) -> Progress:
        if state not in ("DONE", "PROC"):
            raise BackendFailure(f"nixl reports state {state!r} without a reason")
        return "done" if state == "DONE" else "pending"

    @contextmanager
    def _mapped(
        self, doing: str, kinds: Mapping[str, type[TransportError]] | None = None
    ) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            name = type(error).__name__
            kind = {"nixlRemoteDisconnectError": PeerLost, **(kinds or {})}.get(name)
            raise (kind or BackendFailure)(f"{doing}: {name}: {error}") from error


_INVALIDATED: Mapping[str, type[TransportError]] = {"nixlNotFoundError": PeerLost}
"""Newer NIXL forgets a peer by itself once one READ finds it disconnected; its
other READs then answer "not found".  They are over: one endpoint carried all."""


def _error_classes(bindings: Any) -> tuple[type[Exception], ...]:
    """Every exception NIXL raises for failures, as there is no base class to catch.

    RuntimeError stands for statuses without a class, ValueError for refused arguments.
    """
    own = tuple(
        value
        for name, value in vars(bindings).items()
        if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
    )
    return (*own, RuntimeError, ValueError)
