"""The transport over UCX alone, through UCXX, for machines where NIXL does not load.

UCXX has messages and no one-sided READ, so a read is *answered*: our thread requests pieces from
the lender's thread, which sends them.  UCX moves them from the lender's memory to ours without a
copy in between.

    owner of the reader        its thread                 the lender's thread
    read ───────────────────►  cut into pieces ─request─► check
                               receive  ◄──────────────── send
    poll ◄── settled ─────────

``transport.ucx.control`` describes the messages and how a reader authenticates,
``transport.ucx.reader_side`` when a read settles, ``transport.ucx.lender_side`` the bounds of a
lender's memory, ``transport.ucx.ucx_thread`` the thread.

Differences from NIXL: the lender's CPU takes part; disconnecting and closing *do* end reads, since
no bytes arrive over a closed connection; memory that a lender registers later can be read through
its older address; host memory only.

UCX itself does not authenticate: a host that reaches its ports can harm this process whatever is
checked above it, and so it is with NIXL.  Keep the ports on a trusted network.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from transport.address import MAX_NAME_CHARS, Envelope, pack, unpack
from transport.base import Transport
from transport.errors import (
    BackendFailure,
    BadAddress,
    PeerUnknown,
    TransportClosed,
    TransportError,
)
from transport.hugepages import HugePages
from transport.regions import Regions
from transport.types import Memory, PeerId, ReadId, ReadStats, Settled, Spans
from transport.ucx.control import (
    MAX_WORKER_ADDRESS_BYTES,
    PROTOCOL,
    SAME_PDCONN,
    SECRET_BYTES,
    SESSION_BYTES,
    SessionId,
)
from transport.ucx.lender_side import lendable
from transport.ucx.library import UcxLibrary, context_options, load_library
from transport.ucx.reader_side import RemoteLender
from transport.ucx.ucx_thread import UcxThread

_BACKEND = "ucx"


class _Payload(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The content of an address: the secret that readers need, and the worker's address."""

    secret: bytes
    worker_address: bytes
    protocol: str = "pdU1"  # which had no such field


_PAYLOADS = msgspec.msgpack.Decoder(_Payload)


