"""The transport for real engines: one-sided READs over NIXL, by default over UCX.

``transport.nixl.agent`` wraps NIXL's agent, ``transport.nixl.agent_reads`` decides when a read has
settled.  This module connects and disconnects peers.  NIXL cannot report how a READ ends once its
peer was removed, so a peer with reads in flight is only marked as leaving, and removed with its
last read::

    connect ──► connected ──disconnect, idle──────────► removed
                  ▲   └──disconnect, reads in flight──► leaving ──last read over──► removed
                  └──────────connect again───────────────┘

This protects the lender, too.  Over TCP the lender answers READs in software, and UCX 1.23 aborts
the *lender's* process when it cannot send such an answer: a reader that is killed during a read
over TCP may crash its lender; a reader that closes first does not.  Over CMA or RDMA the lender
takes no part.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from transport.address import MAX_NAME_CHARS, pack, unpack
from transport.base import Transport
from transport.errors import (
    BackendFailure,
    BadAddress,
    PeerUnknown,
    TransportClosed,
    TransportError,
    TransportUnavailable,
)
from transport.hugepages import HugePages
from transport.nixl.agent import Agent, NixlLibrary
from transport.nixl.agent_errors import ChangedConnection
from transport.nixl.agent_options import (
    backend_params,
    restricted_to,
    ucx_environment,
    ucx_version,
)
from transport.nixl.agent_reads import REPOST_S, NixlPeer, Reads
from transport.nixl.builds import (
    installed_versions,
    missing_build,
    package_to_import,
    torch_cuda_major,
)
from transport.nixl.cuda import bind_thread
from transport.nixl.possible import possible_transports
from transport.nixl.progress import ProcessState, WorkerEvents, adaptive_progress
from transport.regions import Regions
from transport.types import HOST, Device, Memory, PeerId, ReadId, Settled, Spans

_log = logging.getLogger(__name__)

_BACKEND = "nixl"
_CLOSE_POLL_S = 0.001


def load_library() -> NixlLibrary:
    """Import nixl, without torch where torch is built without CUDA.

    Raises:
        TransportUnavailable: it is not installed, or does not load here.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # it logs every agent otherwise
    installed, cuda_major = installed_versions(), torch_cuda_major()
    package = package_to_import(installed, cuda_major, sys.modules)
    try:
        api = importlib.import_module(f"{package}._api")
        bindings = importlib.import_module(f"{package}._bindings")
    except (ImportError, OSError) as error:
        missing = missing_build(installed, cuda_major)
        remedy = "run pdconn doctor to find the cause"
        if missing is not None:
            remedy = f"install what is missing: pip install {missing}"
        raise TransportUnavailable(f"nixl cannot be imported: {error}; {remedy}") from error
    return NixlLibrary(api, bindings, installed.get("nixl", "unknown"))


