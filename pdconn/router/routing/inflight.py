"""What this router has asked engines for and not had back.  Pure.

Engines tell their load once a second; what was given to one since then only its router
knows.  So both count: an engine is as busy as it says, or as we made it, whichever is more.
"""

from __future__ import annotations

from collections import Counter


class InflightEntry:
    """One request at one engine; landing twice does no harm."""

    def __init__(
        self, flights: InflightTracker, engine: str, num_tokens: int, rank: int | None
    ) -> None:
        self._flights: InflightTracker | None = flights
        self._what = engine, num_tokens, rank

    def land(self) -> None:
        """The engine is done with it."""
        flights, self._flights = self._flights, None
        if flights is not None:
            flights.end(*self._what)


class InflightTracker:
    """Requests and prompt tokens that are with each engine."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._ranks: Counter[tuple[str, int]] = Counter()

    def take_off(self, engine: str, num_tokens: int, rank: int | None = None) -> InflightEntry:
        """A request goes to ``engine``, which has ``num_tokens`` of its prompt to compute.

        ``rank``: the data-parallel rank that it names, if it names one.
        """
        self._requests[engine] += 1
        self._tokens[engine] += num_tokens
        if rank is not None:
            self._ranks[engine, rank] += 1
        return InflightEntry(self, engine, num_tokens, rank)

    def end(self, engine: str, num_tokens: int, rank: int | None = None) -> None:
        """What took off has landed."""
        self._requests[engine] -= 1
        self._tokens[engine] -= num_tokens
        if not self._requests[engine]:
            del self._requests[engine], self._tokens[engine]
        if rank is not None:
            self._ranks[engine, rank] -= 1
            if not self._ranks[engine, rank]:
                del self._ranks[engine, rank]

    def at_rank(self, engine: str, rank: int) -> int:
        """Requests that name a rank of an engine and are with it."""
        return self._ranks[engine, rank]

    def num_requests(self, engine: str) -> int:
        """Requests that are with an engine."""
        return self._requests[engine]

    def num_tokens(self, engine: str) -> int:
        """Prompt tokens that it has to compute for them."""
        return self._tokens[engine]

    def __len__(self) -> int:
        return self._requests.total()
