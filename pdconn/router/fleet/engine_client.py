"""HTTP requests to engines: one shared session, and two kinds of failure.

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

Answers pass byte for byte: nothing is decompressed, decoded or joined, and no cookie of one client
reaches another.
"""

from __future__ import annotations

import errno
import io
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from pdconn.router.fleet.engine_sockets import EngineSockets
from pdconn.router.openai.requests import OF_THE_ANSWER, keep_end_to_end
from pdconn.router.router_errors import Busy

#: vLLM's server closes an idle connection after 5 s (``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``).  The router
#: closes it first; otherwise some requests would be written into a connection that is just closing,
#: and would have to be sent again.
KEEPALIVE_S = 4.0

#: aiohttp writes bytes in one piece and warns above 1 MiB; a file in pieces.
_ONE_PIECE_NBYTES = 1 << 20


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


@dataclass(slots=True)
class Delivery:
    """Whether sending the request has started, for callers that may stop waiting."""

    begun: bool = False


@dataclass(slots=True)
class _Sending:
    """One request being sent; ``reuses``: the connection had served another request before."""

    delivery: Delivery
    reuses: bool = False


class EngineAnswer:
    """An engine's answer, of which only the head has been read.

    Its owner closes it.  Closing early closes the connection, which makes vLLM abort the request.
    """

    def __init__(self, engine: str, response: aiohttp.ClientResponse) -> None:
        self.engine = engine
        self._response = response
        self._first_chunk: bytes | None = None
        self._when_closed: Callable[[BaseException | None], object] = _nothing

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._response.status

    @property
    def headers(self) -> CIMultiDict[str]:
        """The end-to-end headers of the answer."""
        return keep_end_to_end(self._response.headers, also=OF_THE_ANSWER)

    async def await_first(self) -> None:
        """Wait until the body has begun, or has ended empty."""
        if self._first_chunk is None:
            self._first_chunk = await self._read()

    async def wait_begun(self) -> bool:
        """Whether there is an answer: its head has come."""
        return True

    @property
    def first_chunk(self) -> bytes:
        """The beginning of the body that ``await_first`` has received."""
        return self._first_chunk or b""

    async def next_chunk(self) -> bytes:
        """The bytes received since the last call; empty at the end.

        Raises:
            ConnectionLost: the connection broke before the end.
        """
        if self._first_chunk is None:
            return await self._read()
        chunk, self._first_chunk = self._first_chunk, None
        return chunk

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
        except (aiohttp.ClientError, OSError) as error:
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
    """The HTTP session shared by all requests to all engines.

    A kept connection may break under a request because its server closes it at that moment.  The
    request is then sent once more, on a new connection (RFC 9110, section 9.2.2; Envoy's
    ``reset-before-request``).
    """

    def __init__(self, connect_timeout_s: float) -> None:
        self._sockets = EngineSockets()
        self._timeout = aiohttp.ClientTimeout(
            # An answer may take minutes to begin and hours to end, so only connecting has a
            # time-out.
            total=None,
            connect=connect_timeout_s,
            sock_connect=connect_timeout_s,
        )
        self._kept = self._session(keepalive_timeout=KEEPALIVE_S)
        self._new = self._session(force_close=True)

    def _session(self, **connections: Any) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(_note_new)
        trace.on_connection_reuseconn.append(_note_reused)
        trace.on_request_headers_sent.append(_note_sent)
        return aiohttp.ClientSession(
            # No limit per host: the engines queue, not the router.
            connector=aiohttp.TCPConnector(
                limit=0, socket_factory=self._sockets.open_socket, **connections
            ),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            trace_configs=[trace],
        )

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
        url = URL(engine + path, encoded=True)
        sending = _Sending(delivery or Delivery())
        send = partial(self._send, method=method, url=url, headers=headers, sending=sending)
        try:
            response = await send(self._kept, body)
        except ConnectionLost as error:
            if not sending.reuses:
                raise
            if not may_repeat:
                raise IdleConnectionLost(str(error)) from error
            try:
                response = await send(self._new, body)
            except ConnectFailed as failed:
                # The first attempt may have been seen.
                raise ConnectionLost(str(failed)) from failed
        return EngineAnswer(engine, response)

    async def _send(
        self,
        session: aiohttp.ClientSession,
        body: bytes | None,
        *,
        method: str,
        url: URL,
        headers: CIMultiDict[str],
        sending: _Sending,
    ) -> aiohttp.ClientResponse:
        is_long = body is not None and len(body) > _ONE_PIECE_NBYTES
        try:
            return await session.request(
                method,
                url,
                data=io.BytesIO(body or b"") if is_long else body,
                headers=headers,
                allow_redirects=False,
                trace_request_ctx=sending,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if _is_our_fault(error):
                raise OutOfResources(f"it cannot open a connection ({reason_of(error)})") from error
            raise ConnectFailed(reason_of(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(reason_of(error)) from error

    async def close(self) -> None:
        """Close every connection."""
        await self._sockets.close()
        await self._kept.close()
        await self._new.close()


def _nothing(error: BaseException | None) -> None:
    del error


async def _note_new(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceConnectionCreateEndParams,
) -> None:
    del session, params
    context.trace_request_ctx.reuses = False


async def _note_reused(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    del session, params
    context.trace_request_ctx.reuses = True


async def _note_sent(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestHeadersSentParams,
) -> None:
    del session, params
    context.trace_request_ctx.delivery.begun = True


_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def _is_our_fault(error: Exception) -> bool:
    """Whether this process, not the engine, prevented the connection."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        # Name look-up needs a file, and does not report that it had none.
        return not _can_open_a_file()
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in _OURS


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
