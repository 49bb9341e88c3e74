"""Warnings about clients: one line each, and few of them, as any client can cause many."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

_PAUSE_S = 1.0
_MOST_SHOWN = 200
"""Characters of what a client sent."""


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


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp's server logs: a request that is no HTTP is one line, a bug a traceback."""

    def __init__(self, to: logging.Logger) -> None:
        super().__init__(to)
        self._quiet = QuietLog(to)

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Our prefix before each message."""
        return f"pdconn: {msg}", kwargs

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        """An error; without its traceback if a client is at fault."""
        if isinstance(exc_info, HttpProcessingError):
            why = " ".join(exc_info.message.split())[:_MOST_SHOWN]
            peer = args[0] if args else None
            self._quiet.warning("pdconn: malformed request refused peer=%s why=%r", peer, why)
        else:
            super().exception(msg, *args, exc_info=exc_info, **kwargs)
