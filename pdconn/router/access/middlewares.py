"""Middlewares around every request: access log, refusals as answers, checks of the head.

::

    pdconn: request method=POST path=/v1/completions status=200 outcome=ok seconds=0.412 ...

A middleware creates a ``Served`` when a request arrives; the handlers fill in its fields, and
it is logged when the request ends, in whatever way.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from pdconn.router.labels import RequestEnd
from pdconn.router.openai.bodies import AnswerReader
from pdconn.router.openai.requests import KEY_HEADER, REQUEST_ID_HEADER, Route
from pdconn.router.prefix.block_digests import encode_blocks
from pdconn.router.router_errors import (
    BadHead,
    MethodNotAllowed,
    NotFound,
    Refusal,
    UnsupportedEncoding,
)
from pdconn.router.routing.policy import Decision
from pdconn.router.routing.request_events import Passed, RequestEnded
from pdconn.router.routing.routed_request import Guess, RoutedRequest
from pdconn.router.tracing.spans import NOT_TRACED, Span
from transport.errors import shown

log = logging.getLogger("pdconn.access")

PROBES = ("/health", "/livez", "/readyz", "/ready")
"""Paths that orchestrators poll every few seconds: no key needed, logged at level debug."""

#: Maximum characters of one value in the log.
_MOST_SHOWN = 200
#: Printable ASCII without spaces, quotes, equals signs and backslashes.
_PLAIN = re.compile(rf"[!#$%&(-<>-\[\]-~]{{1,{_MOST_SHOWN}}}")


@dataclass(slots=True)
class Served:
    """The state of a request that the listener serves.

    Attributes:
        began_s: arrival time, by ``time.perf_counter``.
        request_id: the id that engines receive; empty for requests without one.
        end: how a request for a completion ended.
        routed: the request, once its body has been read and checked.
        answer: the part of an engine's answer that has been relayed.
        span: the span of the whole request.
    """

    began_s: float = field(default_factory=time.perf_counter)
    request_id: str = ""
    end: RequestEnd | None = None
    routed: RoutedRequest | None = None
    answer: AnswerReader | None = None
    span: Span = NOT_TRACED


_CURRENT: ContextVar[Served] = ContextVar("served")


def current() -> Served:
    """The ``Served`` of the request that is being handled."""
    return _CURRENT.get()


@dataclass(frozen=True, slots=True)
class KeyValues:
    """A log argument that machines can parse: ``key=value`` in text, fields in JSON.

    >>> str(KeyValues({"status": 200, "path": "/a b", "prefill": None}))
    "status=200 path='/a b' prefill=-"
    """

    fields: Mapping[str, str | int | float | None]

    def __str__(self) -> str:
        return " ".join(f"{key}={_value(value)}" for key, value in self.fields.items())


def _value(value: str | float | None) -> str:
    if value is None:
        return "-"
    if not isinstance(value, str):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return value if _PLAIN.fullmatch(value) else shown(value, _MOST_SHOWN)


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
        served = Served()
        token = _CURRENT.set(served)
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
            _CURRENT.reset(token)
            _ended(request, served, status, on_end, with_blocks=with_blocks)
        if served.request_id.isascii() and served.request_id and not response.prepared:
            response.headers.setdefault(REQUEST_ID_HEADER, served.request_id)
        return response

    return log_access


def _ended(
    http: web.Request,
    served: Served,
    status: int | None,
    on_end: Callable[[RoutedRequest], object],
    *,
    with_blocks: bool,
) -> None:
    now_s = time.perf_counter()
    routed, answer = served.routed, served.answer
    if routed is not None and served.end is not None:
        prompt_tokens = None if answer is None else answer.prompt_tokens
        routed.note(RequestEnded(served.end, status, prompt_tokens, at_s=now_s))
        on_end(routed)
    # Probes arrive every few seconds.
    level = logging.DEBUG if http.path in PROBES else logging.INFO
    if log.isEnabledFor(level):
        fields = _fields(http, served, status, now_s - served.began_s)
        blocks = _prompt_blocks(routed.decision) if with_blocks and routed is not None else None
        if blocks is not None:
            fields["prompt_blocks"] = blocks
        log.log(level, "pdconn: request %s", KeyValues(fields))


def _prompt_blocks(decision: Decision | None) -> str | None:
    """Digests of a prompt's blocks; None if they were not looked up."""
    if decision is None or decision.lookup is None:
        return None
    for scheme, prompt in decision.lookup.prompts.items():
        return encode_blocks(prompt.hashes, scheme.block_tokens)
    return None


def _fields(
    http: web.Request, served: Served, status: int | None, total_s: float
) -> dict[str, str | int | float | None]:
    fields: dict[str, str | int | float | None] = {
        "method": http.method,
        "path": http.rel_url.raw_path,
        "client": http.remote,
        "status": status,
        "seconds": round(total_s, 6),
    }
    if served.request_id:
        fields["request"] = served.request_id
    if served.end is not None:
        fields["outcome"] = served.end.value
    routed = served.routed
    if routed is not None:
        outcome = routed.outcome()
        fields |= {
            "prompt_tokens": _counted(routed.counted_tokens),
            "cached_tokens": outcome.cached_tokens,
            "prefill": outcome.prefill,
            "decode": outcome.decode,
            "ticket_seconds": _rounded(outcome.ticket_s),
            "early_seconds": _rounded(outcome.early_s),
            "first_byte_seconds": _rounded(outcome.first_byte_s),
        }
    return fields


def _counted(tokens: int | Guess | None) -> int | str | None:
    return str(tokens) if isinstance(tokens, Guess) else tokens


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


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
            seen = f"{request.method} {request.path}"
            expected = f"one of {', '.join(served)}"
            return _refuse(request, NotFound("path", expected, seen), name_engines)

    return refusals


def _refuse(request: web.Request, refusal: Refusal, name_engines: bool) -> web.Response:
    anthropic = request.path.startswith(Route.MESSAGES.path)
    body = refusal.body(name_engines=name_engines, anthropic=anthropic)
    return web.json_response(body=body, status=refusal.status, headers=refusal.headers)


_TRANSFER = "Transfer-Encoding"
_VERSIONS = (HttpVersion10, HttpVersion11)
_ONCE = ("Host", "Authorization", KEY_HEADER, "Content-Type")
"""Headers with one value: given two, one server uses the first and another the last."""


def check_head(request: web.BaseRequest) -> None:
    """Refuse a head that two HTTP servers could parse differently.

    Raises:
        BadHead: another version of HTTP, or a repeated header.
        UnsupportedEncoding: the body has a transfer coding.
    """
    if request.version not in _VERSIONS:
        seen = f"HTTP/{request.version.major}.{request.version.minor}"
        raise BadHead("version", "HTTP/1.1 or HTTP/1.0", seen)
    for name in _ONCE:
        count = len(request.headers.getall(name, ()))
        if count > 1:  # the values may be keys
            raise BadHead(name, "one header of this name", f"{count} of them")
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
