"""The reads of one NIXL agent, from posting to the moment that they can write no more.

The one hard question is when a read is over, as its destination is reused then.
NIXL does not cancel: a READ that was released, or whose peer was removed, still
writes once the peer wakes up.  So a read settles for one of these reasons only:

* it never was posted;
* NIXL says DONE;
* NIXL says that its peer is disconnected: UCX has failed the endpoint, which
  ends everything on it, and there is one endpoint per peer;
* NIXL says that a posted READ ended in an error, by the flush that closes it.

That leaves two cases that need care.  A read whose peer is disconnected by us
is doomed: it settles as ``PeerLost``, but not before one of the above.  And
posting may fail half way, with runs on their way that nobody can ask about;
such a read is posted again until NIXL takes it, since the flush of the second
attempt covers the first.

A peer that hangs without closing its connections (SIGSTOP, a lost route) leaves
reads pending until it returns or UCX gives up on it.  That is for the caller's
deadline to bear, with the destination in quarantine.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from transport.errors import BackendFailure, OutOfBounds, PeerLost, TransportError
from transport.nixl.agent import Agent, Transfer
from transport.regions import Regions
from transport.types import PeerId, ReadId, ReadStats, Settled, Spans

_log = logging.getLogger(__name__)

_REPOST_S = 1.0


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A peer that NIXL knows.  ``lost`` once a read found it disconnected."""

    id: PeerId
    metadata: bytes
    reads: set[ReadId] = field(default_factory=set)
    lost: bool = False


@dataclass(slots=True, eq=False)
class _Flight:
    """A read that can still write; ``repost_at`` is set while posting it fails."""

    read: ReadId
    peer: NixlPeer
    spans: Spans
    nbytes: int
    transfer: Transfer
    began: float
    post_s: float = 0.0
    repost_at: float | None = None
    doomed: bool = False


class Reads:
    """All reads of ``agent`` that the caller has not been told the end of.

    ``ours`` are the registered memories, to name the run that lies outside them.
    """

    def __init__(self, agent: Agent, ours: Regions, clock: Callable[[], float]) -> None:
        self._agent = agent
        self._ours = ours
        self._clock = clock
        self._ids = itertools.count()
        self._flights: dict[ReadId, _Flight] = {}
        self._settled: dict[ReadId, Settled] = {}

    def __len__(self) -> int:
        """How many reads can still write."""
        return len(self._flights)

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
        nbytes = spans.total_bytes  # before the copy leaves every cache cold
        peer.reads.add(read)
        self._flights[read] = flight = _Flight(read, peer, spans, nbytes, transfer, began)
        self._post(flight)
        return read

    def poll(self, read: ReadId) -> Settled | None:
        """As ``Transport.poll``."""
        self._advance(read)
        if read in self._flights:
            return None
        return self._settled.pop(read)

    def doom(self, peer: NixlPeer) -> None:
        """Let the reads of ``peer`` settle as ``PeerLost``, each when it is over."""
        for read in peer.reads:
            self._flights[read].doomed = True

    def advance(self, peer: NixlPeer | None = None) -> None:
        """See which reads, of ``peer`` or of all, are over; they stay to be polled."""
        for read in list(self._flights if peer is None else peer.reads):
            self._advance(read)

    def clear(self) -> None:
        """Forget the settled reads."""
        self._settled.clear()

    def _prepare(self, peer: NixlPeer, spans: Spans) -> Transfer:
        """Merge neighbours first: NIXL merges them as well, at seventeen times the cost.

        Merged runs may cross from one registered memory into the next, which
        NIXL refuses; it then gets the runs as they came, and has the last word.
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
        flight = self._flights.get(read)
        if flight is None:
            return
        if flight.repost_at is not None:
            if self._clock() >= flight.repost_at:
                self._post(flight)
            return
        try:
            if self._agent.check(flight.transfer) == "done":
                self._end(flight, None)
        except TransportError as error:
            self._end(flight, error)

    def _post(self, flight: _Flight) -> None:
        try:
            progress = self._agent.post(flight.transfer)
        except PeerLost as error:
            self._end(flight, error)
            return
        except BackendFailure as error:
            _log.warning("%s; runs may be on their way, posting it again", error)
            flight.repost_at = self._clock() + _REPOST_S
            return
        flight.repost_at = None
        flight.post_s = self._clock() - flight.began
        if progress == "done":
            self._end(flight, None)

    def _end(self, flight: _Flight, error: TransportError | None) -> None:
        elapsed = self._clock() - flight.began
        if error is None and (seen := self._agent.telemetry(flight.transfer)):
            stats = ReadStats(flight.nbytes, seen.num_descriptors, seen.post_s, seen.transfer_s)
        else:
            stats = _stats(flight.spans, flight.post_s, elapsed)
        flight.peer.lost |= isinstance(error, PeerLost)
        if flight.doomed:
            error = PeerLost(f"{flight.peer.id} was disconnected while this read was in flight")
        flight.transfer.release()
        flight.peer.reads.discard(flight.read)
        del self._flights[flight.read]
        self._settled[flight.read] = Settled(stats, error)


def _stats(spans: Spans, post_s: float, transfer_s: float) -> ReadStats:
    """Our own account, where NIXL has none: what neighbours would merge to."""
    return ReadStats(spans.total_bytes, len(spans.coalesced()), post_s, transfer_s)
