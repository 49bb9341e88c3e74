"""Addresses of engines, as a gateway knows its endpoints: ``IP:port``."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from pdconn.router.router_errors import EngineFailure

FOR_S = 5.0
"""Seconds for which the address of a name counts: engines get others when they restart."""
_PORTS = {"http": 80, "https": 443}


class Endpoints:
    """Resolves engines to endpoints."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}

    async def resolve(self, engines: Iterable[str]) -> tuple[dict[str, str], list[EngineFailure]]:
        """The engines by their endpoint, in order, and the engines that have none.

        A gateway rewrites no path, so that an engine whose base URL has one has no endpoint.
        """
        found: dict[str, str] = {}
        failures: list[EngineFailure] = []
        for engine in engines:
            try:
                found[await self._endpoint(engine)] = engine
            except (OSError, ValueError) as error:
                failures.append(EngineFailure(engine, str(error)))
        return found, failures

    async def _endpoint(self, engine: str) -> str:
        known = self._known.get(engine)
        now = time.monotonic()
        if known is not None and now < known[1]:
            return known[0]
        parts = urlsplit(engine)
        if parts.path:
            raise ValueError("a gateway cannot ask an engine whose URL has a path")
        assert parts.hostname is not None  # checked where engines are named
        port = parts.port or _PORTS[parts.scheme]
        until = float("inf")
        try:
            address = str(ipaddress.ip_address(parts.hostname))
        except ValueError:
            address, until = await _resolved(parts.hostname, port), now + FOR_S
        endpoint = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        if len(self._known) >= 4096:  # of fleets that change
            self._known.clear()
        self._known[engine] = endpoint, until
        return endpoint


async def _resolved(host: str, port: int) -> str:
    loop = asyncio.get_running_loop()
    [first, *_] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return str(first[4][0])
