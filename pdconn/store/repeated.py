"""Warnings that a store repeats for each row while a device refuses: few of them are logged."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_PAUSE_S = 10.0


class RepeatedWarnings:
    """Logs each text at most once in 10 s, then with how many were suppressed.  Any thread."""

    def __init__(self, to: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._to = to
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet: dict[str, tuple[float, int]] = {}

    def warn(self, text: str, *values: object) -> None:
        """Log a warning, or count it; texts are few, ``values`` differ."""
        now = self._clock()
        with self._lock:
            until, suppressed = self._quiet.get(text, (now, 0))
            if now < until:
                self._quiet[text] = until, suppressed + 1
                return
            self._quiet[text] = now + _PAUSE_S, 0
        if suppressed:
            text += f" ({suppressed} similar warnings suppressed)"
        self._to.warning(text, *values)
