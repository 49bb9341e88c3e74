"""What this router has in flight at each engine: requests, and prompt tokens to compute.

Engines compute prompts in the order in which they were sent, so a request's turn has come when
those before it have little left to compute.  Each data-parallel rank computes its own: of a request
that names one, those at other ranks are not before it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass


class Flight:
    """One request in flight at an engine."""

    __slots__ = ("_tracker", "engine", "num_tokens", "number", "rank")

    def __init__(
        self, tracker: InflightTracker, number: int, engine: str, num_tokens: int, rank: int | None
    ) -> None:
        self._tracker: InflightTracker | None = tracker
        self.number = number
        self.engine = engine
        self.num_tokens = num_tokens
        self.rank = rank

    def finish(self) -> None:
        """The request has ended.  Idempotent."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.end_flight(self)

    def is_before(self, other: Flight) -> bool:
        """Whether the engine may compute this one's prompt before that of ``other``.

        A request that names no rank may be at any.
        """
        share_rank = None in (self.rank, other.rank) or self.rank == other.rank
        return self.engine == other.engine and self.number < other.number and share_rank

    def when_ahead(self, most_tokens: int, act: Callable[[], object]) -> None:
        """Call ``act`` once the requests before this one have at most ``most_tokens`` to compute.

        At once if that is so now; never after this one has ended.
        """
        if self._tracker is not None:
            self._tracker.await_turn(self, most_tokens, act)


@dataclass(slots=True)
class _Turn:
    """A flight that waits for those before it; ``tokens``: what they have to compute."""

    flight: Flight
    tokens: int
    most_tokens: int
    act: Callable[[], object]


class InflightTracker:
    """Requests and prompt tokens in flight at each engine."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._ranks: Counter[tuple[str, int]] = Counter()
        self._numbers = itertools.count()
        # By engine and number, so in the order in which they were sent.
        self._flights: defaultdict[str, dict[int, Flight]] = defaultdict(dict)
        self._turns: dict[str, list[_Turn]] = {}

    def start_request(self, engine: str, num_tokens: int, rank: int | None = None) -> Flight:
        """Count a request to ``engine`` until its flight is finished.

        Args:
            engine: base URL.
            num_tokens: prompt tokens that the engine has to compute.
            rank: the data-parallel rank that the request names, if any.
        """
        flight = Flight(self, next(self._numbers), engine, num_tokens, rank)
        self._flights[engine][flight.number] = flight
        self._count(flight, 1)
        return flight

    def end_flight(self, flight: Flight) -> None:
        """A request has ended; those that wait for it to end may have their turn."""
        flights = self._flights[flight.engine]
        del flights[flight.number]
        if not flights:
            del self._flights[flight.engine]
        self._count(flight, -1)
        if turns := self._turns.pop(flight.engine, None):
            self._take_turns(flight, turns)

    def await_turn(self, flight: Flight, most_tokens: int, act: Callable[[], object]) -> None:
        """As :meth:`Flight.when_ahead`."""
        flights = self._flights[flight.engine].values()
        ahead = sum(one.num_tokens for one in flights if one.is_before(flight))
        if ahead <= most_tokens:
            act()
        else:
            turn = _Turn(flight, ahead, most_tokens, act)
            self._turns.setdefault(flight.engine, []).append(turn)

    def _take_turns(self, ended: Flight, turns: list[_Turn]) -> None:
        waiting: list[_Turn] = []
        ready: list[_Turn] = []
        for turn in turns:
            if turn.flight is ended:
                continue
            if ended.is_before(turn.flight):
                turn.tokens -= ended.num_tokens
            (ready if turn.tokens <= turn.most_tokens else waiting).append(turn)
        if waiting:
            self._turns[ended.engine] = waiting
        for turn in ready:
            turn.act()

    def _count(self, flight: Flight, step: int) -> None:
        engine = flight.engine
        self._requests[engine] += step
        self._tokens[engine] += step * flight.num_tokens
        if not self._requests[engine]:
            del self._requests[engine], self._tokens[engine]
        if flight.rank is not None:
            self._ranks[engine, flight.rank] += step
            if not self._ranks[engine, flight.rank]:
                del self._ranks[engine, flight.rank]

    def at_rank(self, engine: str, rank: int) -> int:
        """Requests in flight that name a rank of an engine."""
        return self._ranks[engine, rank]

    def requests_at(self, engine: str) -> tuple[int, int]:
        """Requests in flight at an engine, and prompt tokens that it has to compute for them."""
        return self._requests[engine], self._tokens[engine]

    def __len__(self) -> int:
        """Requests in flight, at all engines."""
        return self._requests.total()
