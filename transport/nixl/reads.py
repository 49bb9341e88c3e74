"""The reads of one NIXL agent, from posting to the moment that they can write no more.

The one hard question is when a read is over, as its destination is reused then.
NIXL does not cancel: a READ that was released, or whose peer was removed, still
writes once the peer wakes up.  So a read settles for one of these reasons only:

* it never was posted;
* NIXL says DONE;
* NIXL says that its peer is disconnected: UCX has failed the endpoint, which
  ends everything on it, and there is one endpoint per peer;
* NIXL says that a posted READ ended in an error, by the flush that closes it.

That leaves two cases that need care.  A read whose peer we disconnect from is marked as
failed: it settles as ``PeerLost``, but not before one of the above.  And posting may
fail half way, with runs in flight whose state NIXL does not report; such a read is
posted again until NIXL accepts it, since the flush of the second attempt covers the
first.

A peer that hangs without closing its connections (SIGSTOP, a lost route) leaves
reads pending until it returns or UCX gives up on it.  The caller has a deadline for
that, and keeps the destination in quarantine.
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
"""How long to wait before a read that NIXL took only in part is posted again."""


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A peer that NIXL knows; ``lost`` once a read has found it disconnected."""

    id: PeerId
    metadata: bytes
    reads: set[ReadId] = field(default_factory=set)
    lost: bool = False


@dataclass(slots=True, eq=False)
class _InflightRead:
    """A read that can still write.

    ``began`` is when it was posted; ``repost_at`` is set while posting it fails, ``disconnected``
    once we left its peer.
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
    """All reads of ``agent`` that were not returned by ``poll`` yet.

    Args:
        ours: the registered memories, to name the run that lies outside them.
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

    def start(self, peer: NixlPeer, spans: Spans) -> ReadId:
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
        if self._inflight:  # shared memory has copied it already
            self.progress.moved()
        self.progress.update(len(self._inflight))
        return read

    def poll(self, read: ReadId) -> Settled | None:
        """As ``Transport.poll``."""
        self._advance(read)
        self.progress.update(len(self._inflight))
        if read in self._inflight:
            return None
        return self._settled.pop(read)

    def mark_disconnected(self, peer: NixlPeer) -> None:
        """Let the reads of ``peer`` settle as ``PeerLost``, each once it is over."""
        for read in peer.reads:
            self._inflight[read].disconnected = True

    def advance(self, peer: NixlPeer | None = None) -> None:
        """Settle the reads, of ``peer`` or of all, that are over; ``poll`` returns them."""
        for read in list(self._inflight if peer is None else peer.reads):
            self._advance(read)
        self.progress.update(len(self._inflight))

    def clear(self) -> None:
        """Forget the settled reads."""
        self._settled.clear()

    def _prepare(self, peer: NixlPeer, spans: Spans) -> Transfer:
        """Merge neighbours first: NIXL merges them, too, at seventeen times the cost.

        Merged runs may cross from one registered memory into the next, which
        NIXL refuses; then it gets the runs unmerged, and its answer counts.
        """
        merged = spans.coalesced()
        try:
            return self._agent.prepare(peer.id, merged)
        except OutOfBounds as error:
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
            if self._agent.check(inflight.transfer) == "done":
                self._end(inflight, None)
        except TransportError as error:
            self._end(inflight, error)

    def _post(self, inflight: _InflightRead) -> None:
        try:
            progress = self._agent.post(inflight.transfer)
        except PeerLost as error:
            self._end(inflight, error)
            return
        except BackendFailure as error:
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
        if inflight.disconnected:
            error = PeerLost(f"{inflight.peer.id} was disconnected while this read was in flight")
        inflight.peer.reads.discard(inflight.read)
        del self._inflight[inflight.read]
        self._settled[inflight.read] = Settled(stats, error)
        self.progress.moved()
        self._agent.release(inflight.transfer)  # last: nothing asks about a handle that is gone


def _stats(spans: Spans, post_s: float, transfer_s: float) -> ReadStats:
    """Our own: NIXL's tell no more, and asking it for them takes the interpreter's lock."""
    return ReadStats(spans.total_bytes, len(spans.coalesced()), post_s, transfer_s)