class UcxTransport(Transport):
    """A UCX worker with the name ``name`` and a suffix that differs at every boot.

    Args:
        options: UCX's settings over our defaults (``transport.ucx.library``).
        huge_pages: back host memory with huge pages before it is registered,
            for at most ``huge_page_s`` seconds over the transport's life.
        close_wait_s: how long ``close`` waits for connections to end.
        boot: the suffix; random by default.

    Raises:
        TransportUnavailable: ucxx cannot be used here.
        BackendFailure: UCX does not start with these options.
        ValueError: an invalid option.
    """

    def __init__(
        self,
        name: str,
        *,
        options: Mapping[str, str] | None = None,
        huge_pages: bool = True,
        huge_page_s: float = 10.0,
        close_wait_s: float = 5.0,
        boot: str | None = None,
        library: UcxLibrary | None = None,
    ) -> None:
        self.peer_id = PeerId(f"{name}-{boot or secrets.token_hex(4)}")
        if len(self.peer_id) > MAX_NAME_CHARS or not name:
            raise ValueError(f"name of {len(name)} characters; with its suffix 1 to 256 fit")
        self._options = context_options(options)
        self._library = library or load_library()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._ids = itertools.count()
        self._reads: dict[ReadId, Settled | None] = {}
        self._registered = Regions()
        self._lenders: dict[PeerId, RemoteLender] = {}
        self._huge_pages = HugePages(huge_pages, huge_page_s)
        self._close_wait_s = close_wait_s
        self._state = "open"
        self._thread = UcxThread(
            self.peer_id,
            library=self._library,
            options=self._options,
            secret=self._secret,
            settle=self._settle,
            clock=time.perf_counter,
            draw=secrets.randbelow,
        )

    @property
    def name(self) -> str:
        return _BACKEND

    def register(self, memories: Sequence[Memory]) -> None:
        self._check_open()
        for memory in memories:
            if memory.device.kind != "cpu":
                raise BackendFailure(
                    f"{memory.device}: the ucx backend moves host memory only; "
                    "device memory needs the nixl backend"
                )
        self._registered.add_memories(memories)
        for memory in memories:
            self._huge_pages.back_memory(memory)
        self._thread.lender.lent = lendable(self._registered)

    def address(self) -> bytes:
        self._check_open()
        payload = _Payload(self._secret, self._thread.worker_address, PROTOCOL)
        return pack(_BACKEND, self.peer_id, msgspec.msgpack.encode(payload))

    def connect(self, address: bytes) -> PeerId:
        """Make the peer at ``address`` readable; the address of its next boot replaces the old one.

        Nothing is sent before the first read, so a lost peer is detected then.
        """
        self._check_open()
        envelope = unpack(_BACKEND, address)
        peer = PeerId(envelope.name)
        if peer == self.peer_id:
            raise BadAddress(f"{peer} is this transport itself")
        known = self._lenders.get(peer)
        if known is not None and known.payload == envelope.payload and not known.lost:
            return peer
        lender = _remote_lender(envelope)
        self.disconnect(peer)
        self._lenders[peer] = lender
        return peer

    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer and close its connection, which ends its reads soon."""
        lender = self._lenders.pop(peer, None)
        if lender is not None:
            with suppress(BackendFailure):  # the thread has ended, and its reads with it
                self._thread.run_soon(lambda: self._thread.reader.disconnect_lender(lender))

    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        self._check_open()
        if peer not in self._lenders:
            raise PeerUnknown(f"{peer} is not connected to {self.peer_id}")
        read, began = ReadId(next(self._ids)), time.perf_counter()
        self._reads[read] = None
        try:
            error = self._outside(spans) if len(spans) else None
            if error is None and len(spans):
                lender = self._lenders[peer]
                self._thread.run_soon(
                    lambda: self._thread.reader.start_read(lender, read, spans, began)
                )
                return read
        except BackendFailure as failure:
            error = failure
        stats = ReadStats(spans.total_bytes, len(spans.coalesced()), 0.0, 0.0)
        self._reads[read] = Settled(stats, error)
        return read

    def poll(self, read: ReadId) -> Settled | None:
        settled = self._reads[read]
        if settled is not None:
            del self._reads[read]
        return settled

    def check(self) -> None:
        self._thread.raise_failure()

    def describe(self) -> dict[str, str]:
        return {
            "backend": _BACKEND,
            "agent": self.peer_id,
            "ucxx": self._library.version,
            "ucx": self._library.ucx_version,
            "huge_pages": self._huge_pages.describe_backing(self._registered),
            **{f"UCX_{key}": self._thread.config.get(key, "?") for key in self._options},
        }

    def close(self) -> None:
        """Close all connections and wait until UCX has released memory.

        Raises:
            BackendFailure: something can still be written after ``close_wait_s``; reads can be
                polled, and ``close`` called again.
        """
        if self._state == "closed":
            return
        self._state = "closing"
        self._lenders.clear()
        if not self._thread.close(self._close_wait_s):
            raise BackendFailure(
                f"{self.peer_id}: connections have not ended after {self._close_wait_s} s; "
                "memory stays registered"
            )
        self._reads.clear()
        self._state = "closed"

    def _settle(self, read: ReadId, settled: Settled) -> None:
        # Runs on the UCX thread; the owner only removes reads that have settled.
        self._reads[read] = settled

    def _outside(self, spans: Spans) -> TransportError | None:
        """The error of the runs on our side, or None; the lender checks its own side."""
        for device in (spans.local_device, spans.remote_device):
            if device.kind != "cpu":
                return BackendFailure(f"{device}: the ucx backend moves host memory only")
        return self._registered.outside("local", spans.local, spans.nbytes, spans.local_device)

    def _check_open(self) -> None:
        if self._state != "open":
            raise TransportClosed(f"{self.peer_id} is {self._state}")


def _remote_lender(envelope: Envelope) -> RemoteLender:
    """The lender at an address.

    Raises:
        BadAddress: its payload is not that of a UCX transport of our protocol.
    """
    try:
        payload = _PAYLOADS.decode(envelope.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAddress(f"address of {envelope.name!r}: {error}") from error
    if payload.protocol != PROTOCOL:
        raise BadAddress(
            f"address of {envelope.name!r}: theirs is ucx protocol {payload.protocol[:8]!r}, "
            f"ours {PROTOCOL!r}: {SAME_PDCONN}"
        )
    size = len(payload.worker_address)
    if len(payload.secret) != SECRET_BYTES or not 0 < size <= MAX_WORKER_ADDRESS_BYTES:
        raise BadAddress(
            f"address of {envelope.name!r}: secret of {len(payload.secret)} bytes, expected "
            f"{SECRET_BYTES}; worker at {size} bytes, expected 1 to {MAX_WORKER_ADDRESS_BYTES}"
        )
    return RemoteLender(
        PeerId(envelope.name),
        envelope.payload,
        payload.secret,
        payload.worker_address,
        SessionId(secrets.token_bytes(SESSION_BYTES)),
    )
