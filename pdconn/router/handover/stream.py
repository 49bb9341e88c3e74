"""An engine's answer to the client, byte for byte.

Chunks are written as they come, neither joined nor changed; an ``AnswerReader`` looks at what was
written.  A client that reads slowly slows the engine's connection down instead of filling the
router's memory.

A client that has everything may close its connection before the engine closes its own, and a
time-out or a broken connection after the last event costs it nothing: such an answer is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from aiohttp import web
from multidict import CIMultiDict

from pdconn.router.fleet.client import ConnectionLost, EngineAnswer
from pdconn.router.openai.bodies import AnswerReader
from pdconn.router.openai.requests import REQUEST_ID_HEADER

#: The engine that an answer comes from.
ENGINE_HEADER = "X-Pdconn-Engine"

#: nginx, and proxies that imitate it, hold an answer back until they have much of it, unless this
#: header says no.
_BUFFERING = "X-Accel-Buffering"
_EVENTS = "text/event-stream"


class StreamEnd(Enum):
    """How a stream ended."""

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
) -> tuple[web.StreamResponse, StreamEnd]:
    """Write an answer to the client of ``http``, and close the answer.

    An answer that is not whole at ``deadline_s``, by the event loop's clock, is broken off.

    Args:
        reader: of what was written.
        began: called once the first bytes of a stream are written, unless they are an error.
    """
    headers = answer.headers
    if name_engine:
        headers[ENGINE_HEADER] = answer.engine
    headers[REQUEST_ID_HEADER] = request_id
    if headers.get("Content-Type", "").startswith(_EVENTS):
        headers.setdefault(_BUFFERING, "no")
    if answer.is_complete:
        whole = await _at_once(answer, headers, reader)
        if began is not None and reader.error is None:
            began()
        return whole, StreamEnd.WHOLE
    response = web.StreamResponse(status=answer.status, headers=headers)
    async with answer:
        try:
            async with asyncio.timeout_at(deadline_s):
                await response.prepare(http)
                while chunk := await answer.next():
                    await response.write(chunk)
                    reader.feed(chunk)
                    if began is not None and reader.error is None:
                        began()
                    began = None
                await response.write_eof()
        except TimeoutError:
            _break_off(http)
            end = StreamEnd.TIMED_OUT
        except ConnectionLost:
            _break_off(http)
            end = StreamEnd.ENGINE_FAILED
        except ConnectionResetError:
            end = StreamEnd.CLIENT_LEFT
        else:
            reader.end()
            end = StreamEnd.WHOLE
    return response, StreamEnd.WHOLE if reader.is_whole else end


async def _at_once(
    answer: EngineAnswer, headers: CIMultiDict[str], reader: AnswerReader
) -> web.Response:
    """A body that has arrived already: head and body leave in one packet."""
    headers.popall("Content-Length", None)  # aiohttp writes the same
    async with answer:
        body = await answer.rest()
    reader.feed(body)
    reader.end()
    return web.Response(status=answer.status, headers=headers, body=body)


def _break_off(http: web.Request) -> None:
    """Close the client's connection without the end of its answer.

    The last chunk (or the missing part of Content-Length) is a client's sign that it has
    everything.  Without it the client sees an error, as it must.
    """
    if http.transport is not None:
        http.transport.close()
