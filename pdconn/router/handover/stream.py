"""Relays an engine's answer to the client, byte for byte.

Bytes are written as they arrive, and unchanged; those that arrive together leave together.  An
``AnswerReader`` inspects the written bytes.  A client that reads slowly slows the engine's
connection down instead of filling the router's memory.

aiohttp writes the head and the first bytes.  The chunks of a stream after that are written where
they arrive, in the event loop's call for the engine's connection: no task is woken for a token::

    engine's socket ──► parser ──► _Chunks ──► client's transport
                                      │ the client does not read: back to the task, which waits

A client may close its connection after the last event, before the engine closes its own; a time-out
or broken connection after the last event has no effect on it either: such an answer is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType

from aiohttp import web
from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import ConnectionLost, EngineAnswer
from pdconn.router.openai.bodies import AnswerReader
from pdconn.router.openai.requests import REQUEST_ID_HEADER

#: The engine that sent the answer.
ENGINE_HEADER = "X-Pdconn-Engine"

#: nginx, and proxies derived from it, buffer an answer unless this header disables that.
_BUFFERING = "X-Accel-Buffering"
_EVENTS = "text/event-stream"
_MOST_UNSENT_NBYTES = 64 << 10
"""Bytes for a client that does not read; the event loop pauses writing above as many."""


class StreamEnd(Enum):
    """The end of a relayed stream."""

    WHOLE = "whole"
    ENGINE_FAILED = "engine failed"
    CLIENT_LEFT = "client left"
    TIMED_OUT = "timed out"


async def relay(
    http: web.Request,
    answer: EngineAnswer,
    request_id: str,
    *,
    name_engine: bool,
    reader: AnswerReader,
    deadline_s: float | None = None,
    began: Callable[[], object] | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> tuple[web.StreamResponse, StreamEnd]:
    """Write an answer to the client of ``http``, and close it.

    An answer that is incomplete at ``deadline_s``, by the event loop's clock, is cut off.

    Args:
        reader: inspects the written bytes.
        began: called after the first bytes of a stream are written, unless they are an error.
        more: headers of the router's own.
    """
    headers = answer.headers
    if name_engine:
        headers[ENGINE_HEADER] = answer.engine
    headers[REQUEST_ID_HEADER] = request_id
    headers.update(more)
    headers.update(unbuffering(headers))
    # 1. The whole body has arrived: no stream is needed.
    if answer.is_complete:
        whole = await _at_once(answer, headers, reader)
        if began is not None and reader.error is None:
            began()
        return whole, StreamEnd.WHOLE
    # 2. Chunks are written as they arrive.  After a failure the client's connection is closed
    # without the end of the answer, unless the client has everything already.
    response = web.StreamResponse(status=answer.status, headers=headers)
    async with answer:
        try:
            async with asyncio.timeout_at(deadline_s):
                await response.prepare(http)
                await _write_all(response, answer, _Chunks(http, reader), began)
        except TimeoutError:
            _break_off(http)
            end = StreamEnd.TIMED_OUT
        except ConnectionLost:
            _break_off(http)
            end = StreamEnd.ENGINE_FAILED
        except ConnectionResetError:
            end = StreamEnd.CLIENT_LEFT
        else:
            reader.read_end()
            end = StreamEnd.WHOLE
    return response, StreamEnd.WHOLE if reader.is_whole else end


def unbuffering(headers: CIMultiDict[str]) -> dict[str, str]:
    """What is set in the head of an answer, so that no proxy before the client holds a stream back.

    >>> unbuffering(CIMultiDict({"Content-Type": "text/event-stream; charset=utf-8"}))
    {'X-Accel-Buffering': 'no'}
    """
    is_stream = headers.get("Content-Type", "").startswith(_EVENTS)
    return {_BUFFERING: "no"} if is_stream and _BUFFERING not in headers else {}


async def _write_all(
    response: web.StreamResponse,
    answer: EngineAnswer,
    chunks: _Chunks,
    began: Callable[[], object] | None,
) -> None:
    """Write the whole answer."""
    # Whether aiohttp, which has prepared the response, writes it in chunks of HTTP/1.1.
    is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
    reader = chunks.reader
    while chunk := await answer.next_chunk():
        # The last bytes and the end leave together.
        await (response.write_eof if answer.is_complete else response.write)(chunk)
        reader.read_chunk(chunk)
        if began is not None and reader.error is None:
            began()
        began = None
        if is_chunked:
            await chunks.pass_on(answer)
    await response.write_eof()


class _Chunks:
    """Writes what arrives of an answer to its client, while that reads.

    ``reader`` inspects the written bytes.
    """

    __slots__ = ("_http", "_is_stopped", "_transport", "reader")

    def __init__(self, http: web.Request, reader: AnswerReader) -> None:
        self._http = http
        self.reader = reader
        self._transport = http.transport
        self._is_stopped = False

    async def pass_on(self, answer: EngineAnswer) -> None:
        """Write chunks as they arrive, until ``next_chunk`` has to be called.

        Raises:
            ConnectionResetError: the client has left.
        """
        self._is_stopped = False
        await answer.pass_to(self._write)
        if self._is_stopped:
            if self._transport is None or self._transport.is_closing():
                raise ConnectionResetError("the client has left")
            await self._http.writer.drain()  # the client does not read

    def _write(self, data: bytes) -> bool:
        """Write bytes as one chunk; False if the task is to go on."""
        transport = self._transport
        if transport is None or transport.is_closing():
            self._is_stopped = True
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.reader.read_chunk(data)
        self._is_stopped = transport.get_write_buffer_size() > _MOST_UNSENT_NBYTES
        return not self._is_stopped


async def _at_once(
    answer: EngineAnswer, headers: CIMultiDict[str], reader: AnswerReader
) -> web.Response:
    """Send a body that has arrived completely: head and body leave in one packet."""
    headers.popall("Content-Length", None)  # aiohttp writes its own
    async with answer:
        body = await answer.read_rest()
    reader.read_chunk(body)
    reader.read_end()
    return web.Response(status=answer.status, headers=headers, body=body)


def _break_off(http: web.Request) -> None:
    """Close the client's connection without the end of its answer.

    The last chunk (or the rest of Content-Length) is the client's sign that the answer is complete.
    Without it the client sees an error, as it must.
    """
    if http.transport is not None:
        http.transport.close()
