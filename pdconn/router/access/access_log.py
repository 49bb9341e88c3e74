"""The access log: one line for each request, when it ends.

::

    pdconn: request method=POST path=/v1/completions status=200 outcome=ok seconds=0.412 ...

A front end creates a ``Served`` when a request arrives, whoever handles it fills in its fields, and
it is logged when the request ends, in whatever way.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from pdconn.router.labels import RequestEnd
from pdconn.router.openai.bodies import AnswerReader
from pdconn.router.prefix.block_digests import encode_blocks
from pdconn.router.routing.policy import Decision
from pdconn.router.routing.request_events import RequestEnded
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
    """The state of a request that a front end serves.

    Attributes:
        method, path: of its head; the path without its query.
        client: the address that it came from, if that is known.
        began_s: arrival time, by ``time.perf_counter``.
        request_id: the id that engines receive; empty for requests without one.
        end: how a request for a completion ended.
        routed: the request, once its body has been read and checked.
        answer: the part of an engine's answer that has been relayed.
        span: the span of the whole request.
    """

    method: str
    path: str
    client: str | None = None
    began_s: float = field(default_factory=time.perf_counter)
    request_id: str = ""
    end: RequestEnd | None = None
    routed: RoutedRequest | None = None
    answer: AnswerReader | None = None
    span: Span = NOT_TRACED


CURRENT: ContextVar[Served] = ContextVar("served")
"""Set by whatever front end received the request."""


def current() -> Served:
    """The ``Served`` of the request that is being handled."""
    return CURRENT.get()


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
        return _decimal(value) if isinstance(value, float) else str(value)
    return value if _PLAIN.fullmatch(value) else shown(value, _MOST_SHOWN)


def _decimal(value: float) -> str:
    """A number to a millionth, without an exponent: what matches ``0.`` finds short times, too.

    >>> _decimal(0.412), _decimal(0.00001), _decimal(3.0)
    ('0.412', '0.00001', '3')
    """
    return f"{value:.6f}".rstrip("0").rstrip(".")


def log_end(
    served: Served,
    status: int | None,
    on_end: Callable[[RoutedRequest], object],
    *,
    with_blocks: bool,
) -> None:
    """Log the end of a request, and call ``on_end`` with it if it was routed.

    Args:
        status: of the answer that the client received; None without one.
        with_blocks: whether the log has digests of the prompt's blocks.
    """
    now_s = time.perf_counter()
    routed, answer = served.routed, served.answer
    if routed is not None and served.end is not None:
        prompt_tokens = None if answer is None else answer.prompt_tokens
        routed.note(RequestEnded(served.end, status, prompt_tokens, at_s=now_s))
        on_end(routed)
    # Probes arrive every few seconds.
    level = logging.DEBUG if served.path in PROBES else logging.INFO
    if log.isEnabledFor(level):
        fields = _fields(served, status, now_s - served.began_s)
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
    served: Served, status: int | None, total_s: float
) -> dict[str, str | int | float | None]:
    fields: dict[str, str | int | float | None] = {
        "method": served.method,
        "path": served.path,
        "client": served.client,
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
