"""The router's listener: accepts clients within the limits of places and file descriptors.

The event loop's own server accepts without limit, and closes connections when it runs out of
file descriptors.  This one waits until ``ClientAdmission`` has room, and pauses when the system
cannot open a connection; clients wait in the backlog meanwhile.  A client that sends nothing stays
in the kernel (``TCP_DEFER_ACCEPT``) and costs no file descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pdconn.lifecycle.admission import AdmissionLimits
from pdconn.router.admission.connections import ClientAdmission, ClientConnection
from pdconn.sidechannel.quiet_log import QuietLog

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 16384
STALL_S = 30.0
"""Time for a request's head, for each ``PROGRESS_NBYTES`` of its body, and for reading on."""

_RESERVED_FILES = 12
"""File descriptors for logs, probes, name look-ups, and sockets that are closing."""
ADMIN_LIMITS = AdmissionLimits(connections=8, per_host=8, stalled=4, stall_s=10.0)
"""Connections of the admin listener, bounded so that it leaves file descriptors to clients."""
_FILES_A_PLACE = 3
"""Per client: its connection, one to its engine, and an idle one to the previous engine."""
_FILES_UNKNOWN = 32
"""Assumed number of open files, where the system does not report it."""
_TICK_S = 1.0


def limits_within(file_limit: int | None, num_files: int, stall_s: float) -> AdmissionLimits:
    """Admission limits such that the file descriptors suffice for clients and their engines.

    Args:
        file_limit: file descriptors that this process may open; None for unlimited.
        num_files: file descriptors that are open now.
        stall_s: seconds that a connection may stall.

    >>> limits_within(1024, 24, 30.0).connections
    326
    """
    places = MOST_CONNECTIONS
    if file_limit is not None:
        spare = file_limit - num_files - _RESERVED_FILES - ADMIN_LIMITS.connections
        places = min(places, max(2, spare // _FILES_A_PLACE))
    per_host = max(1, places * 3 // 4)
    return AdmissionLimits(places, per_host, max(1, places // 2), stall_s)


def limits_of_process(stall_s: float, num_reserved: int) -> AdmissionLimits:
    """``limits_within`` for this process now, with ``num_reserved`` files still to be opened."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_files = len(os.listdir("/proc/self/fd"))
    except OSError:
        num_files = _FILES_UNKNOWN
    num_files += num_reserved
    return limits_within(None if soft == resource.RLIM_INFINITY else soft, num_files, stall_s)


class AdmittingSite(web.BaseSite):
    """A site of an aiohttp runner that listens on ``sock`` and closes it.

    ``context`` returns the TLS context of the next connection; without it connections are plain.
    """

    def __init__(
        self,
        runner: web.BaseRunner,
        sock: socket.socket,
        admission: ClientAdmission,
        *,
        context: Callable[[], ssl.SSLContext] | None = None,
        backlog: int,
    ) -> None:
        super().__init__(runner, backlog=backlog)
        self._context = context
        self._sock = sock
        self._admission = admission
        self._tasks: list[asyncio.Task[None]] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._log = QuietLog(log)

    @property
    def name(self) -> str:
        """The URL of the address."""
        host, port = self._sock.getsockname()[:2]
        return f"{'https' if self._context else 'http'}://{host}:{port}"

    async def start(self) -> None:
        """Start listening.

        Raises:
            OSError: another process listens at the address.
        """
        await super().start()
        self._sock.setblocking(False)
        # Linux only; elsewhere silent clients count as stalling.
        if hasattr(socket, "TCP_DEFER_ACCEPT"):
            with contextlib.suppress(OSError):
                seconds = max(1, int(self._stall_s))
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, seconds)
        self._sock.listen(self._backlog)
        self._tasks = [
            asyncio.create_task(self._accept_all(), name="accept"),
            asyncio.create_task(self._close_overdue(), name="close what stalls"),
        ]

    async def stop(self) -> None:
        """Stop listening; open connections stay open."""
        ending = [*self._tasks, *self._opening]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._sock.close()
        await super().stop()

    async def _close_overdue(self) -> None:
        while True:
            await asyncio.sleep(min(_TICK_S, self._admission.limits.stall_s / 4))
            self._admission.close_overdue()

    async def _accept_all(self) -> None:
        while True:
            await self._admission.room()
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                await self._client_waits()
                continue
            except (InterruptedError, ConnectionError):
                continue
            # No file descriptor or memory: an immediate retry would fail again.
            except OSError as error:
                pause_s = self._admission.limits.accept_pause_s
                self._admission.accept_failed()
                self._log.warning("pdconn: accept() failed; new connections wait: %s", error)
                await asyncio.sleep(pause_s)
                continue
            sock.setblocking(False)
            self._open(sock, str(address[0]))
            # A closed connection frees its socket before the next is accepted.
            await asyncio.sleep(0)

    async def _client_waits(self) -> None:
        """Wait until a client is in the backlog.

        Cancelling ``loop.sock_accept`` at the moment when it accepts loses the client: its socket
        stays open, and it gets no answer.
        """
        loop = asyncio.get_running_loop()
        waits = asyncio.Event()
        loop.add_reader(self._sock, waits.set)
        try:
            await waits.wait()
        finally:
            loop.remove_reader(self._sock)

    def _open(self, sock: socket.socket, host: str) -> None:
        server = self._runner.server
        assert server is not None  # the runner was set up
        handler = server()
        assert isinstance(handler, RequestHandler)
        connection = self._admission.open_connection(handler, host)
        if connection is None:
            sock.close()
            return
        task = asyncio.create_task(self._connect(sock, connection, handler), name="open")
        connection.opened_by(task)
        self._opening.add(task)

        def opened(task: asyncio.Task[None]) -> None:
            self._opening.discard(task)
            if task.cancelled():  # perhaps before its first step
                self._abandon(sock, connection, handler)

        task.add_done_callback(opened)

    async def _connect(
        self, sock: socket.socket, connection: ClientConnection, handler: RequestHandler
    ) -> None:
        """Hand the socket to the event loop, after the TLS handshake if there is one."""
        loop = asyncio.get_running_loop()
        context = None if self._context is None else self._context()
        in_time = {} if context is None else {"ssl_handshake_timeout": self._stall_s}
        try:
            await loop.connect_accepted_socket(lambda: connection, sock, ssl=context, **in_time)
        except OSError as error:  # the client left, or does not speak TLS
            self._log.warning("pdconn: connection failed: %s", str(error) or type(error).__name__)
            self._abandon(sock, connection, handler)

    def _abandon(
        self, sock: socket.socket, connection: ClientConnection, handler: RequestHandler
    ) -> None:
        sock.close()
        self._admission.forget_connection(connection, handler)

    @property
    def _stall_s(self) -> float:
        return self._admission.limits.stall_s
