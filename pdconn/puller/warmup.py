"""Warm-up: lenders are greeted, connected and read from before the first request for them.

What is due when is decided in :mod:`pdconn.puller.warmup_state`; here it is done, with the
peers that pulls use, so a request that comes meanwhile joins what was begun.

A warm-up costs others nothing.  It makes no room for itself among the peers, never closes
one that a pull uses, and what it reads goes to a page that holds nothing: the first bytes of
a lender's registered memory, which need no lease, since they are not used.  A probe read
that hangs is left alone, and its place is not read from again before it ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import Patience
from pdconn.puller.peers import Peer, PeerTable, Rank
from pdconn.puller.reads import Job, Read, ReadSettled
from pdconn.puller.warmup_state import Pauses, Place, PlaceWarmup, WarmupState, WarmupStep
from registration.references import KVCacheReferences
from transport import Memory, PeerId, PeerLost, PeerUnknown, Spans, TransportError

log = logging.getLogger(__name__)

MAX_PROBED = 64
"""Regions of one rank that a probe read reaches; each gets its part of the page."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The lenders to warm.

    ``scratch`` is registered memory of ours that holds nothing; without it lenders are
    connected and not read from.
    """

    places: tuple[Place, ...] = ()
    scratch: Memory | None = None
    pauses: Pauses = field(default_factory=Pauses)


@dataclass(slots=True, eq=False)
class _Site:
    """A place; ``peer`` is the lender there; ``reads`` are probe reads that are not over."""

    place: Place
    warmup: PlaceWarmup
    peer: Peer | None = None
    reads: int = 0
    is_known_cold: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ProbeRead:
    """The tag of a read that no request waits for."""

    site: _Site
    peer: Peer


class PeerWarmup:
    """Keeps the lenders at some places warm, for one decode rank.

    Args:
        me: the rank; its own engine is not warmed.
        warm_up: the lenders to warm.
        peers: those that pulls use; its owner passes on its events.
        post: gives a read to the reader.
        patience: as pulls have it with lenders.
        clock: seconds that never go back.

    Attributes:
        followed: the places by the peers that they are warmed through; nothing that happens
            to another peer matters here.
        alarm: when :meth:`tick` is to be called, or None when only an event can matter.
    """

    def __init__(
        self,
        me: Rank,
        warm_up: WarmUp,
        peers: PeerTable,
        post: Callable[[Job], None],
        *,
        patience: Patience,
        clock: Callable[[], float],
    ) -> None:
        self._engine_id = me.engine_id
        self._scratch = warm_up.scratch
        self._peers = peers
        self._post = post
        self._clock = clock
        now, rng = clock(), Random(f"{me.engine_id}/{me.rank}")  # spreads the ranks' tries
        self._sites = [
            _Site(place, PlaceWarmup(patience.claim_s, patience.read_s, now, rng, warm_up.pauses))
            for place in warm_up.places
        ]
        self.followed: dict[Peer, _Site] = {}
        self.alarm: float | None = now if self._sites else None

    @property
    def num_warm(self) -> int:
        """Places whose lender is warm now."""
        return sum(site.warmup.state is WarmupState.WARM for site in self._sites)

    @property
    def num_open(self) -> int:
        """Peers and reads that we keep track of; bounded by places and ranks."""
        return len(self.followed) + sum(site.reads for site in self._sites)

    def tick(self, now: float) -> None:
        """Do what is due at :attr:`alarm`."""
        for site in self._sites:
            self._do(site, site.warmup.tick(now))
        self._set_alarm()

    # What happened to peers

    def welcomed(self, peer: Peer) -> None:
        """A peer has answered a greeting."""
        self._advance(peer, WarmupState.GREETING, "welcomed")

    def ready(self, peer: Peer) -> None:
        """A peer's ranks are connected."""
        self._advance(peer, WarmupState.CONNECTING, "ready")

    def closed(self, peer: Peer) -> None:
        """A peer is of no use any more; its place rests, and is greeted again."""
        site = self.followed[peer]
        known = self._peers.find_peer(peer.key)
        if site.warmup.state is not WarmupState.GREETING:
            self._lost(site, peer.reason)
        elif peer.key.engine_id == self._engine_id:
            self._skip(site)
        elif known is not None:  # a pull has dialled the same boot meanwhile
            self._unfollow(site)
            self._follow(site, known)
        else:
            self._lost(site, peer.reason)

    def probed(self, probe: ProbeRead, answer: ReadSettled) -> None:
        """A probe read is over."""
        site, error = probe.site, answer.settled.error
        site.reads -= 1
        if site.peer is not probe.peer or site.warmup.state is not WarmupState.PROBING:
            return
        if error is not None:
            self._unfollow(site)
            if isinstance(error, PeerLost | PeerUnknown) or not probe.peer.pulls:
                self._leave(probe.peer, f"probe read: {error}")
            self._lost(site, f"probe read: {error}")
        elif not site.reads:
            self._is_warm(site)

    # What is to be done

    def _advance(self, peer: Peer, state: WarmupState, event: str) -> None:
        site = self.followed[peer]
        if site.warmup.state is state:
            self._enter(site, event)

    def _enter(self, site: _Site, event: str) -> None:
        self._do(site, site.warmup.enter(event, self._clock()))
        self._set_alarm()

    def _do(self, site: _Site, steps: Sequence[WarmupStep]) -> None:
        for step in steps:
            if step is WarmupStep.GREET:
                self._follow(site, self._peers.to_place(site.place.host, site.place.port))
            elif step is WarmupStep.PROBE:
                self._probe(site)
            else:
                peer = self._unfollow(site)
                if peer is not None:
                    self._leave(peer, "no answer in time to a warm-up")

    def _follow(self, site: _Site, peer: Peer) -> None:
        """Go on with ``peer`` from where it stands: a pull may have greeted it already."""
        if peer.key.engine_id == self._engine_id:
            self._skip(site)
            return
        site.peer = peer
        self.followed[peer] = site
        if peer.welcome is not None and peer.state is not PeerState.CLOSED:
            self._enter(site, "welcomed")
            if peer.state is PeerState.READY:
                self._enter(site, "ready")

    def _unfollow(self, site: _Site) -> Peer | None:
        peer, site.peer = site.peer, None
        if peer is not None:
            self.followed.pop(peer, None)
        return peer

    def _skip(self, site: _Site) -> None:
        log.info("pdconn: warm_peers: this engine itself is not warmed: place=%s", site.place)
        self._unfollow(site)
        self._enter(site, "ourselves")

    def _lost(self, site: _Site, reason: str) -> None:
        """Try again later.  Only the first of several failures in a row is logged at INFO."""
        level = logging.DEBUG if site.is_known_cold else logging.INFO
        log.log(level, "pdconn: %s is not warm: %s; trying again", site.place, reason)
        site.is_known_cold = True
        self._unfollow(site)
        self._enter(site, "lost")

    def _leave(self, peer: Peer, reason: str) -> None:
        """Close a peer that no pull uses; pulls that use it judge for themselves."""
        if not peer.pulls:
            self._peers.close(peer, reason)
        elif peer.state is PeerState.READY:
            self._peers.retire(peer, reason)

    def _probe(self, site: _Site) -> None:
        peer = site.peer
        assert peer is not None
        if self._scratch is None or not peer.ranks:
            self._is_warm(site)
        elif site.reads:
            self._lost(site, "an earlier probe read is not over")
        else:
            try:
                reads = list(_probe_reads(self._scratch, peer))
            except TransportError as error:
                self._lost(site, f"probe read: {error}")
                if not peer.pulls:
                    self._leave(peer, f"probe read: {error}")
                return
            site.reads = len(reads)
            for rank, spans in reads:
                self._post(Read(ProbeRead(site, peer), rank, spans))

    def _is_warm(self, site: _Site) -> None:
        assert site.peer is not None
        log.info("pdconn: warm: %s", site.peer.key)
        site.is_known_cold = False
        self._enter(site, "probed")

    def _set_alarm(self) -> None:
        times = (site.warmup.next_deadline() for site in self._sites)
        self.alarm = min((at for at in times if at is not None), default=None)


def _probe_reads(scratch: Memory, peer: Peer) -> Iterator[tuple[PeerId, Spans]]:
    assert peer.welcome is not None
    for rank, connected in peer.ranks.items():
        yield connected, probe_page(scratch, peer.welcome.ranks[rank].references)


def probe_page(scratch: Memory, theirs: KVCacheReferences) -> Spans:
    """A read of the first bytes of every region of ``theirs``, into ``scratch``.

    Regions on another device than the first are left out, and those beyond ``MAX_PROBED``.

    Raises:
        BadSpans: a region where no memory can be.
    """
    memories = theirs.memories()
    alike = [memory for memory in memories if memory.device == memories[0].device][:MAX_PROBED]
    part = scratch.nbytes // len(alike)
    return Spans(
        np.arange(len(alike), dtype=np.uint64) * np.uint64(part) + np.uint64(scratch.base),
        np.array([memory.base for memory in alike], dtype=np.uint64),
        np.array([min(part, memory.nbytes) for memory in alike], dtype=np.uint64),
        scratch.device,
        alike[0].device,
    )
