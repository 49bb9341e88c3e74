"""Warm-up: pulls of a page that no request needs, so that a request's pull finds its lender known.

::

    timer ── due ──► PagePull ── greeting, connection, read: as every pull ──► warm
      ▲                 │                                                       │
      └───── pause ─────┴── failed, for any reason           lender closed ─────┘

A page's pull runs through the machine, the peers and the reader of all pulls, so a request that
comes meanwhile joins what was begun.  Three things are its own:

- It knows a place, not the boot that lends there: the greeting asks for any, and the answer names
  one.  A boot that ends takes its connection along, and the timer finds the next one.
- It reads the first bytes of each region of the lender's memory into a page that holds nothing.
  Nobody uses those bytes, so nothing needs to be lent: the claim is granted here, not by the
  lender, and so is the confirmation.
- It costs requests nothing.  It makes no room for itself among the peers, never closes one that
  a request uses, and fails without a report.  A page is not read into by two pulls of one place:
  where a read hangs, the next pull fails until that read has settled.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

import numpy as np

from pdconn.lifecycle import pull as machine
from pdconn.lifecycle.pull import Effect, Patience, Pull
from pdconn.planning.plan import Moved, Plan
from pdconn.puller.peers import Peer, PeerPull, PeerTable, Rank
from registration.references import KVCacheReferences
from transport import Memory, Spans, TransportError

log = logging.getLogger(__name__)

MAX_WARM_PEERS = 256
"""Places that one engine may be told to warm."""

MAX_REGIONS = 64
"""Regions of one rank that a page's pull reads; each gets its part of the page."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine may lend: the host and port that its tickets name."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: object) -> Place:
        """From ``host:port``, or ``[v6 address]:port``.

        Raises:
            ValueError: saying what was expected.
        """
        if isinstance(text, str):
            host, colon, port = text.rpartition(":")
            if host.startswith("[") and host.endswith("]"):
                host = host[1:-1]
            elif ":" in host:
                host = ""  # which of its colons comes before the port?
            is_number = port.isascii() and port.isdecimal() and len(port) <= 5
            if host and host.isprintable() and colon and is_number and 0 < int(port) < 65536:
                return cls(host, int(port))
        raise ValueError('"host:port" with a port from 1 to 65535, like "10.0.0.1:5600"')


def parse_places(listed: Any) -> tuple[Place, ...]:
    """A list of places, each named once.

    Raises:
        ValueError: saying what was expected, and of which entry.
    """
    if not isinstance(listed, list) or len(listed) > MAX_WARM_PEERS:
        raise ValueError(f'a list of at most {MAX_WARM_PEERS} "host:port"')
    places: dict[Place, None] = {}
    for number, text in enumerate(listed):
        try:
            place = Place.parse(text)
        except ValueError as error:
            raise ValueError(f"{error}, as entry {number}") from None
        if place in places:
            raise ValueError(f"every place once, and entry {number} repeats {place}")
        places[place] = None
    return tuple(places)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between two tries: ``first_s``, then twice as long each time, to ``longest_s``."""

    first_s: float = 1.0
    longest_s: float = 30.0


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The lenders to warm.

    ``scratch`` is registered memory of ours that holds nothing; without it lenders are
    connected and not read from.
    """

    places: tuple[Place, ...] = ()
    scratch: Memory | None = None
    pauses: Pauses = field(default_factory=Pauses)


class RetryTimer:
    """When a place is tried again.

    Args:
        now: when it is tried first.
        rng: pauses are drawn from the upper half of what they may be, or all ranks of all
            engines would come back to a lender at once.
        pauses: between tries.

    Attributes:
        due_at: None while a try is under way, or has succeeded.
    """

    def __init__(self, now: float, rng: Random, pauses: Pauses) -> None:
        self.due_at: float | None = now
        self._rng = rng
        self._pauses = pauses
        self._pause_s = pauses.first_s
        self._lasts_since: float | None = None

    def begin_try(self, now: float) -> bool:
        """Whether the time has come; then a try is under way."""
        if self.due_at is None or now < self.due_at:
            return False
        self.due_at = None
        return True

    def succeeded(self, now: float) -> None:
        """The lender is warm, from ``now`` on."""
        self._lasts_since = now

    def failed(self, now: float) -> None:
        """The try failed, or what it came to is lost: pause, ever longer.

        A lender that was warm for long is tried again soon, one that comes and goes is not.
        """
        since, pauses = self._lasts_since, self._pauses
        if since is not None and now - since >= pauses.longest_s:
            self._pause_s = pauses.first_s
        self._lasts_since = None
        self.due_at = now + self._pause_s * self._rng.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, pauses.longest_s)


@dataclass(slots=True, eq=False)
class WarmPlace:
    """A place to keep warm.

    Attributes:
        reader: the pull that may still read into the page for this place.
        is_known_cold: whether its failure has been logged since it was warm.
    """

    place: Place
    timer: RetryTimer
    reader: PagePull | None = None
    is_known_cold: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class PagePull(PeerPull):
    """A pull of the first bytes of a lender's regions into ``scratch``, or of nothing without it.

    Attributes:
        is_blocked: an earlier pull of the place still reads.
    """

    is_requested: ClassVar[bool] = False

    place: WarmPlace
    scratch: Memory | None
    is_blocked: bool = False

    def make_plan(self, clock: Callable[[], float]) -> None:
        """Plan a read from each of the lender's ranks that requests read from."""
        earlier = self.place.reader
        if earlier is not None and earlier.reading:
            self.is_blocked, self.plan = True, "an earlier read of its page is not over"
            return
        self.place.reader = self
        try:
            reads = tuple(self._page_reads())
        except TransportError as error:
            self.plan = f"{type(error).__name__}: {error}"
        else:
            self.plan = Plan(reads, Moved(), sum(len(spans) for _, spans in reads))

    def _page_reads(self) -> Iterator[tuple[int, Spans]]:
        welcome = self.peer.welcome
        assert welcome is not None
        if self.scratch is not None:
            for rank in self.peer.ranks:
                yield rank, page_spans(self.scratch, welcome.ranks[rank].references)


