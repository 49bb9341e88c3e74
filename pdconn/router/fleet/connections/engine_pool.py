"""The connections to engines: kept ones first, else new ones, by TCP and TLS.

A kept connection may have been closed by its server a moment ago, which its next request finds out;
so a request says whether its connection had served another one before (``num_requests``).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import urlsplit

from aiohappyeyeballs import AddrInfoType, start_connection

from pdconn.router.fleet.connections.engine_connection import EngineConnection

NAME_FOR_S = 10.0
"""Seconds for which a name's addresses are used without another look-up."""
NEXT_ADDRESS_S = 0.25
"""Seconds after which the next address of a name is tried beside the last (RFC 8305)."""
_MOST_NAMES = 1024
_DEFAULT_PORTS = {"http": 80, "https": 443}

SocketFactory = Callable[[AddrInfoType], socket.socket]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an engine listens.

    Attributes:
        host_header: the value of ``Host``.
        path: the URL's path, before that of each request.
    """

    is_tls: bool
    host: str
    port: int
    host_header: str
    path: str


@lru_cache(_MOST_NAMES)
def origin_of(engine: str) -> Origin:
    """The origin of an engine's base URL.

    >>> origin_of("http://[::1]:8000").host_header, origin_of("https://engine/a").port
    ('[::1]:8000', 443)
    """
    parts = urlsplit(engine)
    host, default = parts.hostname or "", _DEFAULT_PORTS[parts.scheme]
    port = parts.port or default
    name = f"[{host}]" if ":" in host else host
    shown = name if port == default else f"{name}:{port}"
    return Origin(parts.scheme == "https", host, port, shown, parts.path)


class EnginePool:
    """Kept connections by origin, and the opening of new ones.

    Args:
        open_socket: makes the socket of a connection.
        connect_timeout_s: for a name's look-up, the connection and TLS together.
        keep_s: a connection that was idle for longer is closed.
    """

    def __init__(self, open_socket: SocketFactory, connect_timeout_s: float, keep_s: float) -> None:
        self._open_socket = open_socket
        self._connect_timeout_s = connect_timeout_s
        self._keep_s = keep_s
        self._kept: dict[Origin, deque[EngineConnection]] = {}
        self._open: set[EngineConnection] = set()
        self._addresses: dict[tuple[str, int], tuple[float, Sequence[AddrInfoType]]] = {}
        self._tls: ssl.SSLContext | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._none_open = asyncio.Event()

    def take_kept(self, origin: Origin) -> EngineConnection | None:
        """A kept connection, the last one used; None if there is none."""
        kept = self._kept.get(origin)
        too_old_s = asyncio.get_running_loop().time() - self._keep_s
        while kept:
            connection = kept.pop()
            if connection.is_open and connection.idle_since_s > too_old_s:
                return connection
            connection.close()
        return None

    async def open_connection(self, origin: Origin) -> EngineConnection:
        """A new connection.

        Raises:
            TimeoutError: there was none in time.
            OSError: there is none; also ``ssl.SSLError`` and ``socket.gaierror``.
        """
        async with asyncio.timeout(self._connect_timeout_s):
            addresses = await self._resolve(origin)
            try:
                sock = await start_connection(
                    addresses,
                    happy_eyeballs_delay=NEXT_ADDRESS_S,
                    socket_factory=self._open_socket,
                )
            except OSError:
                self._addresses.pop((origin.host, origin.port), None)  # it may have moved
                raise
            try:
                connection = await self._speak_http(origin, sock)
            except BaseException:
                sock.close()
                raise
        self._open.add(connection)
        return connection

    async def _speak_http(self, origin: Origin, sock: socket.socket) -> EngineConnection:
        loop = asyncio.get_running_loop()
        make = partial(EngineConnection, partial(self._keep, origin), self._forget)
        if not origin.is_tls:
            _, connection = await loop.create_connection(make, sock=sock)
            return connection
        context = self._tls_context()
        _, connection = await loop.create_connection(
            make, sock=sock, ssl=context, server_hostname=origin.host
        )
        return connection

    async def _resolve(self, origin: Origin) -> Sequence[AddrInfoType]:
        loop, name = asyncio.get_running_loop(), (origin.host, origin.port)
        known = self._addresses.get(name)
        if known is not None and loop.time() - known[0] < NAME_FOR_S:
            return known[1]
        found: Sequence[AddrInfoType]
        with contextlib.suppress(socket.gaierror):
            numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            return socket.getaddrinfo(*name, type=socket.SOCK_STREAM, flags=numeric)
        resolve = partial(loop.getaddrinfo, *name, type=socket.SOCK_STREAM)
        try:
            found = await resolve(flags=socket.AI_ADDRCONFIG)
        except socket.gaierror:  # a machine with the loopback interface alone
            found = await resolve()
        if len(self._addresses) >= _MOST_NAMES:
            self._addresses.clear()
        self._addresses[name] = (loop.time(), found)
        return found

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _keep(self, origin: Origin, connection: EngineConnection) -> None:
        """Keep a connection whose answer is complete."""
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._kept.setdefault(origin, deque()).append(connection)
        if self._closing is None:
            self._closing = loop.call_later(self._keep_s, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connections that were idle for too long; the first of each origin is oldest."""
        self._closing = None
        loop = asyncio.get_running_loop()
        too_old_s = loop.time() - self._keep_s
        for origin, kept in list(self._kept.items()):
            while kept and (not kept[0].is_open or kept[0].idle_since_s <= too_old_s):
                kept.popleft().close()
            if not kept:
                del self._kept[origin]
        if self._kept:
            oldest_s = min(kept[0].idle_since_s for kept in self._kept.values())
            self._closing = loop.call_at(oldest_s + self._keep_s, self._close_idle)

    def _forget(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._none_open.set()

    async def close(self) -> None:
        """Close every connection, and wait until they are."""
        if self._closing is not None:
            self._closing.cancel()
        self._kept.clear()
        for connection in list(self._open):
            connection.abort()
        if self._open:
            self._none_open.clear()
            await self._none_open.wait()
