"""How often the lender's thread wakes up while many readers send.

A wake-up costs several times what the messages cost that it finds: the thread's code and data
have left the processor's caches.  So turns are spaced under load, and what arrives between two of
them is handled together.  A lender that few readers use has turns to spare and never waits::

    turns   | | | |              first ones at once, as they are needed
            | | | | | | | |      then one each PERIOD_S, while messages keep coming

Pure: time is an argument.
"""

from __future__ import annotations

PERIOD_S = 0.002
"""Between two turns under load: the most that a message waits."""

SPARE_TURNS = 16
"""Turns that may follow one another at once, after a pause that was long enough."""


class TurnPacer:
    """Spaces turns: one each ``period_s``, of which the first ``spare`` come without waiting.

    Example:
        >>> pacer = TurnPacer(period_s=1.0, spare=2)
        >>> [pacer.took(10.0), pacer.took(10.0), pacer.took(10.0)]
        [0.0, 0.0, 1.0]
    """

    def __init__(self, period_s: float = PERIOD_S, spare: int = SPARE_TURNS) -> None:
        self._period_s = period_s
        self._spare_s = period_s * spare
        self._paid_until = float("-inf")

    def took(self, now: float) -> float:
        """A turn was taken at ``now``; returns how many seconds to wait before the next one."""
        self._paid_until = max(self._paid_until, now) + self._period_s
        return max(0.0, self._paid_until - self._spare_s - now)
