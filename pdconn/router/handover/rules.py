"""What an engine's answer means for its request: whose it is, and who is asked next.  Pure.

As Envoy, llm-d's sidecar and httpx do it: a status that says "not now" or "not I" is retried on
another engine while no byte of an answer has gone out; every other answer is the client's.
``docs/router.md`` has the rules as a table.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec
from msgspec import Raw

from pdconn.router.openai.requests import kind_of

ELSEWHERE = frozenset({429, 500, 502, 503, 504})
"""Statuses after which another engine may do better."""
BAD_REQUEST = 400
INTERNAL_ERROR = 500
"""With a ticket: also a pull that failed, where ``kv_load_failure_policy`` is ``fail``."""
MOST_BROKEN = 2
"""Engines of a role that one request may break: it may be its own fault, and break all of them."""

_FIRST_EVENT = re.compile(rb"(?:event: ?[a-z_.]+\r?\n)?data: ?(\{[^\r\n]*\})")


class _Error(msgspec.Struct):
    code: int | str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _Error


class _OursOnly(msgspec.Struct):
    pdconn: Raw = Raw(b"null")


def event_status(chunk: bytes) -> int | None:
    """The status of an error with which a stream begins; None where it begins otherwise.

    vLLM has sent 200 by the time that it knows: a pull that fails, or a core that dies, is the
    first and only event of a stream.

    >>> event_status(b'data: {"error": {"message": "Internal server error", "code": 500}}')
    500
    >>> event_status(b'data: {"choices": [{"text": "error"}]}')
    """
    found = _FIRST_EVENT.match(chunk)
    if found is None or b'"error"' not in found[1]:
        return None
    try:
        code = msgspec.json.decode(found[1], type=_ErrorEvent).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return code if isinstance(code, int) and BAD_REQUEST <= code < 600 else INTERNAL_ERROR


def retry_after_s(value: str | None, now: datetime | None = None) -> float | None:
    """Seconds of a ``Retry-After``, which is a number or a date; None where it is neither.

    >>> retry_after_s("7"), retry_after_s("soon"), retry_after_s(None)
    (7.0, None, None)
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())


def may_repeat(ticket: Raw | None) -> bool:
    """Whether a body with this ticket may reach an engine twice.

    Our connector claims before it reads and has the claim confirmed after, so a second use of a
    ticket is refused.  Other connectors read whatever the blocks hold by then.

    >>> may_repeat(Raw(b'{"remote_block_ids": [1]}')), may_repeat(Raw(b'{"pdconn": {"v": 1}}'))
    (False, True)
    """
    if ticket is None:
        return True
    try:
        ours = msgspec.json.decode(ticket, type=_OursOnly).pdconn
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return kind_of(ours) == "an object"
