"""How long engines take: seconds over tokens, learned from what they were seen to take.  Pure.

A prompt is computed, and a prefix pulled, in a time that is a line over its tokens::

    seconds                         .  computed: fixed + tokens / rate of prefill
                               .
                          .            _ _ - -  pulled: fixed + bytes of a token / bandwidth
                     . _ _ - - ' ' '
              _ _.- '
        - - ' .
            .          ^ from here on a pull is faster
        0 ............................................ tokens

The line is that of least squares of relative errors, in which what was seen counts less with
every later observation, so that a link or an engine that changes is followed.  Until enough was
seen what was assumed holds it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

KEPT = 0.9
"""What an observation still counts after the next one: about ten count."""
MOST_SEEN = 64
"""Observations that are kept; the last of them counts 0.001."""
ROUNDS = 3
"""Each fits the line anew, with errors relative to the line of the round before."""
ASSUMED_TOKENS = (0, 4096)
"""Two points that stand for the line assumed, as if they were seen before anything else."""
ASSUMED_WEIGHT = 0.1
"""What each of them counts."""
OUTLIER = 4.0
"""What took so many times as long as expected waited for something else, and counts little,"""
OUTLIER_WEIGHT = 0.1
"""namely so much."""
SCATTER = 0.05
"""What is seen is mostly off the line by no more than this part."""
AGREES = 2.0
"""What takes up to so many times as long as expected, or as short, is as it was."""
MOST_TIMES = 16
"""What is stale and tried again and again is left alone up to so many times as long."""
LEAST_S = 1e-3
"""What takes less scatters as this does."""


class Line:
    """Seconds that a number of tokens takes.

    Args:
        fixed_s: of nothing, as assumed.
        token_s: of each token, as assumed.
        kept: see :data:`KEPT`.

    >>> line = Line(fixed_s=0.01, token_s=0.001)
    >>> round(line.at(1000), 3)
    1.01
    """

    def __init__(self, fixed_s: float, token_s: float, *, kept: float = KEPT) -> None:
        self._kept = kept
        self._fixed_s, self._token_s = fixed_s, token_s
        points = [(tokens, self.at(tokens), ASSUMED_WEIGHT) for tokens in ASSUMED_TOKENS]
        self._seen: deque[tuple[float, float, float]] = deque(points, MOST_SEEN)
        self._sums = (0.0, 0.0, 0.0)
        self.num_seen = 0

    def at(self, tokens: float) -> float:
        """Seconds that ``tokens`` tokens take; never less than those of none."""
        return self._fixed_s + self._token_s * max(0.0, tokens)

    def doubt(self, tokens: float) -> float:
        """Seconds by which :meth:`at` may be off: much where nothing like it was seen.

        The standard error of the line, where what is seen scatters by :data:`SCATTER`.
        """
        weight, x, xx = self._sums
        spread = weight * xx - x * x
        if self.num_seen == 0 or spread <= 0:
            return 0.0
        return SCATTER * math.sqrt(max(0.0, xx - 2 * x * tokens + weight * tokens**2) / spread)

    def see(self, tokens: float, seconds: float) -> None:
        """``tokens`` tokens took ``seconds``."""
        if not (tokens >= 0 and 0 <= seconds < float("inf")):
            raise ValueError(f"expected tokens and seconds of at least 0, got {tokens}, {seconds}")
        is_outlier = self.num_seen > 0 and seconds > OUTLIER * max(self.at(tokens), LEAST_S)
        self._seen.append((float(tokens), seconds, OUTLIER_WEIGHT if is_outlier else 1.0))
        self.num_seen += 1
        for _ in range(ROUNDS):
            self._fit()

    def _fit(self) -> None:
        """Least squares with neither part below 0."""
        weight = x = y = xx = xy = 0.0
        counts = 1.0
        for tokens, seconds, weighs in reversed(self._seen):
            one = counts * weighs / max(self.at(tokens), LEAST_S) ** 2
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
    """A line, when it was last seen, and after how many seconds it is stale."""

    line: Line
    seen_at: float
    stale_s: float

    def is_stale(self, now: float) -> bool:
        return now - self.seen_at > self.stale_s

    def agrees(self, tokens: float, seconds: float) -> bool:
        """Whether it is still as it was."""
        expected_s = max(self.line.at(tokens), LEAST_S)
        return expected_s / AGREES <= max(seconds, LEAST_S) <= expected_s * AGREES


@dataclass(slots=True)
class Lines:
    """A line for each of some things, all assumed alike; what was not seen for long is stale.

    What is stale is as assumed until it is seen again, so that what was found too slow is tried
    some time.  If it is then as it was, what was known holds again, and for twice as long.

    Attributes:
        fixed_s, token_s: as assumed.
        stale_s: after so many seconds a line is as assumed again.
        most: how many are kept.
    """

    fixed_s: float
    token_s: float
    stale_s: float = 60.0
    most: int = 4096
    _lines: dict[Hashable, _Known] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._lines)

    def of(self, key: Hashable, now: float) -> Line:
        """The line of ``key``, which is as assumed if nothing was seen of it lately."""
        known = self._lines.get(key)
        if known is None or known.is_stale(now):
            return Line(self.fixed_s, self.token_s)
        return known.line

    def see(self, key: Hashable, tokens: float, seconds: float, now: float) -> None:
        """``tokens`` tokens took ``key`` ``seconds``."""
        line, stale_s = self.of(key, now), self.stale_s
        known = self._lines.pop(key, None)
        if known is not None and known.agrees(tokens, seconds):
            line = known.line
            longer = 2 if known.is_stale(now) else 1
            stale_s = min(longer * known.stale_s, MOST_TIMES * self.stale_s)
        line.see(tokens, seconds)
        self._lines[key] = _Known(line, now, stale_s)
        while len(self._lines) > self.most:
            del self._lines[next(iter(self._lines))]

    def forget(self, key: Hashable) -> None:
        """Nothing was seen of ``key``."""
        self._lines.pop(key, None)
