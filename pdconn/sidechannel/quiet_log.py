"""Warnings that any host can cause as often as it likes: few of them are logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_PAUSE_S = 1.0


class QuietLog:
    """Logs at most one warning a second, and how many were suppressed before it."""

    def __init__(self, to: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._to = to
        self._clock = clock
        self._quiet_until = float("-inf")
        self._num_suppressed = 0

    def warning(self, text: str, *values: object) -> None:
        """Log a line, or count it."""
        now = self._clock()
        if now < self._quiet_until:
            self._num_suppressed += 1
            return
        if self._num_suppressed:
            text += f" ({self._num_suppressed} similar warnings suppressed)"
        self._to.warning(text, *values)
        self._quiet_until, self._num_suppressed = now + _PAUSE_S, 0
