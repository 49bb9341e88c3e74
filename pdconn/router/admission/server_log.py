"""What aiohttp's server logs about clients: one line each, and few of them."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

from pdconn.sidechannel.quiet_log import QuietLog

_MOST_SHOWN = 200
"""Characters of what a client sent."""


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
