"""Middlewares around every request of the listener: access log, refusals as answers, the head."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware
from multidict import MultiMapping

from pdconn.router.access.access_log import CURRENT, Served, log_end
from pdconn.router.openai.requests import KEY_HEADER, REQUEST_ID_HEADER, Route
from pdconn.router.router_errors import (
    BadHead,
    MethodNotAllowed,
    NotFound,
    Refusal,
    UnsupportedEncoding,
)
from pdconn.router.routing.request_events import Passed
from pdconn.router.routing.routed_request import RoutedRequest


def logging_access(
    on_end: Callable[[RoutedRequest], object], *, with_blocks: bool = False
) -> Middleware:
    """A middleware that logs every request, and calls ``on_end`` with each routed request.

    It is the outermost middleware, so that it sees the status that the client receives.

    Args:
        with_blocks: whether the log has digests of the prompt's blocks.
    """

    @web.middleware
    async def log_access(request: web.Request, handler: Handler) -> web.StreamResponse:
        served = Served(request.method, request.rel_url.raw_path, request.remote)
        token = CURRENT.set(served)
        status: int | None = 500  # for an exception that no inner handler has turned into an answer
        try:
            response = await handler(request)
            status = response.status
        except web.HTTPException as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            passed = None if served.routed is None else served.routed.last(Passed)
            status = None if passed is None else passed.status
            raise
        finally:
            CURRENT.reset(token)
            log_end(served, status, on_end, with_blocks=with_blocks)
        if served.request_id.isascii() and served.request_id and not response.prepared:
            response.headers.setdefault(REQUEST_ID_HEADER, served.request_id)
        return response

    return log_access


def refusing(served: Sequence[str], *, name_engines: bool) -> Middleware:
    """A middleware that turns refusals and unknown paths into answers.

    Args:
        served: the paths that exist, for the message of a 404.
        name_engines: whether answers may contain addresses of engines.
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
            return _refuse(
                request, no_such_path(request.method, request.path, served), name_engines
            )

    return refusals


def no_such_path(method: str, path: str, served: Iterable[str]) -> NotFound:
    """The refusal of an unknown path; ``served``: those that exist."""
    return NotFound("path", f"one of {', '.join(served)}", f"{method} {path}")


def _refuse(request: web.Request, refusal: Refusal, name_engines: bool) -> web.Response:
    body = refusal_body(refusal, request.path, name_engines=name_engines)
    return web.json_response(body=body, status=refusal.status, headers=refusal.headers)


def refusal_body(refusal: Refusal, path: str, *, name_engines: bool) -> bytes:
    """The JSON of a refusal, as clients of the route expect it."""
    anthropic = path.startswith(Route.MESSAGES.path)
    return refusal.body(name_engines=name_engines, anthropic=anthropic)


_TRANSFER = "Transfer-Encoding"
_VERSIONS = (HttpVersion10, HttpVersion11)
_ONCE = ("Host", "Authorization", KEY_HEADER, "Content-Type")
"""Headers with one value: given two, one server uses the first and another the last."""


def check_repeats(headers: MultiMapping[str]) -> None:
    """Refuse headers that two servers could take for different ones.

    Raises:
        BadHead: a header of ``_ONCE`` is repeated.
    """
    for name in _ONCE:
        count = len(headers.getall(name, ()))
        if count > 1:  # the values may be keys
            raise BadHead(name, "one header of this name", f"{count} of them")


def check_head(request: web.BaseRequest) -> None:
    """Refuse a head that two HTTP servers could parse differently.

    Raises:
        BadHead: another version of HTTP, or a repeated header.
        UnsupportedEncoding: the body has a transfer coding.
    """
    if request.version not in _VERSIONS:
        seen = f"HTTP/{request.version.major}.{request.version.minor}"
        raise BadHead("version", "HTTP/1.1 or HTTP/1.0", seen)
    check_repeats(request.headers)
    codings = ",".join(request.headers.getall(_TRANSFER, ()))
    if codings.strip().lower() not in ("", "chunked"):
        raise UnsupportedEncoding(_TRANSFER, "chunked, once", codings[:80])
    if codings and request.version == HttpVersion10:
        raise BadHead(_TRANSFER, "none in HTTP/1.0", codings[:80])


@web.middleware
async def checking_heads(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A middleware that refuses ambiguous heads (``check_head``)."""
    check_head(request)
    return await handler(request)
