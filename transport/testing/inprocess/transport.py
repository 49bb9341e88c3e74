"""An in-process transport: real bytes, between real addresses, with scripted faults.

It is the backend for tests and simulations, yours too.  In every detail it follows NIXL,
so that code that is correct here is correct there:

* A read that is late copies what its peer's memory holds when it lands, not
  what it held when it was posted.
* A read in flight cannot be cancelled.  Disconnecting leaves it pending; it
  lands when it is due and settles as ``PeerLost``; ``close`` refuses until then.
* An address covers what was registered when it was made; connect again with a newer one
  to read what was registered since.
* A run must lie inside one registered memory, on both sides.

There is no thread: bytes move inside ``poll`` and ``InProcessNetwork.progress``.
As with every backend, buffers must outlive the transport that registered them::

    clock = ManualClock()
    network = InProcessNetwork(clock=clock)
    lender, reader = InProcessTransport(network, "p0"), InProcessTransport(network, "d0")
    ...
    peer = reader.connect(lender.address())
    network.inject(reader.peer_id, peer, Late(0.5))
    read = reader.read(peer, spans)
    assert reader.poll(read) is None
    clock.advance(0.5)
    assert reader.poll(read).ok
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import msgspec

from transport.address import pack, unpack
from transport.base import Transport
from transport.errors import (
    BackendFailure,
    BadAddress,
    BadSpans,
    OutOfBounds,
    PeerLost,
    PeerUnknown,
    TransportClosed,
)
from transport.regions import Regions
from transport.testing.inprocess.faults import Failing, Held, Late, Lost, ManualClock, ReadRequest
from transport.testing.inprocess.network import InProcessNetwork
from transport.types import Memory, PeerId, ReadId, ReadStats, Settled, Spans

__all__ = [
    "Failing",
    "Held",
    "InProcessNetwork",
    "InProcessTransport",
    "Late",
    "Lost",
    "ManualClock",
    "ReadRequest",
]

_BACKEND = "memory"
_MEMORIES = msgspec.msgpack.Decoder(list[tuple[int, int]])


class InProcessTransport(Transport):
    """One peer of an ``InProcessNetwork``; host memory of this process only."""

    def __init__(self, network: InProcessNetwork, name: str) -> None:
        self.network = network
        self.peer_id = network.join(name)
        self._registered = Regions()
        self._peers: dict[PeerId, Regions] = {}
        self._ids = itertools.count()
        self._reads: dict[ReadId, Settled | None] = {}
        self._closing = False

    @property
    def name(self) -> str:
        return _BACKEND

    def register(self, memories: Sequence[Memory]) -> None:
        self._check_open()
        for memory in memories:
            if memory.device.kind != "cpu":
                raise BackendFailure(f"{memory.device}: the memory backend moves host memory only")
        self._registered.add(memories)

    def address(self) -> bytes:
        self._check_open()
        memories = [(memory.base, memory.nbytes) for memory in self._registered]
        return pack(_BACKEND, self.peer_id, msgspec.msgpack.encode(memories))

    def connect(self, address: bytes) -> PeerId:
        self._check_open()
        envelope = unpack(_BACKEND, address)
        try:
            memories = [Memory(*pair) for pair in _MEMORIES.decode(envelope.payload)]
            regions = Regions(memories)
        except (msgspec.DecodeError, UnicodeDecodeError, BadSpans) as error:
            raise BadAddress(f"address of {envelope.name!r}: {error}") from error
        peer = PeerId(envelope.name)
        self._peers[peer] = regions
        return peer

    def disconnect(self, peer: PeerId) -> None:
        if self._peers.pop(peer, None) is not None:
            self.network.disconnect(self.peer_id, peer)

    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        self._check_open()
        if peer not in self._peers:
            raise PeerUnknown(f"{peer} is not connected to {self.peer_id}")
        read = ReadId(next(self._ids))
        self._reads[read] = None
        error = self._outside(self._peers[peer], spans)
        if error is not None or not len(spans):
            stats = ReadStats(spans.total_bytes, len(spans.coalesced()), 0.0, 0.0)
            self._reads[read] = Settled(stats, error)
        else:
            self.network.post(self.peer_id, peer, spans, partial(self._settle, read))
        return read

    def poll(self, read: ReadId) -> Settled | None:
        self.network.progress()
        settled = self._reads[read]
        if settled is not None:
            del self._reads[read]
        return settled

    def describe(self) -> dict[str, str]:
        return {
            "backend": _BACKEND,
            "peer": self.peer_id,
            "registered": f"{len(self._registered)} memories",
        }

    def close(self) -> None:
        """As ``Transport.close``: disconnects from all peers first.

        Raises:
            BackendFailure: reads can still write.  Nothing is released; they can
                be polled, and ``close`` called again once they settled.
        """
        self._closing = True
        for peer in list(self._peers):
            self.disconnect(peer)
        pending = sum(settled is None for settled in self._reads.values())
        if pending and self.network.is_alive(self.peer_id):
            raise BackendFailure(f"{self.peer_id}: {pending} reads can still write")
        self._reads.clear()
        self.network.leave(self.peer_id, PeerLost(f"{self.peer_id} closed"))

    def _settle(self, read: ReadId, settled: Settled) -> None:
        self._reads[read] = settled

    def _outside(self, theirs: Regions, spans: Spans) -> OutOfBounds | None:
        if not len(spans):
            return None
        ours = self._registered
        return ours.outside("local", spans.local, spans.nbytes, spans.local_device) or (
            theirs.outside("remote", spans.remote, spans.nbytes, spans.remote_device)
        )

    def _check_open(self) -> None:
        if self._closing or not self.network.is_alive(self.peer_id):
            raise TransportClosed(f"{self.peer_id} is closed")
