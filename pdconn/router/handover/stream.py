"""An engine's answer to the client, byte for byte.

Chunks are written as they come: not parsed, joined or counted.  A client that reads slowly
slows the engine's connection down instead of filling the router's memory.
"""

from __future__ import annotations

import asyncio
from enum import Enum

from aiohttp import web
from multidict import CIMultiDict

from pdconn.router.fleet.client import ConnectionLost, EngineAnswer
from pdconn.router.openai.headers import REQUEST_ID_HEADER

#: The engine that an answer comes from.
ENGINE_HEADER = "X-Pdconn-Engine"


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
    deadline_s: float | None = None,
) -> tuple[web.StreamResponse, StreamEnd]:
    """Write an answer to the client of ``http``, and close the answer.

    An answer that is not whole at ``deadline_s``, by the event loop's clock, is broken off.
    """
    headers = answer.headers
    if name_engine:
        headers[ENGINE_HEADER] = answer.engine
    headers[REQUEST_ID_HEADER] = request_id
    if answer.is_complete:
        return await _at_once(answer, headers), StreamEnd.WHOLE
    response = web.StreamResponse(status=answer.status, headers=headers)
    async with answer:
        try:
            async with asyncio.timeout_at(deadline_s):
                await response.prepare(http)
                while chunk := await answer.next():
                    await response.write(chunk)
                await response.write_eof()
        except TimeoutError:
            _break_off(http)
            return response, StreamEnd.TIMED_OUT
        except ConnectionLost:
            _break_off(http)
            return response, StreamEnd.ENGINE_FAILED
        except ConnectionResetError:
            return response, StreamEnd.CLIENT_LEFT
    return response, StreamEnd.WHOLE


async def _at_once(answer: EngineAnswer, headers: CIMultiDict[str]) -> web.Response:
    """A body that has arrived already: head and body leave in one packet."""
    headers.popall("Content-Length", None)  # aiohttp writes the same
    async with answer:
        return web.Response(status=answer.status, headers=headers, body=await answer.rest())


def _break_off(http: web.Request) -> None:
    """Close the client's connection without the end of its answer.

    The last chunk (or the missing part of Content-Length) tells a client that it has
    everything.  Without it the client sees an error, as it must.
    """
    if http.transport is not None:
        http.transport.close()
