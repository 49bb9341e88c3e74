"""What this router has asked engines for and not had back.  Pure.

Engines tell their load once a second; what was given to one since then only its router
knows.  So both count: an engine is as busy as it says, or as we made it, whichever is more.
"""

from __future__ import annotations

from collections import Counter


class Flight:
    """One request at one engine; landing twice does no harm."""

    def __init__(self, flights: Flights, engine: str, num_tokens: int) -> None:
        self._flights: Flights | None = flights
        self._engine = engine
        self._num_tokens = num_tokens

    def land(self) -> None:
        """The engine is done with it."""
        flights, self._flights = self._flights, None
        if flights is not None:
            flights.end(self._engine, self._num_tokens)


class Flights:
    """Requests and prompt tokens that are with each engine."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def take_off(self, engine: str, num_tokens: int) -> Flight:
        """A request goes to ``engine``, which has ``num_tokens`` of its prompt to compute."""
        self._requests[engine] += 1
        self._tokens[engine] += num_tokens
        return Flight(self, engine, num_tokens)

    def end(self, engine: str, num_tokens: int) -> None:
        """What took off has landed."""
        self._requests[engine] -= 1
        self._tokens[engine] -= num_tokens
        if not self._requests[engine]:
            del self._requests[engine], self._tokens[engine]

    def num_requests(self, engine: str) -> int:
        """Requests that are with an engine."""
        return self._requests[engine]

    def num_tokens(self, engine: str) -> int:
        """Prompt tokens that it has to compute for them."""
        return self._tokens[engine]

    def __len__(self) -> int:
        return self._requests.total()
