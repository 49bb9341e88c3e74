"""Clients' connections: which stall, which idle, and which are closed to make room.

A ``ClientConnection`` sits between the event loop and aiohttp's handler of one connection, and
tracks which part of a request its client still owes::

    HEAD ──request head read──► BODY ──read──► SERVED ──► IDLE ──a byte──► HEAD
    owes a head                 owes a body    owes nothing     keep-alive

A connection stalls while it owes a head or a body.  ``stall_s`` is the time for a head, for each
``PROGRESS_NBYTES`` of a body, and for an unread answer that makes writing pause.  Then the
connection is closed; a client that owes a body gets 408 first.

When all places are taken, a stalling connection is closed to make room, then an idle one.  Heads
and bodies are two kinds of stalling (``pdconn.lifecycle.admission``), so a flood of partial heads
does not cut uploads in progress.  Requests that are being served are never cut for others: new
connections wait in the listener's backlog.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import Enum
from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pdconn.lifecycle.admission import AdmissionControl, AdmissionLimits
from pdconn.router.labels import LabelValue
from pdconn.router.router_errors import BodyTooSlow

log = logging.getLogger(__name__)

PROGRESS_NBYTES = 256 << 10
"""Bytes of a body after which its client does not count as stalling."""
SHORTEST_STAY_S = 0.02


class Dropped(LabelValue):
    """Why a client's connection was closed: the label ``reason`` of a metric."""

    TIMED_OUT = (
        "timed_out",
        "Its client stalled: in a head, a body, or an answer that it does not read.",
    )
    CROWDED_OUT = ("crowded_out", "It stalled, and its place was needed.")
    IDLE = ("idle", "It was idle between two requests, and its place was needed.")
    REFUSED = ("refused", "Its host had as many open connections as one host may have.")
    ACCEPT_FAILED = ("accept_failed", "The system could not open it: file descriptors.")


class _Owes(Enum):
    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing: served"
    IDLE = "nothing: idle"


