"""The network between in-process transports: it delays, fails and loses reads on demand.

Nothing here moves by itself.  ``progress`` lands the reads that are due by the network's
clock, in order of due time, and every ``poll`` of a transport calls it first.  Landing
copies real bytes between real addresses, so a fault script has the same memory hazards
as a network card.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from transport.errors import PeerLost, TransportError
from transport.testing.inprocess.faults import (
    Clock,
    Failing,
    Fault,
    Held,
    Late,
    Lost,
    ReadRequest,
    Script,
)
from transport.types import PeerId, ReadStats, Settled, Spans

_NEVER = float("inf")


@dataclass(slots=True)
class _PendingRead:
    """A posted read that has not landed; ``disconnected`` once its reader left the peer."""

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

    def release(self, peer: PeerId | None = None) -> int:
        """Make held reads from ``peer``, or from all peers, due now; returns how many."""
        held = [
            number
            for number, pending in self._pending.items()
            if isinstance(pending.fault, Held) and peer in (None, pending.request.peer)
        ]
        for number in held:
            heapq.heappush(self._due, (self.clock(), number))
        return len(held)

    def kill(self, peer: PeerId) -> None:
        """End ``peer`` as a crash would: reads from it settle ``PeerLost``, its own vanish."""
        for number in [n for n, f in self._pending.items() if f.request.reader == peer]:
            del self._pending[number]
        self.leave(peer, PeerLost(f"{peer} was killed"))

    def in_flight(self) -> tuple[ReadRequest, ...]:
        """The reads that have not settled, oldest first."""
        return tuple(pending.request for pending in self._pending.values())

    def is_alive(self, peer: PeerId) -> bool:
        """Whether ``peer`` has joined, and was neither closed nor killed since."""
        return peer in self._alive

    # What follows is for InProcessTransport.

    def join(self, name: str) -> PeerId:
        """A new peer; its name differs at every boot, as a restarted peer is another peer."""
        peer = PeerId(f"{name}#{next(self._boots)}")
        self._alive.add(peer)
        return peer

    def leave(self, peer: PeerId, error: PeerLost) -> None:
        """Settle all reads from ``peer`` with ``error``; nothing more lands from it."""
        self._alive.discard(peer)
        self._end([n for n, f in self._pending.items() if f.request.peer == peer], error)

    def post(
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

    def disconnect(self, reader: PeerId, peer: PeerId) -> None:
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
