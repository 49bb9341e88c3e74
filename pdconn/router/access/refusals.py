"""The router's own errors as HTTP answers, in the shape that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdconn.router.errors import MethodNotAllowed, NotFound, Refusal
from pdconn.router.openai.requests import Route


def refusing(served: Sequence[str], *, name_engines: bool) -> Middleware:
    """A middleware that answers refusals, and paths that are not ``served``.

    ``name_engines``: whether answers may contain addresses of engines.
    """

    @web.middleware
    async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as refusal:
            return _refuse(request, refusal, name_engines)
        except web.HTTPMethodNotAllowed as error:
            wrong = MethodNotAllowed(request.method, request.path, error.allowed_methods)
            return _refuse(request, wrong, name_engines)
        except web.HTTPNotFound:
            seen = f"{request.method} {request.path}"
            expected = f"one of {', '.join(served)}"
            return _refuse(request, NotFound("path", expected, seen), name_engines)

    return refusals


def _refuse(request: web.Request, refusal: Refusal, name_engines: bool) -> web.Response:
    anthropic = request.path.startswith(Route.MESSAGES.path)
    body = refusal.body(name_engines=name_engines, anthropic=anthropic)
    return web.json_response(body=body, status=refusal.status, headers=refusal.headers)
