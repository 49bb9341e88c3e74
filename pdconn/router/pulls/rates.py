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
ASSUMED_WEIGHT = 0.25
"""What each of them counts."""
OUTLIER = 4.0
"""What took so many times as long as expected waited for something else, and counts little,"""
OUTLIER_WEIGHT = 0.1
"""namely so much."""
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
        self.num_seen = 0

    def at(self, tokens: float) -> float:
        """Seconds that ``tokens`` tokens take; never less than those of none."""
        return self._fixed_s + self._token_s * max(0.0, tokens)

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
        spread = weight * xx - x * x
        token_s = max(0.0, (weight * xy - x * y) / spread) if spread > 1e-9 * weight * xx else 0.0
        fixed_s = (y - token_s * x) / weight
        if fixed_s < 0:
            fixed_s, token_s = 0.0, xy / xx
        self._fixed_s, self._token_s = fixed_s, token_s


@dataclass(slots=True)
class Lines:
    """A line for each of some things, all assumed alike; what was not seen for long is forgotten.

    So what was found too slow is tried again some time.

    Attributes:
        fixed_s, token_s: as assumed.
        stale_s: after so many seconds a line is as assumed again.
        most: how many are kept.
    """

    fixed_s: float
    token_s: float
    stale_s: float = 60.0
    most: int = 4096
    _lines: dict[Hashable, tuple[Line, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._lines)

    def of(self, key: Hashable, now: float) -> Line:
        """The line of ``key``, which is as assumed if nothing was seen of it lately."""
        line, seen_at = self._lines.get(key, (None, 0.0))
        if line is None or now - seen_at > self.stale_s:
            return Line(self.fixed_s, self.token_s)
        return line

    def see(self, key: Hashable, tokens: float, seconds: float, now: float) -> None:
        """``tokens`` tokens took ``key`` ``seconds``."""
        line = self.of(key, now)
        line.see(tokens, seconds)
        self._lines.pop(key, None)
        self._lines[key] = line, now
        while len(self._lines) > self.most:
            del self._lines[next(iter(self._lines))]
