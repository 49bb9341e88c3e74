"""An in-process transport and its network: real bytes and addresses, with scripted faults.

The backend for tests and simulations, inside and outside of this project.  It behaves like NIXL, so
that code that is correct here is correct there:

* A late read copies the content of its peer's memory at the time of landing, not of posting.
* A read in flight cannot be cancelled.  Disconnecting leaves it pending; it lands when it is due
  and settles as ``PeerLost``; ``close`` raises until then.
* An address covers the memory registered when it was made; connect again with a newer one to read
  what was registered later.
* A run must lie inside one registered memory, on both sides.

There is no thread.  ``InProcessNetwork.progress`` lands the reads that are due by the network's
clock, in order of due time, and every ``poll`` of a transport calls it first.  Landing copies real
bytes between real addresses, with the memory hazards of a network card.
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

import ctypes
import heapq
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    TransportError,
)
from transport.regions import Regions
from transport.testing.inprocess.faults import (
    Clock,
    Failing,
    Fault,
    Held,
    Late,
    Lost,
    ManualClock,
    ReadRequest,
    Script,
)
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
_NEVER = float("inf")


@dataclass(slots=True)
class _PendingRead:
    """A posted read that has not landed; ``disconnected``: its reader has disconnected."""

    request: ReadRequest
    fault: Fault | None
    settle: Callable[[Settled], None]
    disconnected: PeerLost | None = None


class InProcessNetwork:
    """Connects ``InProcessTransport``s, and injects faults.

    Faults injected for a (reader, peer) pair are used first, one per read; then ``script``
    decides; without a fault a read lands at once.
    """

    def __init__(self, *, clock: Clock = time.monotonic, script: Script | None = None) -> None:
        self.clock = clock
        self.script = script
        self._alive: set[PeerId] = set()
        self._boots = itertools.count()
        self._numbers = itertools.count()
        self._injected: defaultdict[tuple[PeerId, PeerId], deque[Fault]] = defaultdict(deque)
        self._pending: dict[int, _PendingRead] = {}
        self._due: list[tuple[float, int]] = []

    def inject(self, reader: PeerId, peer: PeerId, *faults: Fault) -> None:
        """Inject ``faults`` into the next reads of ``reader`` from ``peer``, in order."""
        self._injected[reader, peer].extend(faults)

    def progress(self) -> int:
        """Land every read that is due, earliest first; returns how many landed."""
        now, landed = self.clock(), 0
        while self._due and self._due[0][0] <= now:
            _, number = heapq.heappop(self._due)
            if pending := self._pending.pop(number, None):
                self._land(pending, now)
                landed += 1
        return landed

    def release_held(self, peer: PeerId | None = None) -> int:
        """Make held reads from ``peer``, or from all peers, due now; returns how many."""
        held = [
            number
            for number, pending in self._pending.items()
            if isinstance(pending.fault, Held) and peer in (None, pending.request.peer)
        ]
        for number in held:
            heapq.heappush(self._due, (self.clock(), number))
        return len(held)

    def kill_peer(self, peer: PeerId) -> None:
        """End ``peer`` like a crash: reads from it settle as ``PeerLost``, its own vanish."""
        for number in [n for n, f in self._pending.items() if f.request.reader == peer]:
            del self._pending[number]
        self.remove_peer(peer, PeerLost(f"{peer} was killed"))

    def in_flight(self) -> tuple[ReadRequest, ...]:
        """The reads that have not settled, oldest first."""
        return tuple(pending.request for pending in self._pending.values())

    def is_alive(self, peer: PeerId) -> bool:
        """Whether ``peer`` exists: it was neither closed nor killed."""
        return peer in self._alive

    # The following is used by InProcessTransport.

    def add_peer(self, name: str) -> PeerId:
        """Add a peer.  Its name differs at every boot, since a restarted peer is another peer."""
        peer = PeerId(f"{name}#{next(self._boots)}")
        self._alive.add(peer)
        return peer

    def remove_peer(self, peer: PeerId, error: PeerLost) -> None:
        """Settle all reads from ``peer`` with ``error``; nothing more lands from it."""
        self._alive.discard(peer)
        self._end([n for n, f in self._pending.items() if f.request.peer == peer], error)

    def post_read(
        self, reader: PeerId, peer: PeerId, spans: Spans, settle: Callable[[Settled], None]
    ) -> None:
        """Start a read; ``settle`` is called once it can write nothing more."""
        now, number = self.clock(), next(self._numbers)
        request = ReadRequest(reader, peer, spans, number, now)
        pending = _PendingRead(request, self._fault(request), settle)
        if peer not in self._alive:
            self._settle(pending, now, PeerLost(f"{peer} is gone"))
            return
        self._pending[number] = pending
        due = _due(pending.fault, now)
        if due < _NEVER:
            heapq.heappush(self._due, (due, number))

    def end_reads(self, reader: PeerId, peer: PeerId) -> None:
        """Settle ``reader``'s lost reads; its others still land and settle ``PeerLost``."""
        error = PeerLost(f"{peer} was disconnected while reads were in flight")
        lost = []
        for number, pending in self._pending.items():
            if (pending.request.reader, pending.request.peer) == (reader, peer):
                pending.disconnected = error
                if isinstance(pending.fault, Lost):
                    lost.append(number)
        self._end(lost, error)

    def _fault(self, request: ReadRequest) -> Fault | None:
        injected = self._injected.get((request.reader, request.peer))
        if injected:
            return injected.popleft()
        return self.script(request) if self.script else None

    def _end(self, numbers: list[int], error: PeerLost) -> None:
        for number in numbers:
            self._settle(self._pending.pop(number), self.clock(), error)

    def _land(self, pending: _PendingRead, now: float) -> None:
        spans = pending.request.spans
        if isinstance(pending.fault, Failing):
            _copy(spans, pending.fault.after_bytes)
            self._settle(pending, now, pending.disconnected or pending.fault.error)
        else:
            _copy(spans, spans.total_bytes)
            self._settle(pending, now, pending.disconnected)

    def _settle(self, pending: _PendingRead, now: float, error: TransportError | None) -> None:
        spans = pending.request.spans
        elapsed = now - pending.request.posted_at
        stats = ReadStats(spans.total_bytes, len(spans.coalesced()), 0.0, elapsed)
        pending.settle(Settled(stats, error))


