"""Engines that refuse requests again and again, and so get fewer for a while.  Pure.

An engine that is up and answers 429, 500, 502, 503 or 504, or breaks connections off, keeps its
share of requests until ``MOST_IN_A_ROW`` of them have failed without one that was answered between.
Then it rests: 1 s, 2, 4, 8, 15, 15, ... until the next failure, or its next answer ends that.  One
that says how long (``Retry-After``) rests that long, from the first time.

    ANSWERS ──fails, three in a row──► RESTS ──time──► gets requests again ──fails──► RESTS, longer
       ▲                                                         │
       └──────────────────────────answers────────────────────────┘

An engine that rests is asked only where no other is left.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MOST_IN_A_ROW = 3
"""As few as one may be the request's own fault, and a client could send such requests."""
FIRST_REST_S = 1.0
LONGEST_REST_S = 15.0
"""As between two probes of an engine that is down."""
LONGEST_NAMED_S = 60.0
"""Bound of what an engine names itself: no header takes it out for good."""


@dataclass(slots=True)
class _Failing:
    in_a_row: int = 0
    until_s: float = 0.0


class EngineRests:
    """Which engines rest."""

    def __init__(self) -> None:
        self._failing: dict[str, _Failing] = {}

    def __len__(self) -> int:
        """Engines whose last request failed: as a rule none."""
        return len(self._failing)

    def failed(self, engine: str, now: float, named_s: float | None = None) -> float | None:
        """Note a failure; the seconds that the engine rests from now on, if it does.

        Failures of requests that were sent before it rested count once: it rests already.
        """
        failing = self._failing.setdefault(engine, _Failing())
        if now < failing.until_s and named_s is None:
            return None
        failing.in_a_row += 1
        over = failing.in_a_row - MOST_IN_A_ROW
        rest_s = min(FIRST_REST_S * 2.0 ** min(over, 16), LONGEST_REST_S) if over >= 0 else 0.0
        if named_s is not None:
            rest_s = max(rest_s, min(named_s, LONGEST_NAMED_S))
        if not rest_s:
            return None
        failing.until_s = max(failing.until_s, now + rest_s)
        return rest_s

    def answered(self, engine: str) -> None:
        """Note an answer that is no such failure."""
        self._failing.pop(engine, None)

    def is_resting(self, engine: str, now: float) -> bool:
        """Whether others are asked before it."""
        failing = self._failing.get(engine)
        return failing is not None and now < failing.until_s

    def keep(self, engines: Collection[str]) -> None:
        """Forget the engines that are not among these."""
        self._failing = {name: one for name, one in self._failing.items() if name in engines}
