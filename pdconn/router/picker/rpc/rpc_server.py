"""Listens for gateways, and drains.

::

    listen ──► serve ──stop──► no new connection, GOAWAY ──► calls end, or the time is up ──► closed
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import partial

from pdconn.router.picker.rpc.gateway_connection import CallRules, GatewayConnection

_BACKLOG = 1024


class RpcServer:
    """A server of gRPC on a bound socket, which it closes.

    Args:
        rules: what is answered.
        sock: bound; nothing listens on it yet.
        context: the TLS context of the next connection; None without TLS.
    """

    def __init__(
        self,
        rules: CallRules,
        sock: socket.socket,
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._rules = rules
        self._sock = sock
        self._context = context
        self._server: asyncio.Server | None = None
        self._connections: set[GatewayConnection] = set()
        self._idle = asyncio.Event()
        self._is_stopping = False

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: another process listens at the address.
        """
        tls = None if self._context is None else _following(self._context)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connected, sock=self._sock, ssl=tls, backlog=_BACKLOG
        )

    async def stop(self, grace_s: float) -> None:
        """Take no more connections, and close those that are there once their calls have ended.

        After ``grace_s`` seconds calls are broken off.
        """
        assert self._server is not None
        self._server.close()
        self._is_stopping = True
        for connection in set(self._connections):
            connection.go_away()
        self._look_whether_idle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        for connection in set(self._connections):
            connection.close()

    def _connected(self) -> GatewayConnection:
        connection = GatewayConnection(self._rules, self._lost, self._look_whether_idle)
        self._connections.add(connection)
        return connection

    def _lost(self, connection: GatewayConnection) -> None:
        self._connections.discard(connection)
        self._look_whether_idle()

    def _look_whether_idle(self) -> None:
        if self._is_stopping and not any(one.num_calls for one in self._connections):
            self._idle.set()


def _following(context: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """A context whose connections use what ``context`` returns when each begins."""
    first = context()
    first.sni_callback = partial(_use_latest, context)
    return first


def _use_latest(
    context: Callable[[], ssl.SSLContext],
    connection: ssl.SSLObject,
    name: str | None,
    used: ssl.SSLContext,
) -> None:
    latest = context()
    if latest is not used:
        connection.context = latest
