"""Passing an engine's answer to the client, byte for byte.

Chunks are written as they come: not parsed, joined or counted.  A client that
reads slowly slows the engine's connection down instead of filling our memory.
"""

from __future__ import annotations

from enum import Enum

from aiohttp import web
from multidict import CIMultiDict

from pdconn.router.fleet.client import ConnectionLost, EngineAnswer

#: Which engine an answer, or an error, comes from.
ENGINE_HEADER = "X-Pdconn-Engine"
REQUEST_ID_HEADER = "X-Request-Id"


class Ending(Enum):
    """How a relay ended."""

    WHOLE = "whole"
    ENGINE_DIED = "engine died"
    CLIENT_LEFT = "client left"


async def relay(
    http: web.Request, answer: EngineAnswer, request_id: str
) -> tuple[web.StreamResponse, Ending]:
    """Write an answer to the client who made ``http``, and close the answer."""
    headers = answer.headers
    headers[ENGINE_HEADER] = answer.engine
    headers[REQUEST_ID_HEADER] = request_id
    if answer.is_here:
        return await _at_once(answer, headers), Ending.WHOLE
    response = web.StreamResponse(status=answer.status, headers=headers)
    async with answer:
        try:
            await response.prepare(http)
            while chunk := await answer.next():
                await response.write(chunk)
            await response.write_eof()
        except ConnectionLost:
            _break_off(http)
            return response, Ending.ENGINE_DIED
        except ConnectionResetError:
            return response, Ending.CLIENT_LEFT
    return response, Ending.WHOLE


async def _at_once(answer: EngineAnswer, headers: CIMultiDict[str]) -> web.Response:
    """A body that is here already: head and body leave in one packet."""
    headers.popall("Content-Length", None)  # aiohttp writes the same
    async with answer:
        return web.Response(status=answer.status, headers=headers, body=await answer.rest())


def _break_off(http: web.Request) -> None:
    """End the client's connection without the end of its answer.

    The last chunk (or the missing part of Content-Length) is what tells a client
    that it has everything.  Without it the client sees an error, as it must.
    """
    if http.transport is not None:
        http.transport.close()
