"""What vLLM answers to a request that it ends before the first token: status 200, and no output.

It does so to each new request while it drains, and to those that wait when it is paused or put to
sleep.  ``tests/vllm/engines/routing/test_stopping_engines.py`` compares this with the real one.
"""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from pdconn.router.openai.requests import Route
from tests.fakes.fake_engine import FakeEngine, Seen

Event = dict[str, Any]

_ROLE_ALONE = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
_NO_TOKENS = {"input_tokens": 6, "output_tokens": 0}
_COUNTED = {"prompt_tokens": 6, "completion_tokens": 0}


def _response(status: str, usage: Event | None, **more: Any) -> Event:
    return {"object": "response", "status": status, "output": [], "usage": usage, **more}


EVENTS: dict[Route, list[Event]] = {
    Route.COMPLETIONS: [],
    Route.CHAT: [{"choices": [_ROLE_ALONE]}],
    Route.MESSAGES: [
        {"type": "message_start", "message": {"type": "message", "usage": _NO_TOKENS}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": _NO_TOKENS},
        {"type": "message_stop"},
    ],
    Route.RESPONSES: [
        {"type": "response.created", "response": _response("in_progress", None)},
        {"type": "response.in_progress", "response": _response("in_progress", None)},
        {"type": "response.completed", "response": _response("completed", _NO_TOKENS)},
    ],
}
"""Of a stream.  The first two routes end with ``[DONE]``, the others name their events."""

_EMPTY_MESSAGE = {"type": "message", "content": [], "role": "assistant", "status": "completed"}
BODIES: dict[Route, Event] = {
    Route.COMPLETIONS: {"choices": [{"text": "", "finish_reason": "abort"}], "usage": _COUNTED},
    Route.CHAT: {
        "choices": [{"message": {"role": "assistant", "content": ""}, "finish_reason": "abort"}],
        "usage": _COUNTED,
    },
    Route.MESSAGES: {
        "type": "message",
        "content": [{"type": "text", "text": ""}],
        "usage": _NO_TOKENS,
    },
    Route.RESPONSES: _response("completed", _NO_TOKENS) | {"output": [_EMPTY_MESSAGE]},
}
"""Without a stream."""


def usage_alone(route: Route) -> list[Event]:
    """The event that ``stream_options.include_usage`` adds."""
    return [{"choices": [], "usage": _COUNTED}] if route in _DONE_ROUTES else []


_DONE_ROUTES = (Route.COMPLETIONS, Route.CHAT)


def stream_pieces(route: Route, events: list[Event]) -> list[bytes]:
    """Events as vLLM writes them on a route, and the end of its streams."""
    if route in _DONE_ROUTES:
        return [*(f"data: {json.dumps(one)}\n\n".encode() for one in events), b"data: [DONE]\n\n"]
    return [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in events]


async def aborts(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    """A script: the engine rejects the request, and does not tell its lender."""
    del engine
    seen.is_rejected = True
    route = next(one for one in Route if one.path == seen.path)
    if not seen.body.get("stream"):
        return web.json_response(BODIES[route])
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    for piece in stream_pieces(route, EVENTS[route]):
        await response.write(piece)
    await response.write_eof()
    return response
