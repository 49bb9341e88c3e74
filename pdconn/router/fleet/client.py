"""HTTP requests to engines: one shared session, and two ways to fail.

What the caller may do next depends on whether the engine can have seen the request, so the
errors tell that:

    ConnectFailed    there was no connection: the engine has not seen the request, and a
                     ticket in it is unused
    ConnectionLost   the connection broke after the request began to leave: a ticket in it
                     may be claimed, or used up, by now

``OutOfResources`` is a ``ConnectFailed`` that says nothing of the engine: this process has no
file descriptor or memory left.

Answers pass byte for byte: nothing is decompressed, decoded or joined, and no cookie of one
client reaches another.
"""

from __future__ import annotations

import errno
import io
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from pdconn.router.errors import Busy
from pdconn.router.openai.headers import OF_THE_ANSWER, keep_end_to_end

#: vLLM's server closes an idle connection after 5 s.  The router must close it first, or now
#: and then a request is written into a connection that is just closing.
_KEEPALIVE_S = 4.0

#: TCP keepalive: a connection breaks if the engine's host (not its server) is unreachable for
#: this long; the first probe is sent after 6 s, then every 3 s.
_DEAD_HOST_S = 15
_PROBE_AFTER_S, _PROBE_EVERY_S = 6, 3

#: aiohttp writes bytes in one piece and warns above 1 MiB; a file in pieces.
_ONE_PIECE_NBYTES = 1 << 20


Authorization = Callable[[], str | None]
"""The ``Authorization`` that the router itself asks engines with now, if any."""


class ConnectFailed(Exception):
    """There was no connection: the engine has not seen the request."""


class OutOfResources(Busy, ConnectFailed):
    """There was no connection because this process could not open one."""


class ConnectionLost(Exception):
    """The connection broke before the answer was complete."""


class EngineTimedOut(ConnectionLost):
    """The engine did not answer in time; it may be up, and have much to do."""


@dataclass(slots=True)
class Delivery:
    """Whether the request has begun to leave, for callers that may stop waiting."""

    begun: bool = False


class EngineAnswer:
    """An engine's answer, of which only the head has been read.

    Its owner closes it.  Closing early closes the connection, and that makes vLLM abort the
    request.
    """

    def __init__(self, engine: str, response: aiohttp.ClientResponse) -> None:
        self.engine = engine
        self._response = response
        self._first_chunk: bytes | None = None
        self._when_closed: Callable[[], object] = _nothing

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._response.status

    @property
    def headers(self) -> CIMultiDict[str]:
        """The headers that belong to the answer, not to the connection."""
        return keep_end_to_end(self._response.headers, also=OF_THE_ANSWER)

    async def await_first(self) -> None:
        """Wait until the body has begun (or ended without a byte)."""
        if self._first_chunk is None:
            self._first_chunk = await self._read()

    async def next(self) -> bytes:
        """The bytes that arrived since the last call; empty at the end.

        Raises:
            ConnectionLost: the connection broke before the end.
        """
        if self._first_chunk is None:
            return await self._read()
        chunk, self._first_chunk = self._first_chunk, None
        return chunk

    @property
    def is_complete(self) -> bool:
        """Whether the whole body has arrived, so that reading it does not wait."""
        return self._response.content.is_eof()

    async def rest(self) -> bytes:
        """The whole body, for answers that are known to be short."""
        pieces = []
        while piece := await self.next():
            pieces.append(piece)
        return b"".join(pieces)

    async def _read(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            self.close()
            raise ConnectionLost(_reason(error)) from error

    def when_closed(self, act: Callable[[], object]) -> None:
        """Call ``act`` when the answer is closed; replaces an earlier ``act``."""
        self._when_closed = act

    def close(self) -> None:
        """Return the connection to the pool if the body was read to its end, else close it."""
        self._response.close()
        act, self._when_closed = self._when_closed, _nothing
        act()

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
    """The HTTP session that all requests to all engines share."""

    def __init__(self, connect_timeout_s: float) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_note_sent)
        # An answer may take minutes to begin and hours to end, so only connecting has a
        # time-out.  No limit per host: the engines queue, not the router.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_keepalive_socket
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=connect_timeout_s, sock_connect=connect_timeout_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            trace_configs=[trace],
        )

    async def post(
        self,
        engine: str,
        path: str,
        body: bytes,
        headers: CIMultiDict[str],
        delivery: Delivery | None = None,
    ) -> EngineAnswer:
        """Send a body; returns when the answer's head has arrived.

        Raises:
            ConnectFailed: the engine has not seen the request.
            ConnectionLost: it may have.
        """
        data = body if len(body) <= _ONE_PIECE_NBYTES else io.BytesIO(body)
        return await self._request("POST", engine, path, headers, data=data, delivery=delivery)

    async def get(self, engine: str, path: str, headers: CIMultiDict[str]) -> EngineAnswer:
        """Request a page; returns when the answer's head has arrived."""
        return await self._request("GET", engine, path, headers)

    async def _request(
        self,
        method: str,
        engine: str,
        path: str,
        headers: CIMultiDict[str],
        *,
        data: bytes | io.BytesIO | None = None,
        delivery: Delivery | None = None,
    ) -> EngineAnswer:
        url = URL(engine + path, encoded=True)
        try:
            response = await self._session.request(
                method,
                url,
                data=data,
                headers=headers,
                allow_redirects=False,
                trace_request_ctx=delivery,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if _is_our_fault(error):
                raise OutOfResources(f"it cannot open a connection ({_reason(error)})") from error
            raise ConnectFailed(_reason(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(_reason(error)) from error
        return EngineAnswer(engine, response)

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


def _keepalive_socket(
    address: tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, object],
) -> socket.socket:
    """A socket whose kernel notices that the other host is gone."""
    sock = socket.socket(address[0], address[1], address[2])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = (_DEAD_HOST_S - _PROBE_AFTER_S) // _PROBE_EVERY_S
    for option, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER_S),
        ("TCP_KEEPINTVL", _PROBE_EVERY_S),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", 1000 * _DEAD_HOST_S),  # sent and not acknowledged
    ):
        if hasattr(socket, option):  # Linux has all four
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


def _nothing() -> None:
    pass


async def _note_sent(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestHeadersSentParams,
) -> None:
    del session, params
    if isinstance(context.trace_request_ctx, Delivery):
        context.trace_request_ctx.begun = True


_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def _is_our_fault(error: Exception) -> bool:
    """Whether this process, not the engine, kept a connection from being made."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return not _can_open_a_file()  # the look-up needs one, and does not say that it had none
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in _OURS


def _can_open_a_file() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _OURS
    return True


def _reason(error: Exception) -> str:
    """One line for logs and errors; some of aiohttp's have no text."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):  # its errno is OpenSSL's, and means something else
        plain = cause.reason == "WRONG_VERSION_NUMBER"
        return f"TLS: {cause.reason or cause}" + ("; is it an http:// server?" if plain else "")
    if isinstance(cause, socket.gaierror):  # its errno is the resolver's
        return str(cause.strerror)
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__
