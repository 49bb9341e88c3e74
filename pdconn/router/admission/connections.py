"""Clients' connections: which stall, which are idle, and which are closed to make room.

A ``ClientConnection`` stands between the event loop and aiohttp's handler of one connection,
and knows what its client owes::

    HEAD ──its request's head is read──► BODY ──read──► SERVED ──► IDLE ──a byte──► HEAD
    owes a head                          owes a body    owes nothing     keep-alive

It stalls while it owes a head or a body.  ``stall_s`` is the time for a head, for every
``PROGRESS_NBYTES`` of a body, and for an answer that is left unread so that writing has to pause.
Then it is closed; a client that owes a body gets 408 before.

Where there is no place left, one that stalls makes room, then one that is idle.  Heads and bodies
are two kinds of stalling (``pdconn.lifecycle.admission``), so a flood of half heads does not cut
uploads under way.  Requests that are being served are never cut for others: new connections wait in
the listener's backlog.
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
from pdconn.router.errors import BodyTooSlow
from pdconn.router.labels import LabelValue

log = logging.getLogger(__name__)

PROGRESS_NBYTES = 256 << 10
"""Bytes of a body that prove that its client does not stall."""
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
        self._unread: asyncio.TimerHandle | None = None  # writing pauses: the client does not read
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.Timeout | None = None  # of the body that is being read
        self._transport: asyncio.Transport | None = None
        self._closed = False

    @property
    def stalls(self) -> _Owes | None:
        """What of a request the client owes; None if it owes nothing."""
        return self._owes if self._owes in (_Owes.HEAD, _Owes.BODY) else None

    def opened_by(self, task: asyncio.Task[None]) -> None:
        """``task`` hands the socket to the event loop, and closes it if it is cancelled."""
        self._opening = task

    # The event loop's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
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
        self._admission.forget(self, self._handler)
        self._handler.connection_lost(exc)

    # The request's calls

    def request_began(self) -> None:
        """A head was read; it may have a body."""
        self._set(_Owes.NOTHING)

    def request_ended(self) -> None:
        """Its answer is complete."""
        self._set(_Owes.IDLE)

    @asynccontextmanager
    async def reading_body(self) -> AsyncIterator[Callable[[int], None]]:
        """Around the reading of a body; call what this yields with the bytes that arrived.

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
        """Whether it waits for its client's next request."""
        return self._owes is _Owes.IDLE and self._unread is None

    def time_out(self) -> bool:
        """It has stalled for too long; whether it is closed now, else its request is refused."""
        if self._timer is None:
            self.close(politely=False)
            return True
        self._timer.reschedule(asyncio.get_running_loop().time())
        return False

    def close(self, *, politely: bool) -> None:
        """Close it; politely: after what was written is sent."""
        self._closed = True
        if self._transport is not None and politely:
            self._transport.close()
        elif self._transport is not None:
            self._transport.abort()
        elif self._opening is not None:  # in the middle of a TLS handshake
            self._opening.cancel()


class ClientAdmission:
    """The table of clients' connections.

    Args:
        limits: of all of them.
        count: is called with the reason for each that was dropped.
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
        """What is expected of a body."""
        return f"the rest, or {PROGRESS_NBYTES} bytes every {self.limits.stall_s:g} s"

    def of(self, http: web.Request) -> ClientConnection:
        """The connection of a request; one that is closed already is a new one of no account."""
        return self._of_handler.get(http.protocol) or ClientConnection(self, http.protocol)

    @web.middleware
    async def observing(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Notes when a request begins and ends."""
        connection = self.of(request)
        connection.request_began()
        try:
            return await handler(request)
        finally:
            connection.request_ended()

    # The listener's calls

    async def room(self) -> None:
        """Return when there is a place; a connection that stalls or idles makes room.

        Each may stall for ``SHORTEST_STAY_S``: a good client's request arrives by then.  Under
        a flood new connections wait for that instead of pushing each other out.
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

    def open(self, handler: RequestHandler, host: str) -> ClientConnection | None:
        """A new connection from ``host``; None if it is refused."""
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
        """The system could not open a connection."""
        self._count(Dropped.ACCEPT_FAILED)

    def close_overdue(self) -> None:
        """Close what stalled for too long."""
        for connection in self._control.overdue(self._time()):
            self._count(Dropped.TIMED_OUT)
            if connection.time_out():
                self._leave(connection)

    # A connection's calls

    def unread(self, connection: ClientConnection) -> None:
        """Its client has not read for ``stall_s``."""
        self._drop(connection, Dropped.TIMED_OUT)

    def changed(self, connection: ClientConnection) -> None:
        """A connection stalls, idles or is served now."""
        self._control.note_stall(connection, connection.stalls, self._time())
        if connection.is_idle and connection in self._control:
            self._idle[connection] = None
        else:
            self._idle.pop(connection, None)
        self._room.set()

    def forget(self, connection: ClientConnection, handler: RequestHandler) -> None:
        """A connection is closed."""
        self._of_handler.pop(handler, None)
        self._leave(connection)

    def _drop(self, connection: ClientConnection, reason: Dropped) -> None:
        self._count(reason)
        connection.close(politely=reason is Dropped.IDLE)
        self._leave(connection)

    def _leave(self, connection: ClientConnection) -> None:
        """Its place is free, though its socket may take a moment more to close."""
        self._control.remove_session(connection)
        self._idle.pop(connection, None)
        self._room.set()