class NixlTransport(Transport):
    """A NIXL agent with the name ``name`` and a suffix that differs at every boot.

    Args:
        backends: NIXL plugins to start.
        backend_options: parameters per backend, over our defaults (see ``agent_options``).
        progress_delay_us: how long NIXL's progress thread sleeps when no event
            wakes it, in steps of 1000; at 5000 it costs 1 % of a core.
        net_devices: network devices that UCX is restricted to, by UCX's names; any by default.
        drive_on: cores that NIXL's progress thread may occupy while reads over TCP are in
            flight; empty: none; None: any core, if there are two.
        huge_pages: back host memory with huge pages before it is registered,
            for at most ``huge_page_s`` seconds over the transport's life.
        close_wait_s: how long ``close`` waits for reads in flight.
        repost_s: how long to wait before a read that NIXL has accepted in part is posted again.
        boot: the suffix; random by default.
        bind: binds the calling thread, which connects or reads, to a GPU.

    Raises:
        TransportUnavailable: nixl or one of the backends cannot be used here.
        ValueError: an invalid option.
    """

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        backend_options: Mapping[str, Mapping[str, str]] | None = None,
        net_devices: Sequence[str] = (),
        progress_delay_us: int = 5000,
        drive_on: Collection[int] | None = None,
        huge_pages: bool = True,
        huge_page_s: float = 10.0,
        close_wait_s: float = 5.0,
        repost_s: float = REPOST_S,
        boot: str | None = None,
        library: NixlLibrary | None = None,
        bind: Callable[[Device], object] = bind_thread,
    ) -> None:
        agent_name = f"{name}-{boot or secrets.token_hex(4)}"
        if len(agent_name) > MAX_NAME_CHARS or not name:
            raise ValueError(f"name of {len(name)} characters; with its suffix 1 to 256 fit")
        if progress_delay_us < 1000:
            raise ValueError(
                f"progress_delay_us: expected at least 1000, got {progress_delay_us}: below it "
                "NIXL's progress thread spins"
            )
        shows = _log.isEnabledFor(logging.DEBUG)
        self._params = backend_params(backends, backend_options, show_transports=shows)
        self._library = library or load_library()
        self._settings = {"progress_delay_us": progress_delay_us}
        before = ProcessState.now()
        self._net_devices = tuple(net_devices)
        with restricted_to(self._net_devices):
            self._agent = Agent(
                self._library, agent_name, self._params, progress_delay_us=progress_delay_us
            )
        self._worker, self._drive_on = WorkerEvents.made_since(before), drive_on
        self._bind = bind
        self._bound: tuple[int, Device] | None = None
        self._has_connected = False
        self._registered = Regions()
        self._reads = Reads(self._agent, self._registered, time.perf_counter, repost_s=repost_s)
        self._peers: dict[PeerId, NixlPeer] = {}
        self._leaving: dict[PeerId, NixlPeer] = {}
        self._huge_pages = HugePages(huge_pages, huge_page_s)
        self._close_wait_s = close_wait_s
        self._state = "open"

    @property
    def name(self) -> str:
        return _BACKEND

    @property
    def peer_id(self) -> PeerId:
        """The name by which peers know this transport: its agent's."""
        return PeerId(self._agent.name)

    def register(self, memories: Sequence[Memory]) -> None:
        self._check_open()
        Regions([*self._registered, *memories])  # raises if two overlap
        done = 0
        try:
            for memory in memories:
                self._huge_pages.back_memory(memory)
                self._agent.register_memory(memory)
                done += 1
        except TransportError:
            for _ in range(done):
                self._agent.unregister_newest()
            raise
        self._registered.add_memories(memories)
        self._huge_pages.warn_of_small_pages(list(self._registered), self._agent.name)

    def address(self) -> bytes:
        self._check_open()
        return pack(_BACKEND, self._agent.name, self._agent.metadata())

    def connect(self, address: bytes) -> PeerId:
        """Make the peer at ``address`` readable; a newer address of a known peer replaces the old.

        Raises:
            BadAddress: the bytes are not the address of another NIXL agent that we can reach.
            BackendFailure: the peer was restarted under its old name, and earlier reads can still
                write; connect again once they have settled.
        """
        self._check_open()
        envelope = unpack(_BACKEND, address)
        peer_id = PeerId(envelope.name)
        if peer_id == self._agent.name:
            raise BadAddress(f"{peer_id} is this transport itself")
        self._bind_thread()
        self._log_transports()
        known = self._peers.get(peer_id) or self._leaving.get(peer_id)
        if known and known.lost:
            self._forget(known)
            known = None
        if known is None or known.metadata != envelope.payload:
            known = self._learn(known, peer_id, envelope.payload)
        self._leaving.pop(peer_id, None)
        self._peers[peer_id] = known
        return peer_id

    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer; its reads in flight settle once they can write no more."""
        theirs = self._peers.pop(peer, None)
        if theirs is not None:
            self._leaving[peer] = theirs
            self._reads.mark_disconnected(theirs)
            self._reads.advance(theirs)
            self._remove_left()

    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        self._check_open()
        if peer not in self._peers:
            raise PeerUnknown(f"{peer} is not connected to {self._agent.name}")
        if spans.local_device.kind == "cuda":
            self._bind_thread()
        return self._reads.start_read(self._peers[peer], spans)

    def poll(self, read: ReadId) -> Settled | None:
        settled = self._reads.poll_read(read)
        if self._leaving:
            self._remove_left()
        return settled

    @property
    def poll_pause_s(self) -> float:
        """The least pause between polls that does not slow down NIXL's progress thread."""
        return self._reads.progress.poll_pause_s

    def describe(self) -> dict[str, str]:
        facts = {
            "backend": _BACKEND,
            "agent": self._agent.name,
            "nixl": self._library.version,
            "ucx": ucx_version(),
            "huge_pages": self._huge_pages.describe_backing(self._registered),
            "progress": self._reads.progress.why,
            **{key: str(value) for key, value in self._settings.items()},
        }
        for backend, params in self._params.items():
            facts[backend] = ", ".join(f"{key}: {value}" for key, value in params.items())
        if self._net_devices:
            facts["net_devices"] = ",".join(self._net_devices)
        return {**facts, **ucx_environment()}

    def close(self) -> None:
        """Disconnect from all peers, wait for reads in flight, release everything.

        Raises:
            BackendFailure: reads can still write after ``close_wait_s``.  Memory stays registered
                and must stay allocated; reads can be polled, and ``close`` called again.
        """
        if self._state == "closed":
            return
        self._state = "closing"
        for peer in list(self._peers):
            self.disconnect(peer)
        self._reads.advance()
        deadline = time.monotonic() + self._close_wait_s
        while len(self._reads) and time.monotonic() < deadline:
            time.sleep(_CLOSE_POLL_S)
            self._reads.advance()
        self._remove_left()
        if len(self._reads):
            raise BackendFailure(
                f"{self._agent.name}: {len(self._reads)} reads from {', '.join(self._leaving)} "
                f"can still write after {self._close_wait_s} s; memory stays registered"
            )
        self._reads.forget_settled()
        self._reads.progress.close()
        self._agent.close()
        self._state = "closed"

    def _bind_thread(self) -> None:
        """Bind this thread to the GPU whose memory is registered, unless it is bound."""
        device = next((memory.device for memory in self._registered if memory.device != HOST), None)
        thread = threading.get_ident()
        if device is not None and self._bound != (thread, device):
            self._bind(device)
            self._bound = thread, device
            name = threading.current_thread().name
            _log.info("pdconn: bound to %s: thread=%s agent=%s", device, name, self._agent.name)

    def _log_transports(self) -> None:
        """Log once which transports UCX may use; called on the thread that connects."""
        if self._has_connected or "UCX" not in self._params:
            return
        self._has_connected = True
        found = possible_transports(self._params["UCX"], self._net_devices)
        self._reads.progress = adaptive_progress(self._worker, found, self._drive_on)
        name, listed = self._agent.name, ", ".join(found) or "unknown"
        _log.info("pdconn: UCX may connect by: %s agent=%s", listed, name)
        _log.info("pdconn: NIXL's progress thread %s agent=%s", self._reads.progress.why, name)
        on_gpu = any(memory.device != HOST for memory in self._registered)
        if on_gpu and found and not any(one.startswith("cuda_ipc/") for one in found):
            _log.warning(
                "pdconn: UCX has no cuda_ipc here: NVLink is not used between GPUs of one host "
                "agent=%s",
                name,
            )

    def _learn(self, known: NixlPeer | None, peer_id: PeerId, metadata: bytes) -> NixlPeer:
        """Load the metadata of a new, a restarted, or a known peer that has registered more."""
        try:
            self._load(peer_id, metadata)
        except ChangedConnection:
            if known is None:
                raise
            known.lost = True
            self._forget(known)
            self._load(peer_id, metadata)
            known = None
        if known is None:
            return NixlPeer(peer_id, metadata)
        known.metadata = metadata
        return known

    def _load(self, peer: PeerId, metadata: bytes) -> None:
        loaded = self._agent.add_peer(metadata)
        if loaded != peer:
            if loaded not in self._peers and loaded not in self._leaving:
                self._agent.remove_peer(loaded)
            raise BadAddress(f"address of {peer!r} holds metadata of {loaded!r}")

    def _forget(self, peer: NixlPeer) -> None:
        self._reads.mark_disconnected(peer)
        self._reads.advance(peer)
        if peer.reads:
            raise BackendFailure(
                f"{peer.id} was restarted, and {len(peer.reads)} reads from before can still write"
            )
        self._peers.pop(peer.id, None)
        self._leaving.pop(peer.id, None)
        self._agent.remove_peer(peer.id)

    def _remove_left(self) -> None:
        for peer in [peer for peer in self._leaving.values() if not peer.reads]:
            del self._leaving[peer.id]
            self._agent.remove_peer(peer.id)

    def _check_open(self) -> None:
        if self._state != "open":
            raise TransportClosed(f"{self._agent.name} is {self._state}")