class ClientConnection(asyncio.Protocol):
    """One client's connection, around aiohttp's handler."""

    __slots__ = (
        "_admission", "_closed", "_handler", "_opening", "_owes", "_timer", "_transport", "_unread",
    )  # fmt: skip

    def __init__(self, admission: ClientAdmission, handler: RequestHandler) -> None:
        self._admission = admission
        self._handler = handler
        self._owes = _Owes.HEAD
        self._unread: asyncio.TimerHandle | None = None  # runs while writing is paused
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.Timeout | None = None  # for the body that is being read
        self._transport: asyncio.Transport | None = None
        self._closed = False

    @property
    def stalls(self) -> _Owes | None:
        """The part of a request that the client owes; None if it owes nothing."""
        return self._owes if self._owes in (_Owes.HEAD, _Owes.BODY) else None

    def opened_by(self, task: asyncio.Task[None]) -> None:
        """Set the ``task`` that hands over the socket; cancelling it closes the socket."""
        self._opening = task

    # The event loop's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's class has the methods, not the base.
        self._transport = cast(asyncio.Transport, transport)
        self._handler.connection_made(transport)
        if self._closed:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._owes is _Owes.IDLE:
            self._set(_Owes.HEAD)
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        loop, stall_s = asyncio.get_running_loop(), self._admission.limits.stall_s
        self._unread = self._unread or loop.call_later(stall_s, self._admission.unread, self)
        self._admission.changed(self)
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._reads_on()
        self._admission.changed(self)
        self._handler.resume_writing()

    def _reads_on(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._reads_on()
        self._admission.forget_connection(self, self._handler)
        self._handler.connection_lost(exc)

    # The request's calls

    def request_began(self) -> None:
        """The head of a request was read; a body may follow."""
        self._set(_Owes.NOTHING)

    def request_ended(self) -> None:
        """The answer is complete."""
        self._set(_Owes.IDLE)

    @asynccontextmanager
    async def reading_body(self) -> AsyncIterator[Callable[[int], None]]:
        """A context for reading a body; call the yielded function with the bytes of each read.

        Raises:
            BodyTooSlow: fewer than ``PROGRESS_NBYTES`` arrived in ``stall_s``.
        """
        unproven = 0

        def received(nbytes: int) -> None:
            nonlocal unproven
            unproven += nbytes
            if unproven >= PROGRESS_NBYTES:
                unproven = 0
                self._set(_Owes.NOTHING)
                self._set(_Owes.BODY)

        try:
            async with asyncio.timeout(None) as self._timer:
                self._set(_Owes.BODY)
                yield received
        except TimeoutError as error:
            raise BodyTooSlow("body", self._admission.pace, "less") from error
        finally:
            self._timer = None
            self._set(_Owes.NOTHING)

    def _set(self, owes: _Owes) -> None:
        self._owes = owes
        self._admission.changed(self)

    # The admission's calls

    @property
    def is_idle(self) -> bool:
        """Whether the connection waits for the client's next request."""
        return self._owes is _Owes.IDLE and self._unread is None

    def time_out(self) -> bool:
        """Handle a stall that took too long.

        Returns:
            True if the connection is closed now; False if its request is refused instead.
        """
        if self._timer is None:
            self.close(politely=False)
            return True
        self._timer.reschedule(asyncio.get_running_loop().time())
        return False

    def close(self, *, politely: bool) -> None:
        """Close the connection; ``politely``: after sending the written bytes."""
        self._closed = True
        if self._transport is not None and politely:
            self._transport.close()
        elif self._transport is not None:
            self._transport.abort()
        elif self._opening is not None:  # during the TLS handshake
            self._opening.cancel()


class ClientAdmission:
    """The table of client connections.

    Args:
        limits: bounds over all connections.
        count: called with the reason for each dropped connection.
    """

    def __init__(
        self, limits: AdmissionLimits, count: Callable[[Dropped], None] = lambda reason: None
    ) -> None:
        self.limits = limits
        self._count = count
        self._control: AdmissionControl[ClientConnection] = AdmissionControl(limits)
        self._idle: OrderedDict[ClientConnection, None] = OrderedDict()
        self._of_handler: dict[RequestHandler, ClientConnection] = {}
        self._room = asyncio.Event()
        self._time = asyncio.get_running_loop().time

    def __len__(self) -> int:
        return len(self._control)

    @property
    def pace(self) -> str:
        """The expected progress of a body, in words."""
        return f"the rest, or {PROGRESS_NBYTES} bytes every {self.limits.stall_s:g} s"

    def connection_of(self, http: web.Request) -> ClientConnection:
        """The connection of a request; if it is closed, a new one that is not in the table."""
        return self._of_handler.get(http.protocol) or ClientConnection(self, http.protocol)

    @web.middleware
    async def observing(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """A middleware that notes when a request begins and ends."""
        connection = self.connection_of(request)
        connection.request_began()
        try:
            return await handler(request)
        finally:
            connection.request_ended()

    # The listener's calls

    async def room(self) -> None:
        """Wait for a free place; a stalling or idle connection is closed to make room.

        Each connection may stall for ``SHORTEST_STAY_S``, in which an honest client's request
        arrives.  During a flood new connections wait for that long instead of evicting each other.
        """
        while self._control.is_full or self._control.is_crowded:
            next_out = self._control.next_out
            if next_out is not None:
                stalled, since = next_out
                stays_s = since + SHORTEST_STAY_S - self._time()
                if stays_s > 0:
                    await asyncio.sleep(stays_s)
                else:
                    self._drop(stalled, Dropped.CROWDED_OUT)
            elif self._idle:
                self._drop(next(iter(self._idle)), Dropped.IDLE)
            else:
                self._room.clear()
                await self._room.wait()

    def open_connection(self, handler: RequestHandler, host: str) -> ClientConnection | None:
        """Register a connection from ``host``; None if it is refused."""
        refusal = self._control.refusal(host)
        if refusal is not None:
            self._count(Dropped.REFUSED)
            log.debug("pdconn: connection refused: %s peer=%s", refusal, host)
            return None
        connection = ClientConnection(self, handler)
        self._of_handler[handler] = connection
        crowded_out = self._control.admit(connection, host, self._time(), connection.stalls)
        if crowded_out is not None:
            self._drop(crowded_out, Dropped.CROWDED_OUT)
        return connection

    def accept_failed(self) -> None:
        """Count a connection that the system could not open."""
        self._count(Dropped.ACCEPT_FAILED)

    def close_overdue(self) -> None:
        """Close the connections that stalled for too long."""
        for connection in self._control.overdue(self._time()):
            self._count(Dropped.TIMED_OUT)
            if connection.time_out():
                self._leave(connection)

    # A connection's calls

    def unread(self, connection: ClientConnection) -> None:
        """Drop a connection whose client has not read for ``stall_s``."""
        self._drop(connection, Dropped.TIMED_OUT)

    def changed(self, connection: ClientConnection) -> None:
        """Update the table when a connection starts to stall, idle or be served."""
        self._control.note_stall(connection, connection.stalls, self._time())
        if connection.is_idle and connection in self._control:
            self._idle[connection] = None
        else:
            self._idle.pop(connection, None)
        self._room.set()

    def forget_connection(self, connection: ClientConnection, handler: RequestHandler) -> None:
        """Remove a closed connection from the table."""
        self._of_handler.pop(handler, None)
        self._leave(connection)

    def _drop(self, connection: ClientConnection, reason: Dropped) -> None:
        self._count(reason)
        connection.close(politely=reason is Dropped.IDLE)
        self._leave(connection)

    def _leave(self, connection: ClientConnection) -> None:
        """Free the connection's place, though its socket may take a moment longer to close."""
        self._control.remove_session(connection)
        self._idle.pop(connection, None)
        self._room.set()
