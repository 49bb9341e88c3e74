"""Warm-up of one place: what to do next about a lender that is to be known before any request.

::

    RESTING ──due──► GREETING ──welcomed──► CONNECTING ──ready──► PROBING ──probed──► WARM
       ▲                │ └──ourselves──► SKIPPED                                      │
       └──────lost──────┴──────────────────────── lost ◄───────────────────────────────┘

A ticket names a boot of a lender; here only the place is known, so the greeting asks for any
boot, and the answer names one.  A *probe read* is a small read whose bytes are not used: the
first read from a peer sets its connection up.

Every failure is ``lost``: the next try comes after a pause, and pauses grow until a lender
has stayed warm.  A boot that ends takes its connection along, so the next one is found the
same way.

Pure: time and randomness are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from random import Random
from typing import Any

MAX_WARM_PEERS = 256
"""Places that one engine may be told to warm."""


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


class WarmupState(StrEnum):
    """Where the warm-up of one place stands."""

    RESTING = "resting"
    GREETING = "greeting"
    CONNECTING = "connecting"
    PROBING = "probing"
    WARM = "warm"
    SKIPPED = "skipped"


_S = WarmupState

TRANSITIONS: dict[tuple[WarmupState, str], WarmupState] = {
    (_S.RESTING, "due"): _S.GREETING,
    (_S.GREETING, "welcomed"): _S.CONNECTING,
    (_S.GREETING, "ourselves"): _S.SKIPPED,
    (_S.GREETING, "lost"): _S.RESTING,
    (_S.CONNECTING, "ready"): _S.PROBING,
    (_S.CONNECTING, "lost"): _S.RESTING,
    (_S.PROBING, "probed"): _S.WARM,
    (_S.PROBING, "lost"): _S.RESTING,
    (_S.WARM, "lost"): _S.RESTING,
}
"""The whole life of a place; anything else is a mistake of the caller."""


class WarmupStep(Enum):
    """What is to be done now."""

    GREET = auto()
    """Greet the lender at the place, whichever boot it is."""
    PROBE = auto()
    """Make a small read from each rank that we read from."""
    LEAVE = auto()
    """It took too long: close the peer, unless pulls use it."""


_STEPS = {_S.GREETING: WarmupStep.GREET, _S.PROBING: WarmupStep.PROBE}


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between two tries: ``first_s``, then twice as long each time, to ``longest_s``."""

    first_s: float = 1.0
    longest_s: float = 30.0


class PlaceWarmup:
    """The warm-up of one place.

    Args:
        answer_s: how long the lender may take to answer, in seconds.
        connect_s: how long our transport may take to connect.
        now: when to begin.
        rng: pauses are drawn from the upper half of what they may be, or all ranks of all
            engines would come back to a lender at once.
        pauses: between tries.
    """

    def __init__(
        self, answer_s: float, connect_s: float, now: float, rng: Random, pauses: Pauses
    ) -> None:
        self.state = WarmupState.RESTING
        self._allowed = {_S.GREETING: answer_s, _S.CONNECTING: connect_s}
        self._until: float | None = now
        self._warm_since: float | None = None
        self._pauses = pauses
        self._pause_s = pauses.first_s
        self._rng = rng

    def next_deadline(self) -> float | None:
        """When to tick, or None when only an event can matter."""
        return self._until

    def tick(self, now: float) -> Sequence[WarmupStep]:
        """Time passed: begin anew, or give a try up."""
        if self._until is None or now < self._until:
            return ()
        if self.state is _S.RESTING:
            return self.enter("due", now)
        return [WarmupStep.LEAVE, *self.enter("lost", now)]

    def enter(self, event: str, now: float) -> Sequence[WarmupStep]:
        """Move on; what is to be done in the new state.

        Raises:
            ValueError: the event makes no sense in this state.
        """
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise ValueError(f"a {self.state} place cannot be {event}") from None
        if self.state is _S.RESTING:
            self._rest(now)
        else:
            allowed = self._allowed.get(self.state)
            self._until = None if allowed is None else now + allowed
        if self.state is _S.WARM:
            self._warm_since = now
        step = _STEPS.get(self.state)
        return () if step is None else (step,)

    def _rest(self, now: float) -> None:
        """A lender that was warm for long is tried again soon, one that comes and goes is not."""
        if self._warm_since is not None and now - self._warm_since >= self._pauses.longest_s:
            self._pause_s = self._pauses.first_s
        self._warm_since = None
        self._until = now + self._pause_s * self._rng.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, self._pauses.longest_s)
