"""Requests that this router has sent to engines and that are not finished.  Pure.

Engines report their load once a second; what was sent since then only the router knows.  So
the larger of both counts: what an engine reports, or what this router has sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class InflightTracker:
    """Requests and prompt tokens in flight at each engine."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._ranks: Counter[tuple[str, int]] = Counter()

    def start(self, engine: str, num_tokens: int, rank: int | None = None) -> Callable[[], None]:
        """A request is sent to ``engine``; call what this returns when it is finished.

        A second call of the returned function has no effect.

        Args:
            engine: base URL.
            num_tokens: prompt tokens that the engine has to compute.
            rank: the data-parallel rank that the request names, if any.
        """
        self._add(engine, num_tokens, rank, 1)
        finished = False

        def finish() -> None:
            nonlocal finished
            if not finished:
                finished = True
                self._add(engine, num_tokens, rank, -1)

        return finish

    def _add(self, engine: str, num_tokens: int, rank: int | None, step: int) -> None:
        self._requests[engine] += step
        self._tokens[engine] += step * num_tokens
        if not self._requests[engine]:
            del self._requests[engine], self._tokens[engine]
        if rank is not None:
            self._ranks[engine, rank] += step
            if not self._ranks[engine, rank]:
                del self._ranks[engine, rank]

    def at_rank(self, engine: str, rank: int) -> int:
        """Requests in flight that name a rank of an engine."""
        return self._ranks[engine, rank]

    def at(self, engine: str) -> tuple[int, int]:
        """Requests in flight at an engine, and prompt tokens that it has to compute for them."""
        return self._requests[engine], self._tokens[engine]

    def __len__(self) -> int:
        return self._requests.total()
