"""A transport that injects faults into another one's reads: late, failed, stalled, corrupted.

It wraps a real backend, so everything above it runs as in production.  With ``corrupt`` it is the
negative control of end-to-end checks: a check that passes while every read is corrupted checks
nothing.  The faults of read n are drawn from a seeded generator (``transport.fault_schedule``), so
a run can be replayed::

            fail ──► settled: BackendFailure, nothing was posted
    read ── stall ─► pending ──────────── disconnect or close ──► settled: PeerLost
            delay ─► pending ── delay_s ──► posted ─► settled by the backend ─► corrupt
            else ─────────────────────────► posted
                                             └► kill: this process dies

A waiting read is not posted, so it can write nothing and may be dropped at once; it copies the
content of the peer's memory at the time of posting.  An empty read gets no fault, since it must
settle at once.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from transport.base import Transport
from transport.errors import BackendFailure, PeerLost, TransportError
from transport.fault_schedule import check_chances, check_seconds, drawn, in_words
from transport.forwarding import ForwardingTransport
from transport.types import Memory, PeerId, ReadId, ReadStats, Settled, Spans

_KINDS = ("fail", "stall", "delay", "corrupt", "kill")
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class ReadFaults:
    """The probability of each fault, from 0 to 1.

    ``fail`` takes precedence over ``stall``, and ``stall`` over the others, which combine.

    Raises:
        FaultError: a value is out of range; names its field.
    """

    delay: float = 0.0
    delay_s: float = 0.1
    corrupt: float = 0.0
    fail: float = 0.0
    stall: float = 0.0
    kill: float = 0.0

    def __post_init__(self) -> None:
        check_chances(self, _KINDS)
        check_seconds("delay_s", self.delay_s)

    def __str__(self) -> str:
        return in_words(self, _KINDS)

    def __bool__(self) -> bool:
        """Whether any fault can happen."""
        return bool(str(self))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A read that is not posted yet; a stalled one is never posted."""

    peer: PeerId
    spans: Spans
    due: float
    faults: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Posted:
    """A read of the backend, with the id that the backend gave it."""

    read: ReadId
    spans: Spans
    faults: frozenset[str]


def kill_ourselves() -> None:
    """End this process as a crash would: nothing is flushed or closed."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyTransport(ForwardingTransport):
    """``inner``, with ``faults`` drawn from ``rng`` for every read.

    Args:
        inner: owned by this transport; connect to peers through this one only.
        kill: ends this process; tests pass another function.

    Attributes:
        counts: how often each fault has happened.
    """

    def __init__(
        self,
        inner: Transport,
        faults: ReadFaults,
        rng: Random,
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[], None] = kill_ourselves,
    ) -> None:
        super().__init__(inner)
        self._faults = faults
        self._rng = rng
        self._clock = clock
        self._kill = kill
        self._peers: set[PeerId] = set()
        self._ids = itertools.count()
        self._reads: dict[ReadId, _Waiting | _Posted | Settled] = {}
        self.counts: Counter[str] = Counter()

    def register(self, memories: Sequence[Memory]) -> None:
        """Register ``memories`` with the inner transport.

        Raises:
            BackendFailure: device memory with ``corrupt``, which only corrupts host memory: reads
                that stay intact would make a check seem broken.
        """
        for memory in memories:
            if self._faults.corrupt and memory.device.kind != "cpu":
                raise BackendFailure(f"corrupt: expected host memory, got {memory.device}")
        self._inner.register(memories)

    def connect(self, address: bytes) -> PeerId:
        peer = self._inner.connect(address)
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: PeerId) -> None:
        self._peers.discard(peer)
        self._drop_waiting(peer, f"{peer} was disconnected while this read waited")
        self._inner.disconnect(peer)

    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        faults = self._draw(peer, spans)
        state: _Waiting | _Posted | Settled
        if "fail" in faults:
            state = _failed(spans, BackendFailure(f"a read from {peer} failed on purpose"))
        elif "stall" in faults:
            state = _Waiting(peer, spans, _NEVER, faults)
        elif "delay" in faults:
            state = _Waiting(peer, spans, self._clock() + self._faults.delay_s, faults)
        else:
            state = self._post(peer, spans, faults)
        read = ReadId(next(self._ids))
        self._reads[read] = state
        self.counts.update(faults & {"fail"} or faults & {"stall"} or faults & {"delay"})
        return read

    def poll(self, read: ReadId) -> Settled | None:
        state = self._reads[read]
        if isinstance(state, _Waiting):
            if self._clock() < state.due:
                return None
            state = self._reads[read] = self._post_late(state)
        settled = self._poll_posted(state) if isinstance(state, _Posted) else state
        if settled is not None:
            del self._reads[read]
        return settled

    def describe(self) -> dict[str, str]:
        return {**self._inner.describe(), "faults": str(self._faults) or "none"}

    def close(self) -> None:
        for peer in self._peers:
            self._drop_waiting(peer, f"closed while a read from {peer} waited")
        self._peers.clear()
        self._inner.close()
        self._reads.clear()

    def _draw(self, peer: PeerId, spans: Spans) -> frozenset[str]:
        if peer not in self._peers or not len(spans):
            return frozenset()  # the backend refuses it, or settles it at once
        return drawn(self._rng, self._faults, _KINDS)

    def _post(self, peer: PeerId, spans: Spans, faults: frozenset[str]) -> _Posted:
        posted = _Posted(self._inner.read(peer, spans), spans, faults)
        if "kill" in faults:
            self.counts["kill"] += 1
            self._kill()
        return posted

    def _post_late(self, waiting: _Waiting) -> _Posted | Settled:
        try:
            return self._post(waiting.peer, waiting.spans, waiting.faults)
        except TransportError as error:  # poll must not raise what read would have raised
            return _failed(waiting.spans, error)

    def _poll_posted(self, posted: _Posted) -> Settled | None:
        settled = self._inner.poll(posted.read)
        if settled is not None and settled.ok and "corrupt" in posted.faults:
            self.counts["corrupt"] += 1
            _corrupt(posted.spans)
        return settled

    def _drop_waiting(self, peer: PeerId, reason: str) -> None:
        for read, state in self._reads.items():
            if isinstance(state, _Waiting) and state.peer == peer:
                self._reads[read] = _failed(state.spans, PeerLost(reason))


def _failed(spans: Spans, error: TransportError) -> Settled:
    return Settled(ReadStats(spans.total_bytes, len(spans.coalesced()), 0.0, 0.0), error)


def _corrupt(spans: Spans) -> None:
    """Change one byte, in the last number of the first span; host memory only."""
    # The highest byte of a little-endian float: a number around 1 becomes some thousands, and not
    # infinity.
    last = int(spans.local[0]) + int(spans.nbytes[0]) - 1
    ctypes.c_uint8.from_address(last).value ^= 0x7B
