"""Tells whether an answer that has begun holds any output yet.  Pure.

A vLLM engine that stops (SIGTERM with ``--shutdown-timeout``), is paused, or goes to sleep ends
requests with the finish reason ``abort``; while it finishes what it has it answers each new request
so, at once, with status 200 and a healthy ``/health``.  Seen with vLLM 0.32, of a request that has
generated nothing::

    /v1/completions       data: [DONE]
    /v1/chat/completions  data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
                          data: [DONE]
    /v1/messages          message_start, message_delta (end_turn, 0 tokens), message_stop
    /v1/responses         response.created, response.in_progress, response.completed (0 tokens)
    without a stream      "finish_reason": "abort"; of the last two routes 0 tokens of output

A client would take that for an answer.  As long as it has received none of it, another engine can
be asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec
from msgspec import Raw

from pdconn.router.openai.bodies import ABORT, MOST_NBYTES
from pdconn.router.openai.event_stream import DONE, event_data
from pdconn.router.openai.requests import UNREADABLE, is_empty


class FirstOutput(Enum):
    """What an answer's first bytes hold."""

    NOT_YET = "not yet"
    HERE = "here"
    ABORTED = "aborted"


class _BegunChoice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    output_tokens: int | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    """An event of a stream; ``response`` is of ``/v1/responses``."""

    type: str | None = None
    choices: list[_BegunChoice] | None = None
    usage: _Usage | None = None
    response: _Response | None = None
    error: Raw = Raw(b"null")


class _Body(msgspec.Struct):
    """A whole answer; those of ``/v1/messages`` have a type, and always a reason to stop."""

    type: str | None = None
    choices: list[_BegunChoice] | None = None
    usage: _Usage | None = None
    stop_reason: str | None = None


_NO_TOKENS = _Usage(0)
_BEFORE_OUTPUT = frozenset(
    {"message_start", "ping", "response.created", "response.queued", "response.in_progress"}
)


def first_output(headers: Mapping[str, str], beginning: bytes, *, is_whole: bool) -> FirstOutput:
    """What the first bytes of an answer with status 200 hold.

    Whatever is not known counts as output, also an error: the client is to have it.

    Args:
        headers: of the answer.
        beginning: what has arrived of its body.
        is_whole: whether that is the whole body.

    >>> first_output({"Content-Type": "text/event-stream"}, b"data: [DONE]\\n\\n", is_whole=False)
    <FirstOutput.ABORTED: 'aborted'>
    """
    kind = headers.get("Content-Type", "")
    if kind.startswith("text/event-stream"):
        found = _of_stream(beginning)
        if found is FirstOutput.NOT_YET and is_whole:
            return FirstOutput.ABORTED
    elif not kind.startswith("application/json"):
        return FirstOutput.HERE
    elif is_whole:
        return _of_body(beginning)
    else:
        length = headers.get("Content-Length", "")
        is_long = length.isascii() and length.isdigit() and int(length) > MOST_NBYTES
        found = FirstOutput.HERE if is_long else FirstOutput.NOT_YET
    return FirstOutput.HERE if len(beginning) > MOST_NBYTES else found


def _of_body(body: bytes) -> FirstOutput:
    try:
        found = msgspec.json.decode(body, type=_Body)
    except UNREADABLE:
        return FirstOutput.HERE
    if found.choices is not None:
        is_aborted = any(choice.finish_reason == ABORT for choice in found.choices)
    else:
        ended = found.type != "message" or found.stop_reason is not None
        is_aborted = found.usage == _NO_TOKENS or not ended
    return FirstOutput.ABORTED if is_aborted else FirstOutput.HERE


def _of_stream(beginning: bytes) -> FirstOutput:
    """Of the whole lines of a stream's beginning."""
    lines = beginning.split(b"\n")
    for line in lines[:-1]:
        data = event_data(line)
        if data is None:
            continue
        found = FirstOutput.ABORTED if data == DONE else _of_event(data)
        if found is not FirstOutput.NOT_YET:
            return found
    return FirstOutput.NOT_YET


def _of_event(data: bytes) -> FirstOutput:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except UNREADABLE:
        return FirstOutput.HERE
    if event.type == "response.failed" or not is_empty(event.error):
        return FirstOutput.HERE
    if event.choices is not None:
        if any(choice.finish_reason == ABORT for choice in event.choices):
            return FirstOutput.ABORTED
        has_none = all(map(_is_role_alone, event.choices))  # of a usage there is no choice
    else:
        used = event.usage if event.response is None else event.response.usage
        if used == _NO_TOKENS and event.type not in _BEFORE_OUTPUT:
            return FirstOutput.ABORTED
        has_none = event.type in _BEFORE_OUTPUT
    return FirstOutput.NOT_YET if has_none else FirstOutput.HERE


def _is_role_alone(choice: _BegunChoice) -> bool:
    """Whether it only begins a message: no token has been generated for it."""
    delta = choice.delta
    if delta is None or choice.finish_reason is not None or "role" not in delta:
        return False
    return not any(value for name, value in delta.items() if name != "role")
