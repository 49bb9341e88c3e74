"""Warnings that a host, or a device that refuses, can cause at any rate: few of them are logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class QuietLog:
    """Logs each text at most once in a while, then with how many were suppressed.

    Args:
        pause_s: how long; texts are few, the values in them differ.
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
        """Log a line, or count it."""
        now = self._clock()
        until, num_suppressed = self._quiet.get(text, (now, 0))
        if now < until:
            self._quiet[text] = until, num_suppressed + 1
            return
        self._quiet[text] = now + self._pause_s, 0
        if num_suppressed:
            text += f" ({num_suppressed} similar warnings suppressed)"
        self._to.warning(text, *values)
