"""The reads of one NIXL agent, from posting until they can write no more.

The destination of a read is reused once it has settled.  NIXL does not cancel: a READ that was
released, or whose peer was removed, still writes once the peer wakes up.  So a read settles for one
of these reasons only:

* it was never posted;
* NIXL reports DONE;
* NIXL reports that its peer is disconnected: UCX has failed the endpoint, which ends everything
  on it, and there is one endpoint per peer;
* NIXL reports that a posted READ has ended in an error, by the flush that closes it.

A peer that hangs without closing its connections (SIGSTOP, a lost route) leaves reads pending until
it returns or UCX gives up on it.  The caller has a deadline for that, and keeps the destination in
quarantine.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from transport.errors import BackendFailure, OutOfBounds, PeerLost, TransportError
from transport.nixl.agent import Agent, Transfer
from transport.nixl.progress import AdaptiveProgress
from transport.regions import Regions
from transport.types import PeerId, ReadId, ReadStats, Settled, Spans

_log = logging.getLogger(__name__)

REPOST_S = 1.0
"""How long to wait before a read that NIXL has accepted only in part is posted again."""


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A peer that is loaded in NIXL; ``lost`` once a read has found it disconnected."""

    id: PeerId
    metadata: bytes
    reads: set[ReadId] = field(default_factory=set)
    lost: bool = False


@dataclass(slots=True, eq=False)
class _InflightRead:
    """A read that can still write.

    ``began`` is when it was posted; ``repost_at`` is set while posting it fails, ``disconnected``
    once we have disconnected from its peer.
    """

    read: ReadId
    peer: NixlPeer
    spans: Spans
    transfer: Transfer
    began: float
    post_s: float = 0.0
    repost_at: float | None = None
    disconnected: bool = False


class Reads:
    """All reads of ``agent`` that :meth:`poll_read` has not returned yet.

    Args:
        ours: the registered memories, to name a run outside them.
        progress: drives NIXL's thread while reads are in flight.
        repost_s: how long to wait before a read is posted again.
    """

    def __init__(
        self,
        agent: Agent,
        ours: Regions,
        clock: Callable[[], float],
        *,
        progress: AdaptiveProgress | None = None,
        repost_s: float = REPOST_S,
    ) -> None:
        self._agent = agent
        self.progress = progress or AdaptiveProgress(None, "rests: no peer is connected")
        self._ours = ours
        self._clock = clock
        self._repost_s = repost_s
        self._ids = itertools.count()
        self._inflight: dict[ReadId, _InflightRead] = {}
        self._settled: dict[ReadId, Settled] = {}

    def __len__(self) -> int:
        """How many reads can still write."""
        return len(self._inflight)

    def start_read(self, peer: NixlPeer, spans: Spans) -> ReadId:
        """Post a read; every failure settles it."""
        read = ReadId(next(self._ids))
        began = self._clock()
        try:
            if peer.lost:
                raise PeerLost(f"{peer.id} is disconnected; connect to it again")
            transfer = self._prepare(peer, spans) if len(spans) else None
        except TransportError as error:
            peer.lost |= isinstance(error, PeerLost)
            self._settled[read] = Settled(_stats(spans, 0.0, self._clock() - began), error)
            return read
        if transfer is None:
            self._settled[read] = Settled(ReadStats(0, 0, 0.0, 0.0))
            return read
        peer.reads.add(read)
        began = self._clock()
        self._inflight[read] = inflight = _InflightRead(read, peer, spans, transfer, began)
        self._post(inflight)
        if self._inflight:  # over shared memory it has ended already
            self.progress.moved()
        self.progress.update(len(self._inflight))
        return read

    def poll_read(self, read: ReadId) -> Settled | None:
        """How the read has ended, or None while it can still write."""
        self._advance(read)
        self.progress.update(len(self._inflight))
        if read in self._inflight:
            return None
        return self._settled.pop(read)

    def mark_disconnected(self, peer: NixlPeer) -> None:
        """Let the reads of ``peer`` settle as ``PeerLost``, each once it can write no more."""
        for read in peer.reads:
            self._inflight[read].disconnected = True

    def advance(self, peer: NixlPeer | None = None) -> None:
        """Settle the reads, of ``peer`` or of all peers, that can write no more."""
        for read in list(self._inflight if peer is None else peer.reads):
            self._advance(read)
        self.progress.update(len(self._inflight))

    def forget_settled(self) -> None:
        """Forget the settled reads."""
        self._settled.clear()

    def _prepare(self, peer: NixlPeer, spans: Spans) -> Transfer:
        merged = spans.coalesced()  # NIXL would merge neighbours, at seventeen times the cost
        try:
            return self._agent.prepare(peer.id, merged)
        except OutOfBounds as error:
            # A merged run may cross from one registered memory into the next, which NIXL refuses.
            if len(merged) < len(spans):
                with suppress(OutOfBounds):
                    return self._agent.prepare(peer.id, spans)
            ours = self._ours.outside("local", spans.local, spans.nbytes, spans.local_device)
            raise ours or error from error.__cause__

    def _advance(self, read: ReadId) -> None:
        inflight = self._inflight.get(read)
        if inflight is None:
            return
        if inflight.repost_at is not None:
            if self._clock() >= inflight.repost_at:
                self._post(inflight)
            return
        try:
            if self._agent.check_transfer(inflight.transfer) == "done":
                self._end(inflight, None)
        except TransportError as error:
            self._end(inflight, error)

    def _post(self, inflight: _InflightRead) -> None:
        try:
            progress = self._agent.post_transfer(inflight.transfer)
        except PeerLost as error:
            self._end(inflight, error)
            return
        except BackendFailure as error:
            # Some runs may be in flight, and NIXL does not report their state.  The flush of an
            # attempt that succeeds covers them.
            _log.warning("pdconn: %s; runs may be in flight, posting the read again", error)
            inflight.repost_at = self._clock() + self._repost_s
            return
        inflight.repost_at = None
        inflight.post_s = self._clock() - inflight.began
        if progress == "done":
            self._end(inflight, None)

    def _end(self, inflight: _InflightRead, error: TransportError | None) -> None:
        elapsed = self._clock() - inflight.began
        stats = _stats(inflight.spans, inflight.post_s, elapsed)
        inflight.peer.lost |= isinstance(error, PeerLost)
        if inflight.disconnected:  # even if its bytes have arrived
            error = PeerLost(f"{inflight.peer.id} was disconnected while this read was in flight")
        inflight.peer.reads.discard(inflight.read)
        del self._inflight[inflight.read]
        self._settled[inflight.read] = Settled(stats, error)
        self.progress.moved()
        self._agent.release_transfer(inflight.transfer)  # last: nothing uses a released handle


def _stats(spans: Spans, post_s: float, transfer_s: float) -> ReadStats:
    """Our own statistics: NIXL's contain no more, and its call holds the interpreter's lock."""
    return ReadStats(spans.total_bytes, len(spans.coalesced()), post_s, transfer_s)
