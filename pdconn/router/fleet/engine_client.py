"""HTTP requests to engines: one pool of connections, and two kinds of failure.

Whether a request may be repeated depends on whether the engine can have seen it, so the errors
distinguish that::

    ConnectFailed    there was no connection: the engine has not seen the request, and a
                     ticket in it is unused
    ConnectionLost   the connection broke after sending had started: a ticket in the request
                     may be claimed or used by now

A kept connection that breaks under its request says little about the engine, whose server closes
idle ones: ``IdleConnectionLost``, or the request is sent once more.  ``OutOfResources`` is a
``ConnectFailed`` that says nothing about the engine: this process ran out of file descriptors or
memory.

Answers pass byte for byte: nothing is decompressed or decoded, and no cookie of one client reaches
another.  ``connections`` has the connections themselves.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
from multidict import CIMultiDict

from pdconn.router.fleet.connections.engine_connection import EngineConnection, EngineResponse
from pdconn.router.fleet.connections.engine_pool import EnginePool, Origin, origin_of
from pdconn.router.fleet.connections.request_head import request_head
from pdconn.router.fleet.engine_sockets import EngineSockets
from pdconn.router.openai.requests import OF_THE_ANSWER, keep_end_to_end
from pdconn.router.router_errors import Busy

#: vLLM's server closes an idle connection after 5 s (``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``).  The router
#: closes it first; otherwise some requests would be written into a connection that is just closing,
#: and would have to be sent again.
KEEPALIVE_S = 4.0


Authorization = Callable[[], str | None]
"""The ``Authorization`` of the router's own requests to engines, if any."""


class ConnectFailed(Exception):
    """There was no connection: the engine has not seen the request."""


class OutOfResources(Busy, ConnectFailed):
    """There was no connection because this process could not open one."""


class ConnectionLost(Exception):
    """The connection broke before the answer was complete."""


class IdleConnectionLost(ConnectionLost):
    """A kept connection broke under the request: usually the server had just closed it."""


class EngineTimedOut(ConnectionLost):
    """The engine did not answer in time; it may be up but busy."""


class AnswerAborted(ConnectionLost):
    """The engine ended the request before it had generated anything: it stops, or is paused."""


@dataclass(slots=True)
class Delivery:
    """Whether sending the request has started, for callers that may stop waiting."""

    begun: bool = False


