"""How long a prefill engine may take before another one is asked.  Pure.

An engine computes prompts in the order in which they were sent, so the time of one is a line over
the tokens in flight there when it was sent, its own among them::

    seconds                                 ' limit: several times as long
              floor                    '
        ' ' ' ' ' ' ' ' ' ' ' ' ' '          _ . expected
                          _ _ _ . - - ' ' '
        - - - - ' ' ' ' '
        0 .............................. tokens in flight

Without enough measurements, and far beyond all of them, nothing is known and there is no limit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from pdconn.router.pulls.rates import Lines

MULTIPLE = 8.0
"""A limit is so many times the expected time; other routers' requests may be in the way."""
MULTIPLE_UNHELD = 2.0
"""Nor is a limit below so many times the expected time if the engine held nothing of the prompt,
which was only believed: its cache may have been reset, or be too small."""
FLOOR_S = 3.0
"""No limit is shorter: an engine that compiles or collects garbage stands still for a while."""
LEAST_SEEN = 8
"""Measurements of an engine without which there is no limit."""
FARTHEST = 4.0
"""Above so many times the most tokens that were seen there is no limit: attention is no line."""
LEARNS_EVERY_S = 0.25
"""Seconds between two measurements of an engine, once there are enough: each takes 0.1 ms."""
_ASSUMED = (0.01, 1 / 20_000)
_STALE_S = 600.0


class PrefillPatience:
    """Limits for the prefill engines of one router.

    Args:
        timeout_s: a limit for all engines instead, ``math.inf`` for none; None to learn them.
        clock: seconds that never go back.
    """

    def __init__(self, timeout_s: float | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._lines = Lines(*_ASSUMED, stale_s=_STALE_S)
        # By engine the most tokens, and when something was learned last.
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()

    @property
    def is_learned(self) -> bool:
        """Whether limits are learned; then an engine that is healthy, and the last, has none."""
        return self._timeout_s is None

    def limit_s(self, engine: str, tokens: int, held: int = 0) -> float | None:
        """Seconds that an engine may take; None without a limit.

        Args:
            engine: its URL.
            tokens: prompt tokens in flight there, with those of the request.
            held: tokens of the request that are not among them, as it is believed to hold them.

        >>> PrefillPatience(2.0, lambda: 0.0).limit_s("http://p", 9)
        2.0
        """
        if self._timeout_s is not None:
            return None if math.isinf(self._timeout_s) else self._timeout_s
        line = self._lines.line_of(engine, self._clock())
        if line.num_seen < LEAST_SEEN or tokens > FARTHEST * self._seen[engine][0]:
            return None
        unheld_s = line.seconds_for(tokens + held)
        return max(FLOOR_S, MULTIPLE * line.seconds_for(tokens), MULTIPLE_UNHELD * unheld_s)

    def learn(self, engine: str, tokens: int, seconds: float) -> None:
        """An engine has answered a request after so many seconds."""
        if self._timeout_s is not None:
            return
        now, (most, learned_s) = self._clock(), self._seen.get(engine, (0, -math.inf))
        is_known = self._lines.line_of(engine, now).num_seen >= LEAST_SEEN
        if is_known and now - learned_s < LEARNS_EVERY_S:
            return
        self._lines.add_measurement(engine, tokens, seconds, now)
        self._seen[engine] = max(tokens, most), now
        self._seen.move_to_end(engine)
        if len(self._seen) > self._lines.most:
            forgotten, _ = self._seen.popitem(last=False)
            self._lines.forget_line(forgotten)
