"""One HTTP/1.1 connection to an engine: a request is written, and its answer parsed as it arrives.

aiohttp's client takes more processor time for a request than the router's decision, and wakes a
task for each chunk of a stream.  Here a chunk goes from the parser (llhttp, by httptools) to the
function that writes it to the client, within one call of the event loop::

    socket ──data_received──► parser ──on_body──► buffer ──► a reader that waits (``readany``)
                                                     └─────► or a function, at once (``pass_to``)

Bytes pass as they came, of a compressed answer too.  What an engine sends is bounded: its head, and
what frames its body.  An answer that nothing reads stops the reading of its connection, so that
the engine is slowed down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools
from multidict import CIMultiDict

MOST_HEAD_NBYTES = 64 << 10
"""Bytes of an answer's head, and of what frames its body between two parts of that."""
MOST_BUFFERED_NBYTES = 128 << 10
"""Bytes of an answer that wait for their reader, above which the connection is not read."""

_INTERIM = range(100, 200)
_SWITCHING = 101


class BrokenConnection(ConnectionError):
    """The connection ended before the answer was complete, or the answer is not HTTP."""


class EngineResponse:
    """An answer whose head has arrived.

    Attributes:
        status: the HTTP status.
        headers: all of them, as the engine sent them.
    """

    __slots__ = (
        "_connection", "_error", "_is_paused", "_is_whole", "_nbytes", "_pieces", "_sink",
        "_waiter", "headers", "status",
    )  # fmt: skip

    def __init__(
        self, connection: EngineConnection, status: int, headers: CIMultiDict[str]
    ) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._is_whole = False
        self._is_paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None

    @property
    def content(self) -> EngineResponse:
        """The stream of the body."""
        return self

    def is_eof(self) -> bool:
        """Whether the whole body has arrived."""
        return self._is_whole

    async def readany(self) -> bytes:
        """What has arrived since the last call; empty at the end.

        Raises:
            BrokenConnection: the connection broke before the end.
        """
        while not self._pieces:
            if self._is_whole:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        [data, *more] = self._pieces
        if more:
            data = b"".join(self._pieces)
        self._pieces.clear()
        self._nbytes = 0
        if self._is_paused:
            self._is_paused = False
            self._connection.resume_reading()
        return data

    async def pass_to(self, sink: Callable[[bytes], bool]) -> None:
        """Call ``sink`` with all that arrives, at once, until it returns False.

        Also returns where ``readany`` would not wait: for bytes that arrived before, for those that
        come with the end, and for an error.
        """
        if self._pieces or self._is_whole or self._error is not None:
            return
        self._sink = sink
        try:
            await self._wait()
        finally:
            self._sink = None

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Close the connection, unless the whole answer has arrived."""
        if not self._is_whole:
            self._connection.close()

    # The connection's calls

    def body_arrived(self, part: bytes) -> None:
        """This has arrived, at once."""
        if self._sink is not None:
            if not self._sink(part):
                self._sink = None
                self._wake()
            return
        self._pieces.append(part)
        self._nbytes += len(part)
        if self._nbytes > MOST_BUFFERED_NBYTES and not self._is_paused:
            self._is_paused = True
            self._connection.pause_reading()
        self._wake()

    def end_arrived(self, part: bytes) -> None:
        """The end has arrived, with the last part of the body."""
        self._is_whole = True
        if part:
            self._pieces.append(part)
        self._wake()

    def broke(self, error: Exception) -> None:
        """The connection ended before the answer did."""
        self._error = error
        self._wake()


class EngineConnection(asyncio.Protocol):
    """A connection, which serves one request after another.

    Args:
        released: called when an answer is complete and the connection may serve another request.
        ended: called once the connection is closed.

    Attributes:
        num_requests: that were sent on it.
        idle_since_s: by the event loop's clock, while it waits in a pool.
    """

    def __init__(
        self,
        released: Callable[[EngineConnection], object],
        ended: Callable[[EngineConnection], object],
    ) -> None:
        self.num_requests = 0
        self.idle_since_s = 0.0
        self._released = released
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._head: asyncio.Future[EngineResponse] | None = None
        self._response: EngineResponse | None = None
        self._answer = _Arriving()
        self._unframed_nbytes = 0
        self._lost: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return (
            self._lost is None and self._transport is not None and not self._transport.is_closing()
        )

    async def ask(self, head: bytes, body: bytes | None) -> EngineResponse:
        """Send a request; returns when the head of its answer has arrived.

        Raises:
            BrokenConnection, OSError: the connection broke.
        """
        if self._transport is None or self._lost is not None or self._transport.is_closing():
            raise self._lost or BrokenConnection("Connection closed")
        self.num_requests += 1
        self._unframed_nbytes = 0
        self._answer.is_expected = True
        # Once it is set, the connection may serve another request before this task goes on.
        awaited: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()
        self._head = awaited
        if body and len(body) > MOST_HEAD_NBYTES:
            self._transport.write(head)
            self._transport.write(body)
        else:
            self._transport.write(head + body if body else head)
        try:
            return await awaited
        except asyncio.CancelledError:
            if self._head is awaited:
                self.close()
            elif not awaited.cancelled() and awaited.exception() is None:
                awaited.result().close()
            raise

    def pause_reading(self) -> None:
        """Stop reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close the connection.  Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection without sending what was written.  Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    # The event loop's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's class has the methods, not the base.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer, response = self._answer, self._response
        if not answer.is_expected:  # nothing was asked
            self.close()
            return
        try:
            answer.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not answer.is_whole:
                self._break(BrokenConnection(f"its answer is not HTTP/1.1 ({error})"))
                return
            answer.has_more = True
        # 1. The next part of a body, as nearly always.
        pieces = answer.pieces
        if response is not None and pieces and not answer.is_whole:
            part = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._unframed_nbytes = 0
            response.body_arrived(part)
        # 2. A head, an end, or something that may not be.
        else:
            self._take_head_or_end(answer, len(data))

    def _take_head_or_end(self, answer: _Arriving, nbytes: int) -> None:
        if answer.error is not None:
            self._break(answer.error)
            return
        self._unframed_nbytes = 0 if answer.pieces else self._unframed_nbytes + nbytes
        if self._unframed_nbytes > MOST_HEAD_NBYTES and not answer.is_whole:
            self._break(BrokenConnection("the head of its answer is too long"))
            return
        if answer.has_head and self._response is None:
            self._begin_answer(answer)
        if self._response is None:
            return
        part = answer.take_body()
        if answer.is_whole:
            self._response.end_arrived(part)
            self._end_answer(answer)
        elif part:
            self._response.body_arrived(part)

    def _begin_answer(self, answer: _Arriving) -> None:
        self._response = EngineResponse(self, answer.status, answer.headers)
        head, self._head = self._head, None
        if head is not None and not head.done():
            head.set_result(self._response)

    def _end_answer(self, answer: _Arriving) -> None:
        assert self._transport is not None
        # A server that answers before it has read the whole request may not read the rest.
        is_sent = self._transport.get_write_buffer_size() == 0
        may_stay_open = answer.may_stay_open and not answer.has_more and is_sent
        self._response = None
        answer.start_anew()
        if may_stay_open and not self._transport.is_closing():
            self._released(self)
        else:
            self.close()

    def eof_received(self) -> bool:
        answer = self._answer
        if answer.has_head and answer.ends_with_connection and self._response is not None:
            self._response.end_arrived(b"")
            self._response = None
            answer.start_anew()
        return False  # closes the transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = exc or BrokenConnection("Server disconnected")
        self._fail(self._lost)
        self._answer.is_expected = False
        self._ended(self)

    def _break(self, error: Exception) -> None:
        """Close the connection because of what it sent."""
        self._lost = error
        self._fail(error)
        self._answer.is_expected = False
        self.close()

    def _fail(self, error: Exception) -> None:
        head, self._head = self._head, None
        if head is not None and not head.done():
            head.set_exception(error)
        if self._response is not None:
            self._response.broke(error)
            self._response = None