class EngineAnswer:
    """An engine's answer, of which only the head has been read.

    Its owner closes it.  Closing early closes the connection, which makes vLLM abort the request.
    """

    def __init__(self, engine: str, response: EngineResponse) -> None:
        self.engine = engine
        self._response = response
        self._headers: CIMultiDict[str] | None = None
        self._held: list[bytes] = []
        self._when_closed: Callable[[BaseException | None], object] = _nothing

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._response.status

    @property
    def headers(self) -> CIMultiDict[str]:
        """The end-to-end headers of the answer, which its owner may change."""
        if self._headers is None:
            self._headers = keep_end_to_end(self._response.headers, also=OF_THE_ANSWER)
        return self._headers

    async def await_first(self) -> None:
        """Wait until the body has begun, or has ended empty."""
        if not self._held:
            await self.await_more()

    async def await_more(self) -> bytes:
        """The next bytes of the body, empty at its end; ``next_chunk`` has them, too."""
        piece = await self._read()
        self._held.append(piece)
        return piece

    async def wait_begun(self) -> bool:
        """Whether there is an answer: its head has come."""
        return True

    def when_begun(self, act: Callable[[], object]) -> None:
        """Call ``act`` once there is an answer: at once."""
        act()

    @property
    def first_chunk(self) -> bytes:
        """The beginning of the body that has been received."""
        return self._held[0] if len(self._held) == 1 else b"".join(self._held)

    async def next_chunk(self) -> bytes:
        """The bytes received since the last call; empty at the end.

        Raises:
            ConnectionLost: the connection broke before the end.
        """
        if not self._held:
            return await self._read()
        chunk = self.first_chunk
        self._held.clear()
        return chunk

    async def pass_to(self, sink: Callable[[bytes], bool]) -> None:
        """Call ``sink`` with all bytes that arrive, at once, until it returns False.

        Only after ``next_chunk``, which also has what comes with the end, and the error of a
        connection that breaks.
        """
        if not self._held:
            await self._response.content.pass_to(sink)

    @property
    def is_complete(self) -> bool:
        """Whether the whole body has been received, so that reading it does not wait."""
        return self._response.content.is_eof()

    async def read_rest(self) -> bytes:
        """The whole remaining body; for short answers."""
        pieces = []
        while piece := await self.next_chunk():
            pieces.append(piece)
        return b"".join(pieces)

    async def _read(self) -> bytes:
        try:
            return await self._response.content.readany()
        except OSError as error:
            lost = ConnectionLost(reason_of(error))
            self.close(lost)
            raise lost from error

    def when_closed(self, act: Callable[[BaseException | None], object]) -> None:
        """Call ``act`` once the answer is closed, with the error that interrupted it, if any."""
        self._when_closed = act

    def close(self, error: BaseException | None = None) -> None:
        """Return the connection to the pool if the body was read completely, else close it.

        ``error``: the error that interrupts the answer.
        """
        self._response.close()
        act, self._when_closed = self._when_closed, _nothing
        act(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class EngineClient:
    """The connections shared by all requests to all engines.

    A kept connection may break under a request because its server closes it at that moment.  The
    request is then sent once more, on a new connection (RFC 9110, section 9.2.2; Envoy's
    ``reset-before-request``).
    """

    def __init__(self, connect_timeout_s: float) -> None:
        self._sockets = EngineSockets()
        # An answer may take minutes to begin and hours to end, so only connecting has a time-out.
        self._connect_timeout_s = connect_timeout_s
        # No limit per host: the engines queue, not the router.
        self._pool = EnginePool(self._sockets.open_socket, connect_timeout_s, KEEPALIVE_S)

    async def post_body(
        self,
        engine: str,
        path: str,
        body: bytes,
        headers: CIMultiDict[str],
        delivery: Delivery | None = None,
        *,
        may_repeat: bool = True,
    ) -> EngineAnswer:
        """Send a body; returns when the head of the answer has arrived.

        ``may_repeat``: False for a body that the engine must not receive twice.

        Raises:
            ConnectFailed: the engine has not seen the request.
            IdleConnectionLost: a kept connection broke, and the body may not be repeated.
            ConnectionLost: the engine may have seen the request.
        """
        return await self._request(
            "POST", engine, path, headers, body=body, delivery=delivery, may_repeat=may_repeat
        )

    async def get_page(self, engine: str, path: str, headers: CIMultiDict[str]) -> EngineAnswer:
        """Request a page; returns when the head of the answer has arrived."""
        return await self._request("GET", engine, path, headers)

    async def _request(
        self,
        method: str,
        engine: str,
        path: str,
        headers: CIMultiDict[str],
        *,
        body: bytes | None = None,
        delivery: Delivery | None = None,
        may_repeat: bool = True,
    ) -> EngineAnswer:
        origin, delivery = origin_of(engine), delivery or Delivery()
        head = request_head(method, origin, path, headers, None if body is None else len(body))
        connection = self._pool.take_kept(origin)
        if connection is not None:
            delivery.begun = True
            try:
                return EngineAnswer(engine, await connection.ask(head, body))
            except OSError as error:
                lost = reason_of(error)
                if not may_repeat:
                    raise IdleConnectionLost(lost) from error
        try:
            connection = await self._connect(origin)
        except ConnectFailed as failed:
            if delivery.begun:  # the first attempt may have been seen
                raise ConnectionLost(str(failed)) from failed
            raise
        delivery.begun = True
        try:
            return EngineAnswer(engine, await connection.ask(head, body))
        except OSError as error:
            raise ConnectionLost(reason_of(error)) from error

    async def _connect(self, origin: Origin) -> EngineConnection:
        try:
            return await self._pool.open_connection(origin)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # ours, not the system's
                within = f"no connection within {self._connect_timeout_s:g} s"
                raise ConnectFailed(within) from error
            if _is_our_fault(error):
                raise OutOfResources(f"it cannot open a connection ({reason_of(error)})") from error
            raise ConnectFailed(reason_of(error)) from error

    async def close(self) -> None:
        """Close every connection."""
        await self._sockets.close()
        await self._pool.close()


def _nothing(error: BaseException | None) -> None:
    del error


_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def _is_our_fault(error: OSError) -> bool:
    """Whether this process, not the engine, prevented the connection."""
    if isinstance(error, socket.gaierror):
        # Name look-up needs a file, and does not report that it had none.
        return not _can_open_a_file()
    return not isinstance(error, ssl.SSLError) and error.errno in _OURS


def _can_open_a_file() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _OURS
    return True


def reason_of(error: Exception) -> str:
    """One line for logs and errors; some of aiohttp's errors have no text."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):  # its errno is OpenSSL's, with another meaning
        plain = cause.reason == "WRONG_VERSION_NUMBER"
        return f"TLS: {cause.reason or cause}" + ("; is it an http:// server?" if plain else "")
    if isinstance(cause, socket.gaierror):  # its errno is the resolver's
        return str(cause.strerror)
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__
