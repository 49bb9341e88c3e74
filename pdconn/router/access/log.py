"""The access log: one line for each request, however it ended.

::

    pdconn: request method=POST path=/v1/completions status=200 outcome=ok seconds=0.412 ...

A middleware begins a ``Served`` when a request arrives; the handlers fill in what they learn,
and at the end it is logged.  Values come from clients too: whatever is not plain printable text is
quoted and cut, so that no client can write a line of its own.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdconn.router.admin.probes import PROBES
from pdconn.router.labels import RequestEnd
from pdconn.router.openai.answers import AnswerReader
from pdconn.router.openai.headers import REQUEST_ID_HEADER
from pdconn.router.routing.routed_request import Ended, Guess, Passed, RoutedRequest
from pdconn.router.tracing.spans import NOT_TRACED, Span
from transport.errors import shown

log = logging.getLogger("pdconn.access")

#: Of one value in the log, in characters.
_MOST_SHOWN = 200
#: Printable ASCII without spaces, quotes, equals signs and backslashes.
_PLAIN = re.compile(rf"[!#$%&(-<>-\[\]-~]{{1,{_MOST_SHOWN}}}")


@dataclass(slots=True)
class Served:
    """A request on its way through the listener.

    Attributes:
        began_s: when it arrived, by ``time.perf_counter``.
        request_id: as engines get it; empty where a request has none.
        end: how it ended, of requests for an answer.
        routed: the request, once its body was read and found good.
        answer: what has passed of an engine's answer.
        span: of the whole request.
    """

    began_s: float = field(default_factory=time.perf_counter)
    request_id: str = ""
    end: RequestEnd | None = None
    routed: RoutedRequest | None = None
    answer: AnswerReader | None = None
    span: Span = NOT_TRACED


_CURRENT: ContextVar[Served] = ContextVar("served")


def current() -> Served:
    """That of the request that is being handled."""
    return _CURRENT.get()


@dataclass(frozen=True, slots=True)
class KeyValues:
    """The argument of a log line that a machine may read: ``key=value``, or fields of JSON.

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


def logging_access(on_end: Callable[[RoutedRequest], object]) -> Middleware:
    """A middleware that logs every request, and tells ``on_end`` of each that was routed.

    It belongs around all others, so that it sees the status that the client gets.
    """

    @web.middleware
    async def log_access(request: web.Request, handler: Handler) -> web.StreamResponse:
        served = Served()
        token = _CURRENT.set(served)
        status: int | None = 500  # of an exception that nothing below has turned into an answer
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
            _ended(request, served, status, on_end)
        if served.request_id.isascii() and served.request_id and not response.prepared:
            response.headers.setdefault(REQUEST_ID_HEADER, served.request_id)
        return response

    return log_access


def _ended(
    http: web.Request,
    served: Served,
    status: int | None,
    on_end: Callable[[RoutedRequest], object],
) -> None:
    now_s = time.perf_counter()
    routed, answer = served.routed, served.answer
    if routed is not None and served.end is not None:
        prompt_tokens = None if answer is None else answer.prompt_tokens
        routed.note(Ended(served.end, status, prompt_tokens, at_s=now_s))
        on_end(routed)
    level = logging.DEBUG if http.path in PROBES else logging.INFO  # they come every few seconds
    if log.isEnabledFor(level):
        log.log(
            level,
            "pdconn: request %s",
            KeyValues(_fields(http, served, status, now_s - served.began_s)),
        )


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
            "first_byte_seconds": _rounded(outcome.first_byte_s),
        }
    return fields


def _counted(tokens: int | Guess | None) -> int | str | None:
    return str(tokens) if isinstance(tokens, Guess) else tokens


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
