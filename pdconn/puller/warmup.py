"""Warmth: what to do next about a lender that is to be known before the first request.

::

    RESTING ──due──► ASKING ──told──► GREETING ──welcomed──► CONNECTING ──ready──► TOUCHING
       ▲               │ └──ourselves──► NEEDLESS                                     │
       │               │                                                           touched
       └─────lost──────┴───────────────── lost ◄──────────────────────── WARM ◄───────┘

A ticket names a boot of a lender; here nobody but a place is known, so whoever lends there
is asked who it is, in a visit of its own, and then greeted as for a ticket.  A *touch* is a
small read that nobody looks at: the first read from a peer sets its connection up.

Whatever goes wrong, whenever, is ``lost``: the next try comes after a pause, and pauses grow
until a lender has stayed warm.  A boot that ends takes its connection along, so the next
one is found the same way.

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

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where somebody may lend: the host and port that its tickets name."""

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
    """Where the warming of one place stands."""

    RESTING = "resting"
    ASKING = "asking"
    GREETING = "greeting"
    CONNECTING = "connecting"
    TOUCHING = "touching"
    WARM = "warm"
    NEEDLESS = "needless"


_S = WarmupState

TRANSITIONS: dict[tuple[WarmupState, str], WarmupState] = {
    (_S.RESTING, "due"): _S.ASKING,
    (_S.ASKING, "told"): _S.GREETING,
    (_S.ASKING, "ourselves"): _S.NEEDLESS,
    (_S.ASKING, "lost"): _S.RESTING,
    (_S.GREETING, "welcomed"): _S.CONNECTING,
    (_S.GREETING, "lost"): _S.RESTING,
    (_S.CONNECTING, "ready"): _S.TOUCHING,
    (_S.CONNECTING, "lost"): _S.RESTING,
    (_S.TOUCHING, "touched"): _S.WARM,
    (_S.TOUCHING, "lost"): _S.RESTING,
    (_S.WARM, "lost"): _S.RESTING,
}
"""The whole life of a place; anything else is a mistake of the caller."""


class Step(Enum):
    """What is to be done now."""

    ASK = auto()
    """Dial the place and ask who lends there."""
    GREET = auto()
    """Greet who that is, as for a ticket."""
    TOUCH = auto()
    """Make a small read from each rank that we read from."""
    LEAVE = auto()
    """It took too long: leave what was begun, unless somebody else uses it."""


_STEPS = {_S.ASKING: Step.ASK, _S.GREETING: Step.GREET, _S.TOUCHING: Step.TOUCH}


class PlaceWarmup:
    """The warming of one place.

    Args:
        answer_s: how long the lender may take for each answer, in seconds.
        connect_s: how long our transport may take to connect.
        now: when to begin.
        rng: pauses are drawn from the upper half of what they may be, or all ranks of all
            engines would come back to a lender at once.
    """

    def __init__(self, answer_s: float, connect_s: float, now: float, rng: Random) -> None:
        self.state = WarmupState.RESTING
        self._allowed = {_S.ASKING: answer_s, _S.GREETING: answer_s, _S.CONNECTING: connect_s}
        self._until: float | None = now
        self._warm_since: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._rng = rng

    def next_deadline(self) -> float | None:
        """When to tick, or None when only an event can matter."""
        return self._until

    def tick(self, now: float) -> Sequence[Step]:
        """Time passed: begin anew, or give a try up."""
        if self._until is None or now < self._until:
            return ()
        if self.state is _S.RESTING:
            return self.enter("due", now)
        return [Step.LEAVE, *self.enter("lost", now)]

    def enter(self, event: str, now: float) -> Sequence[Step]:
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
        """Who stayed warm for long is tried again soon, who comes and goes is not."""
        if self._warm_since is not None and now - self._warm_since >= LONGEST_PAUSE_S:
            self._pause_s = FIRST_PAUSE_S
        self._warm_since = None
        self._until = now + self._pause_s * self._rng.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
