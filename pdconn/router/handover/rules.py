"""What an engine's answer means for its request: whose it is, and who is asked next.  Pure.

As Envoy, llm-d's sidecar and httpx do it: a status that says "not now" or "not I" is retried on
another engine while no byte of an answer has gone out; every other answer is the client's.
``docs/router.md`` has the rules as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec
from msgspec import Raw

from pdconn.router.openai.answers import AnswerReader
from pdconn.router.openai.requests import kind_of

ELSEWHERE = frozenset({429, 500, 502, 503, 504})
"""Statuses after which another engine may do better."""
INTERNAL_ERROR = 500
"""With a ticket: also a pull that failed, where ``kv_load_failure_policy`` is ``fail``."""
MOST_BROKEN = 2
"""Engines of a role that one request may break: it may be its own fault, and break all of them."""


class _OursOnly(msgspec.Struct):
    pdconn: Raw = Raw(b"null")


def status_of(status: int, headers: Mapping[str, str], first_chunk: bytes) -> int:
    """The status of an answer that has begun: that of the error with which its stream begins.

    vLLM has sent 200 by the time that it knows: a pull that fails, or a core that dies, is the
    first and only event of a stream.

    >>> stream = {"Content-Type": "text/event-stream"}
    >>> status_of(200, stream, b'data: {"error": {"code": 503}}\\n\\n')
    503
    """
    reader = AnswerReader(status, headers)
    if reader.is_stream:
        reader.feed(first_chunk)
    return reader.error or status


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
