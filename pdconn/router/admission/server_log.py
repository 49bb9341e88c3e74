"""A log adapter for aiohttp's server: one short line per client error."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

from pdconn.sidechannel.quiet_log import QuietLog

_MOST_SHOWN = 200
"""Maximum characters of client data in a log line."""


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """Logs malformed requests as one line, and bugs with a traceback."""

    def __init__(self, to: logging.Logger) -> None:
        super().__init__(to)
        self._quiet = QuietLog(to)

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Add our prefix to the message."""
        return f"pdconn: {msg}", kwargs

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        """Log an error; without its traceback if the client caused it."""
        if isinstance(exc_info, HttpProcessingError):
            why = " ".join(exc_info.message.split())[:_MOST_SHOWN]
            peer = args[0] if args else None
            self._quiet.warning("pdconn: malformed request refused peer=%s why=%r", peer, why)
        else:
            super().exception(msg, *args, exc_info=exc_info, **kwargs)