def page_spans(scratch: Memory, theirs: KVCacheReferences) -> Spans:
    """A read of the first bytes of every region of ``theirs``, into ``scratch``.

    Regions on another device than the first are left out, and those beyond ``MAX_REGIONS``.

    Raises:
        BadSpans: a region where no memory can be.
    """
    memories = theirs.memories()
    alike = [memory for memory in memories if memory.device == memories[0].device][:MAX_REGIONS]
    part = scratch.nbytes // len(alike)
    return Spans(
        np.arange(len(alike), dtype=np.uint64) * np.uint64(part) + np.uint64(scratch.base),
        np.array([memory.base for memory in alike], dtype=np.uint64),
        np.array([min(part, memory.nbytes) for memory in alike], dtype=np.uint64),
        scratch.device,
        alike[0].device,
    )


class PeerWarmup:
    """Keeps the lenders at some places warm, for one decode rank.

    Args:
        me: the rank; its own engine is not warmed.
        warm_up: the lenders to warm.
        peers: those that requests' pulls use; its owner passes on which of them are closed.
        patience: as requests' pulls have it with lenders.
        clock: seconds that never go back.

    Attributes:
        warm: the places that are warm, by the lender there.
        alarm: when :meth:`begin_due` is to be called, or None when only an event can matter.
    """

    def __init__(
        self,
        me: Rank,
        warm_up: WarmUp,
        peers: PeerTable,
        *,
        patience: Patience,
        clock: Callable[[], float],
    ) -> None:
        self._engine_id = me.engine_id
        self._scratch = warm_up.scratch
        self._peers = peers
        self._patience = patience
        self._clock = clock
        now, rng = clock(), Random(f"{me.engine_id}/{me.rank}")  # spreads the ranks' tries
        self._places = [
            WarmPlace(place, RetryTimer(now, rng, warm_up.pauses)) for place in warm_up.places
        ]
        self._numbers = itertools.count()
        self.warm: dict[Peer, WarmPlace] = {}
        self.alarm: float | None = now if self._places else None

    def begin_due(self, now: float) -> list[PagePull]:
        """The pulls that begin at ``now``."""
        begun = []
        for place in self._places:
            if place.timer.begin_try(now):
                peer = self._peers.to_place(place.place.host, place.place.port)
                if peer.key.engine_id == self._engine_id:
                    self._leave_out(place)
                else:
                    begun.append(self._begin(place, peer, now))
        self._set_alarm()
        return begun

    def perform(self, pull: PagePull, effect: Effect) -> list[Effect]:
        """Do what the machine of ``pull`` asks for besides reading; what it asks for next."""
        now = self._clock()
        if isinstance(effect, machine.SendClaim):
            return pull.machine.granted(effect.seq, math.inf, now)
        if isinstance(effect, machine.SendConfirm):
            return pull.machine.confirmed(effect.seq)
        if isinstance(effect, machine.ReportReceived):
            self._received(pull, now)
        elif isinstance(effect, machine.ReportFailed):
            self._failed(pull, effect.reason, now)
        if pull.place.reader is pull and not pull.reading:
            pull.place.reader = None
        return []

    def lender_closed(self, peer: Peer) -> None:
        """``peer`` is of no use any more."""
        place = self.warm.pop(peer, None)
        if place is not None:
            self._pause(place, peer.reason, self._clock())

    def _begin(self, place: WarmPlace, peer: Peer, now: float) -> PagePull:
        pull = PagePull(
            pull=f"warm-up {next(self._numbers)} of {place.place}",
            machine=Pull(self._patience, now),
            peer=peer,
            place=place,
            scratch=self._scratch,
        )
        pull.machine.want(now)
        return pull

    def _received(self, pull: PagePull, now: float) -> None:
        log.info("pdconn: warm: %s", pull.peer.key)
        pull.place.is_known_cold = False
        pull.place.timer.succeeded(now)
        self.warm[pull.peer] = pull.place

    def _failed(self, pull: PagePull, reason: str, now: float) -> None:
        peer = pull.peer
        if peer.key.engine_id == self._engine_id:
            self._leave_out(pull.place)
            return
        if not peer.is_needed and not pull.is_blocked:
            # A place that names a new boot at every greeting must not fill the table.
            self._peers.close(peer, reason)
        self._pause(pull.place, peer.reason or reason, now)

    def _leave_out(self, place: WarmPlace) -> None:
        """Never try the place again: it is ours."""
        log.info("pdconn: warm_peers: this engine itself is not warmed: place=%s", place.place)

    def _pause(self, place: WarmPlace, reason: str, now: float) -> None:
        """Only the first of several failures in a row is logged at INFO."""
        level = logging.DEBUG if place.is_known_cold else logging.INFO
        log.log(level, "pdconn: %s is not warm: %s; trying again", place.place, reason)
        place.is_known_cold = True
        place.timer.failed(now)
        self._set_alarm()

    def _set_alarm(self) -> None:
        times = (place.timer.due_at for place in self._places)
        self.alarm = min((at for at in times if at is not None), default=None)
