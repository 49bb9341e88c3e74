"""A rate limit for warnings that a peer or a device can cause at any rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class QuietLog:
    """Logs each text at most once per ``pause_s``, with the number of suppressed ones.

    Args:
        to: the logger.
        pause_s: in seconds, for each format string.
    """

    def __init__(
        self,
        to: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        *,
        pause_s: float = 1.0,
    ) -> None:
        self._to = to
        self._clock = clock
        self._pause_s = pause_s
        self._quiet: dict[str, tuple[float, int]] = {}

    def warning(self, text: str, *values: object) -> None:
        """Log a warning, or count it as suppressed."""
        now = self._clock()
        until, num_suppressed = self._quiet.get(text, (now, 0))
        if now < until:
            self._quiet[text] = until, num_suppressed + 1
            return
        self._quiet[text] = now + self._pause_s, 0
        if num_suppressed:
            text += f" ({num_suppressed} similar warnings suppressed)"
        self._to.warning(text, *values)