class _Arriving:
    """The parser's view of an answer; ``EngineConnection`` reads it after each piece of data.

    Attributes:
        is_expected: whether a request was sent.
        has_more: bytes came after the end.
        may_stay_open: whether the server lets the connection serve another request.
        ends_with_connection: nothing in the head says where the body ends.
    """

    __slots__ = (
        "_is_interim", "_num_pieces", "ends_with_connection", "error", "has_head", "has_more",
        "headers", "is_expected", "is_whole", "may_stay_open", "on_body", "parser", "pieces",
        "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        # The list's own method: a call less for each chunk.
        self.on_body = self.pieces.append
        self.parser = httptools.HttpResponseParser(self)
        self.start_anew()

    def start_anew(self) -> None:
        """No request was sent."""
        self.is_expected = self._is_interim = False
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.pieces.clear()
        self._num_pieces = 0
        self.has_head = self.is_whole = self.has_more = False
        self.may_stay_open = self.ends_with_connection = False
        self.error: Exception | None = None

    def take_body(self) -> bytes:
        """The part of the body that has arrived, without what came after the end."""
        part = b"".join(self.pieces[: self._num_pieces] if self.is_whole else self.pieces)
        self.pieces.clear()
        return part

    # The parser's calls; an exception of theirs would be the parser's

    def on_message_begin(self) -> None:
        if self.is_whole:
            self.has_more = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # otherwise it is a trailer
            # As aiohttp decodes the client's: bytes that are not UTF-8 pass unchanged.
            text = value.decode("utf-8", "surrogateescape")
            self.headers.add(name.decode("utf-8", "surrogateescape"), text.strip(" \t"))

    def on_headers_complete(self) -> None:
        if self.is_whole:
            return
        self.status = self.parser.get_status_code()
        if self.status == _SWITCHING:
            self.error = BrokenConnection("it switches protocols")
        elif self.status in _INTERIM:
            self._is_interim = True
            self.headers = CIMultiDict()
        else:
            self.has_head = True
            self.may_stay_open = self.parser.should_keep_alive()
            self.ends_with_connection = not (
                "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
            )

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
        elif not self.is_whole:
            self.is_whole = True
            self._num_pieces = len(self.pieces)
