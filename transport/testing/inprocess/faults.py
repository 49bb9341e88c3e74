"""Faults that an in-process network can inject into a read, and a manual clock for tests.

A fault is plain data, so a test can queue a few, and a simulation can draw thousands
from its own seeded generator::

    network.inject(reader.peer_id, peer, Late(0.5), Failing(PeerLost("cable cut"), after_bytes=64))
    network.script = lambda read: Late(rng.expovariate(10.0))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transport.errors import TransportError
from transport.types import PeerId, Spans

Clock = Callable[[], float]
"""Seconds that never go back, like ``time.monotonic``."""


@dataclass(frozen=True, slots=True)
class Late:
    """The bytes land ``seconds`` after posting, from the peer's memory as it is at that time."""

    seconds: float

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError(f"late by {self.seconds} s: must not be below 0")


@dataclass(frozen=True, slots=True)
class Held:
    """The bytes land when the network's ``release_held`` is called."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing lands, and nothing settles until the peer is disconnected or killed."""


@dataclass(frozen=True, slots=True)
class Failing:
    """The first ``after_bytes`` bytes land, then the read settles with ``error``.

    Both happen ``seconds`` after posting.
    """

    error: TransportError
    after_bytes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.after_bytes < 0 or self.seconds < 0:
            raise ValueError(f"fails after {self.after_bytes} bytes and {self.seconds} s: below 0")


Fault = Late | Held | Lost | Failing


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The argument of a fault script: a read; ``number`` counts the network's reads from 0."""

    reader: PeerId
    peer: PeerId
    spans: Spans
    number: int
    posted_at: float


Script = Callable[[ReadRequest], Fault | None]
"""Maps a read to what happens to it; None lets it land at once."""


class ManualClock:
    """A clock that stands still between calls of ``advance``."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance by ``seconds``; reads that are due then land at the network's next progress.

        Raises:
            ValueError: ``seconds`` is below 0.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
