"""Asking an engine over HTTP: one shared session, and two ways to fail.

What the caller may do next depends on whether the engine can have seen the
request, so that is what the errors tell apart:

    Unreached   no connection came about: the engine knows nothing of it, and a
                ticket sent along is as good as new
    Lost        the engine died with the request in its hands: a ticket may be
                claimed, or used up, by now

Answers pass byte for byte: nothing is decompressed, decoded or joined, and no
cookie of one client reaches another.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from pdconn.router.openai.headers import OF_THE_ANSWER, keep_end_to_end

#: vLLM's server closes a connection that idles for 5 s.  Ours must go first, or
#: a request is now and then written into a connection that is just closing.
_KEEPALIVE_S = 4.0

#: How long an engine may be silent as a host, not as a server: what the network swallowed
#: is given up, and so is waiting for a machine that is gone without a word.
_SILENT_S = 15
_ASK_AFTER_S, _ASK_EVERY_S = 6, 3

#: aiohttp writes bytes in one piece and warns above 1 MiB; a file in pieces.
_ONE_PIECE_NBYTES = 1 << 20


class ConnectFailed(Exception):
    """No connection to the engine came about."""


class ConnectionLost(Exception):
    """The engine went away with the request or its answer unfinished."""


@dataclass(slots=True)
class Delivery:
    """Whether a request has begun to leave, for callers who may stop waiting."""

    begun: bool = False


class EngineAnswer:
    """An engine's answer, of which only the head has been read.

    Whoever holds one closes it.  Closing early closes the connection, which is
    how vLLM learns that nobody waits for the rest and aborts the request.
    """

    def __init__(self, engine: str, response: aiohttp.ClientResponse) -> None:
        self.engine = engine
        self._response = response
        self._ahead: bytes | None = None
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
        if self._ahead is None:
            self._ahead = await self._read()

    async def next(self) -> bytes:
        """The bytes that came since the last call; empty at the end.

        Raises:
            Lost: the engine closed the connection before the end.
        """
        if self._ahead is None:
            return await self._read()
        ahead, self._ahead = self._ahead, None
        return ahead

    @property
    def is_here(self) -> bool:
        """Whether the whole body has arrived, so that reading it waits for nothing."""
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
            raise ConnectionLost(_say(error)) from error

    def when_closed(self, act: Callable[[], object]) -> None:
        """Call ``act`` as soon as nobody holds the answer any more; only the last one given."""
        self._when_closed = act

    def close(self) -> None:
        """Let go: back to the pool when read to the end, else closed."""
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
    """The one session that every request to every engine goes through."""

    def __init__(self, connect_timeout_s: float) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_note_begun)
        # An answer may take minutes to begin and hours to end, so only the
        # connecting is timed.  No limit per host: the engines queue, not we.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_watchful_socket
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
        """Send a body; return when the answer's head is here.

        Raises:
            Unreached: the engine cannot have seen the request.
            Lost: it may have.
        """
        data = body if len(body) <= _ONE_PIECE_NBYTES else io.BytesIO(body)
        return await self._ask("POST", engine, path, headers, data=data, delivery=delivery)

    async def get(self, engine: str, path: str, headers: CIMultiDict[str]) -> EngineAnswer:
        """Ask for a page; return when the answer's head is here."""
        return await self._ask("GET", engine, path, headers)

    async def _ask(
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
            raise ConnectFailed(_say(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(_say(error)) from error
        return EngineAnswer(engine, response)

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


def _watchful_socket(
    address: tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, object],
) -> socket.socket:
    """A socket whose kernel notices that the other host is gone, whoever waits for whom."""
    made = socket.socket(address[0], address[1], address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    asks = (_SILENT_S - _ASK_AFTER_S) // _ASK_EVERY_S
    for option, value in (
        ("TCP_KEEPIDLE", _ASK_AFTER_S),
        ("TCP_KEEPINTVL", _ASK_EVERY_S),
        ("TCP_KEEPCNT", asks),
        ("TCP_USER_TIMEOUT", 1000 * _SILENT_S),  # what was sent and never confirmed
    ):
        if hasattr(socket, option):  # Linux has all four
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


def _nothing() -> None:
    pass


async def _note_begun(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestHeadersSentParams,
) -> None:
    del session, params
    if isinstance(context.trace_request_ctx, Delivery):
        context.trace_request_ctx.begun = True


def _say(error: Exception) -> str:
    """One line for logs and errors; some of aiohttp's have no text."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__
