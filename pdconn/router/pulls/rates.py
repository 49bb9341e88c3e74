"""Time of engines as a line over tokens, fitted to measurements.  Pure.

The time to compute a prompt, and to pull a prefix, is linear in its tokens::

    seconds                         .  computed: fixed + tokens / rate of prefill
                               .
                          .            _ _ - -  pulled: fixed + bytes of a token / bandwidth
                     . _ _ - - ' ' '
              _ _.- '
        - - ' .
            .          ^ from here on a pull is faster
        0 ............................................ tokens

The line minimizes the squares of relative errors.  The weight of a measurement decreases with every
later one, so that a changed link or engine is followed.  Assumed points hold the line until there
are enough measurements.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

KEPT = 0.9
"""Weight of a measurement after the next one: about ten count."""
MOST_SEEN = 64
"""Measurements that are kept; the oldest has weight 0.001."""
ROUNDS = 3
"""Rounds of fitting, each with errors relative to the line of the previous one."""
ASSUMED_TOKENS = (0, 4096)
"""Token numbers of two assumed points, as if measured before everything else."""
ASSUMED_WEIGHT = 0.1
"""Weight of each of them."""
OUTLIER = 4.0
"""A measurement above this many times the expected time was probably delayed by other work."""
OUTLIER_WEIGHT = 0.1
"""Weight of such a measurement."""
SCATTER = 0.05
"""Typical relative deviation of measurements from the line."""
AGREES = 2.0
"""A stale line is confirmed by a measurement within this factor of it."""
MOST_TIMES = 16
"""Limit of the growth of the time after which a repeatedly confirmed line is stale."""
LEAST_S = 1e-3
"""Shorter times scatter as this one does."""


class Line:
    """The expected seconds for a number of tokens.

    Args:
        fixed_s: assumed seconds for 0 tokens.
        token_s: assumed seconds per token.
        kept: weight of past measurements; default :data:`KEPT`.

    >>> line = Line(fixed_s=0.01, token_s=0.001)
    >>> round(line.seconds_for(1000), 3)
    1.01
    """

    def __init__(self, fixed_s: float, token_s: float, *, kept: float = KEPT) -> None:
        self._kept = kept
        self._fixed_s, self._token_s = fixed_s, token_s
        points = [(tokens, self.seconds_for(tokens), ASSUMED_WEIGHT) for tokens in ASSUMED_TOKENS]
        self._seen: deque[tuple[float, float, float]] = deque(points, MOST_SEEN)
        self._sums = (0.0, 0.0, 0.0)
        self.num_seen = 0

    def seconds_for(self, tokens: float) -> float:
        """Expected seconds for ``tokens`` tokens; never less than for none."""
        return self._fixed_s + self._token_s * max(0.0, tokens)

    def doubt(self, tokens: float) -> float:
        """Standard error of :meth:`seconds_for`: large far from all measurements.

        Measurements are assumed to scatter by :data:`SCATTER`.
        """
        weight, x, xx = self._sums
        spread = weight * xx - x * x
        if self.num_seen == 0 or spread <= 0:
            return 0.0
        return SCATTER * math.sqrt(max(0.0, xx - 2 * x * tokens + weight * tokens**2) / spread)

    def add_measurement(self, tokens: float, seconds: float) -> None:
        """Add a measurement: ``tokens`` tokens took ``seconds``."""
        if not (tokens >= 0 and 0 <= seconds < float("inf")):
            raise ValueError(f"expected tokens and seconds of at least 0, got {tokens}, {seconds}")
        is_outlier = self.num_seen > 0 and seconds > OUTLIER * max(
            self.seconds_for(tokens), LEAST_S
        )
        self._seen.append((float(tokens), seconds, OUTLIER_WEIGHT if is_outlier else 1.0))
        self.num_seen += 1
        for _ in range(ROUNDS):
            self._fit()

    def _fit(self) -> None:
        """Fit by least squares, with neither coefficient below 0."""
        weight = x = y = xx = xy = 0.0
        counts = 1.0
        for tokens, seconds, weighs in reversed(self._seen):
            one = counts * weighs / max(self.seconds_for(tokens), LEAST_S) ** 2
            weight, x, y = weight + one, x + one * tokens, y + one * seconds
            xx, xy = xx + one * tokens * tokens, xy + one * tokens * seconds
            counts *= self._kept
        self._sums = weight, x, xx
        spread = weight * xx - x * x
        token_s = max(0.0, (weight * xy - x * y) / spread) if spread > 1e-9 * weight * xx else 0.0
        fixed_s = (y - token_s * x) / weight
        if fixed_s < 0:
            fixed_s, token_s = 0.0, xy / xx
        self._fixed_s, self._token_s = fixed_s, token_s


@dataclass(frozen=True, slots=True)
class _Known:
    """A line, the time of its last measurement, and the seconds after which it is stale."""

    line: Line
    seen_at: float
    stale_s: float

    def is_stale(self, now: float) -> bool:
        return now - self.seen_at > self.stale_s

    def agrees(self, tokens: float, seconds: float) -> bool:
        """Whether a measurement confirms the line."""
        expected_s = max(self.line.seconds_for(tokens), LEAST_S)
        return expected_s / AGREES <= max(seconds, LEAST_S) <= expected_s * AGREES


@dataclass(slots=True)
class Lines:
    """One line per key, all with the same assumptions; lines without recent measurements are stale.

    A stale line is replaced by the assumptions until the next measurement, so that a slow pull is
    tried again after some time.  If that measurement confirms the stale line, the line is restored,
    and becomes stale after twice the time.

    Attributes:
        fixed_s, token_s: assumed line.
        stale_s: seconds without measurements after which a line is stale.
        most: number of lines that are kept.
    """

    fixed_s: float
    token_s: float
    stale_s: float = 60.0
    most: int = 4096
    _lines: dict[Hashable, _Known] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._lines)

    def line_of(self, key: Hashable, now: float) -> Line:
        """The line of ``key``; the assumed one if there are no recent measurements."""
        known = self._lines.get(key)
        if known is None or known.is_stale(now):
            return Line(self.fixed_s, self.token_s)
        return known.line

    def add_measurement(self, key: Hashable, tokens: float, seconds: float, now: float) -> None:
        """Add a measurement of ``key``: ``tokens`` tokens took ``seconds``."""
        line, stale_s = self.line_of(key, now), self.stale_s
        known = self._lines.pop(key, None)
        if known is not None and known.agrees(tokens, seconds):
            line = known.line
            longer = 2 if known.is_stale(now) else 1
            stale_s = min(longer * known.stale_s, MOST_TIMES * self.stale_s)
        line.add_measurement(tokens, seconds)
        self._lines[key] = _Known(line, now, stale_s)
        while len(self._lines) > self.most:
            del self._lines[next(iter(self._lines))]

    def forget_line(self, key: Hashable) -> None:
        """Drop the measurements of ``key``."""
        self._lines.pop(key, None)