def _due(fault: Fault | None, now: float) -> float:
    match fault:
        case Late() | Failing():
            return now + fault.seconds
        case Held() | Lost():
            return _NEVER
        case None:
            return now


def _copy(spans: Spans, limit: int) -> None:
    """Copy the first ``limit`` bytes of ``spans``, in their order."""
    columns = zip(spans.local.tolist(), spans.remote.tolist(), spans.nbytes.tolist(), strict=True)
    for local, remote, nbytes in columns:
        ctypes.memmove(local, remote, min(nbytes, limit))
        limit -= nbytes
        if limit <= 0:
            return


class InProcessTransport(Transport):
    """One peer of an ``InProcessNetwork``; host memory of this process only."""

    def __init__(self, network: InProcessNetwork, name: str) -> None:
        self.network = network
        self.peer_id = network.add_peer(name)
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
        self._registered.add_memories(memories)

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
            self.network.end_reads(self.peer_id, peer)

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
            self.network.post_read(self.peer_id, peer, spans, partial(self._settle, read))
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
        """Disconnect from all peers, and leave the network.

        Raises:
            BackendFailure: reads can still write.  Nothing is released; they can be polled, and
                ``close`` called again once they have settled.
        """
        self._closing = True
        for peer in list(self._peers):
            self.disconnect(peer)
        pending = sum(settled is None for settled in self._reads.values())
        if pending and self.network.is_alive(self.peer_id):
            raise BackendFailure(f"{self.peer_id}: {pending} reads can still write")
        self._reads.clear()
        self.network.remove_peer(self.peer_id, PeerLost(f"{self.peer_id} closed"))

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
