"""Warming: lenders are greeted and touched before the first request for them.

What is due when is decided in :mod:`pdconn.puller.warmup`; here it is done, with the very
connections that pulls use, so a request that comes meanwhile joins what was begun.

Nobody pays for it but us.  A warm-up makes no room for itself among the peers, never closes
one that a pull uses, and what it reads goes to a page that holds nothing: the first bytes
of a lender's registered memory, which need no lease, as nobody believes them.  A touch that
hangs is left alone, and its place is not touched again before it ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import Patience
from pdconn.protocol.messages import Described
from pdconn.puller.connections import PeerTable
from pdconn.puller.jobs import Job, Read, ReadSettled
from pdconn.puller.peers import Peer, PeerKey
from pdconn.puller.warmup import Place, PlaceWarmup, Step, WarmupState
from registration.references import KVCacheReferences
from transport import Memory, PeerId, PeerLost, PeerUnknown, Spans, TransportError

log = logging.getLogger(__name__)

MAX_TOUCHED = 64
"""Regions of one rank that a touch reaches; each gets its part of the page."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Whom to warm.

    ``scratch`` is registered memory of ours that holds nothing; without it lenders are
    connected and not touched.
    """

    places: tuple[Place, ...] = ()
    scratch: Memory | None = None


@dataclass(slots=True, eq=False)
class _Site:
    """A place; ``peer`` is who is asked, or greeted, there; ``reads`` are touches not over.

    ``key`` is who lends there, as the latest answer has it.
    """

    place: Place
    warmth: PlaceWarmup
    key: PeerKey | None = None
    peer: Peer | None = None
    reads: int = 0
    is_known_cold: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ProbeRead:
    """The tag of a read that nobody waits for but us."""

    site: _Site
    peer: Peer


class PeerWarmup:
    """Keeps the lenders at some places warm, for one decode rank.

    Args:
        engine_id: what we call ourselves; we do not warm ourselves.
        warm_up: whom to warm.
        connections: those that pulls use.
        post: gives a read to whoever reads.
        patience: as pulls have it with lenders.
        clock: seconds that never go back.
        rng: spreads the tries.
    """

    def __init__(
        self,
        engine_id: str,
        warm_up: WarmUp,
        connections: PeerTable,
        post: Callable[[Job], None],
        *,
        patience: Patience,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._engine_id = engine_id
        self._scratch = warm_up.scratch
        self._connections = connections
        self._post = post
        self._clock = clock
        now = clock()
        self._sites = [
            _Site(place, PlaceWarmup(patience.claim_s, patience.read_s, now, rng))
            for place in warm_up.places
        ]
        self._by_peer: dict[Peer, _Site] = {}
        self._alarm: float | None = now if self._sites else None

    @property
    def num_warm(self) -> int:
        """Places whose lender is warm now."""
        return sum(site.warmth.state is WarmupState.WARM for site in self._sites)

    @property
    def num_open(self) -> int:
        """Peers and reads that we keep track of; bounded by places and ranks."""
        return len(self._by_peer) + sum(site.reads for site in self._sites)

    def next_deadline(self) -> float | None:
        """When :meth:`tick` should run next, or None when only an event can matter."""
        return self._alarm

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._alarm is None or now < self._alarm:
            return
        for site in self._sites:
            self._do(site, site.warmth.tick(now))
        self._set_alarm()

    # What the connections say

    def described(self, peer: Peer, said: Described) -> None:
        """Who lends at a place has said who it is."""
        site = self._by_peer.get(peer)
        if site is None:
            return
        self._unfollow(site)
        if said.engine_id == self._engine_id:
            log.info("pdconn: %s is this engine, and is not warmed", site.place)
            self._enter(site, "ourselves")
            return
        place = site.place
        site.key = PeerKey(place.host, place.port, said.engine_id, said.incarnation)
        self._enter(site, "told")

    def welcomed(self, peer: Peer) -> None:
        """A peer has answered a greeting."""
        self._heard(peer, WarmupState.GREETING, "welcomed")

    def ready(self, peer: Peer) -> None:
        """A peer's ranks are connected."""
        self._heard(peer, WarmupState.CONNECTING, "ready")

    def closed(self, peer: Peer) -> None:
        """A peer is of no use any more; its place rests, and is asked again."""
        site = self._by_peer.get(peer)
        if site is not None:
            self._lost(site, peer.reason)

    def touched(self, answer: ReadSettled) -> None:
        """A touch is over."""
        touch = answer.tag
        assert isinstance(touch, ProbeRead)
        site, error = touch.site, answer.settled.error
        site.reads -= 1
        if site.peer is not touch.peer or site.warmth.state is not WarmupState.TOUCHING:
            return
        if error is not None:
            self._unfollow(site)
            if isinstance(error, PeerLost | PeerUnknown) or not touch.peer.pulls:
                self._leave(touch.peer, f"touch: {error}")
            self._lost(site, f"touch: {error}")
        elif not site.reads:
            self._is_warm(site)

    # What is to be done

    def _heard(self, peer: Peer, state: WarmupState, event: str) -> None:
        site = self._by_peer.get(peer)
        if site is not None and site.warmth.state is state:
            self._enter(site, event)

    def _enter(self, site: _Site, event: str) -> None:
        self._do(site, site.warmth.enter(event, self._clock()))
        self._set_alarm()

    def _do(self, site: _Site, steps: Sequence[Step]) -> None:
        for step in steps:
            if step is Step.ASK:
                self._follow(site, self._connections.ask(site.place.host, site.place.port))
            elif step is Step.GREET:
                assert site.key is not None
                self._greet(site, site.key)
            elif step is Step.TOUCH:
                self._touch(site)
            else:
                peer = self._unfollow(site)
                if peer is not None:
                    self._leave(peer, "no answer in time to a warm-up")

    def _greet(self, site: _Site, key: PeerKey) -> None:
        peer = self._connections.to(key, may_evict=False)
        self._follow(site, peer)
        # It may be known already, from a request.
        if peer.welcome is not None and not peer.is_closed:
            self._enter(site, "welcomed")
            if peer.state is PeerState.READY:
                self._enter(site, "ready")

    def _follow(self, site: _Site, peer: Peer) -> None:
        """What happens to ``peer`` matters to the place from now on."""
        site.peer = peer
        self._by_peer[peer] = site
        if peer.is_closed:
            self._lost(site, peer.reason)

    def _unfollow(self, site: _Site) -> Peer | None:
        peer, site.peer = site.peer, None
        if peer is not None:
            self._by_peer.pop(peer, None)
        return peer

    def _lost(self, site: _Site, reason: str) -> None:
        """Try again later.  Only the first of several tries in vain is told of."""
        level = logging.DEBUG if site.is_known_cold else logging.INFO
        log.log(level, "pdconn: %s is not warm: %s; trying on", site.place, reason)
        site.is_known_cold = True
        self._unfollow(site)
        self._enter(site, "lost")

    def _leave(self, peer: Peer, reason: str) -> None:
        """Close a peer that only we use; pulls that use it judge for themselves."""
        if not peer.pulls:
            self._connections.close(peer, reason)
        elif peer.state is PeerState.READY:
            self._connections.retire(peer, reason)

    def _touch(self, site: _Site) -> None:
        peer = site.peer
        assert peer is not None
        if self._scratch is None or not peer.ranks:
            self._is_warm(site)
        elif site.reads:
            self._lost(site, "an earlier touch is not over")
        else:
            try:
                reads = list(_touches(self._scratch, peer))
            except TransportError as error:
                self._lost(site, f"touch: {error}")
                if not peer.pulls:
                    self._leave(peer, f"touch: {error}")
                return
            site.reads = len(reads)
            for rank, spans in reads:
                self._post(Read(ProbeRead(site, peer), rank, spans))

    def _is_warm(self, site: _Site) -> None:
        assert site.peer is not None
        log.info("pdconn: warm: %s", site.peer.key)
        site.is_known_cold = False
        self._enter(site, "touched")

    def _set_alarm(self) -> None:
        times = (site.warmth.next_deadline() for site in self._sites)
        self._alarm = min((at for at in times if at is not None), default=None)


def _touches(scratch: Memory, peer: Peer) -> Iterator[tuple[PeerId, Spans]]:
    assert peer.welcome is not None
    for rank, connected in peer.ranks.items():
        yield connected, probe_page(scratch, peer.welcome.ranks[rank].references)


def probe_page(scratch: Memory, theirs: KVCacheReferences) -> Spans:
    """A read of the first bytes of every region of ``theirs``, into ``scratch``.

    Regions on another device than the first are left out, and those beyond ``MAX_TOUCHED``.

    Raises:
        BadSpans: a region where no memory can be.
    """
    memories = theirs.memories()
    alike = [memory for memory in memories if memory.device == memories[0].device][:MAX_TOUCHED]
    part = scratch.nbytes // len(alike)
    return Spans(
        np.arange(len(alike), dtype=np.uint64) * np.uint64(part) + np.uint64(scratch.base),
        np.array([memory.base for memory in alike], dtype=np.uint64),
        np.array([min(part, memory.nbytes) for memory in alike], dtype=np.uint64),
        scratch.device,
        alike[0].device,
    )
