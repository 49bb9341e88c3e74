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

from pdconn.router.openai.bodies import ABORT, MOST_NBYTES, EndedChoice, has_abort
from pdconn.router.openai.event_stream import DONE, event_data
from pdconn.router.openai.requests import UNREADABLE, is_empty


class FirstOutput(Enum):
    """What an answer's first bytes hold."""

    NOT_YET = "not yet"
    HERE = "here"
    ABORTED = "aborted"


class _BegunChoice(EndedChoice):
    delta: dict[str, Any] | None = None
    text: str | None = None


class _Usage(msgspec.Struct):
    """Counts of generated tokens; the first is of ``/v1/responses`` and ``/v1/messages``."""

    output_tokens: int | None = None
    completion_tokens: int | None = None


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
    """A whole answer."""

    choices: list[_BegunChoice] | None = None
    usage: _Usage | None = None


_BEFORE_OUTPUT = frozenset(
    {"message_start", "ping", "response.created", "response.queued", "response.in_progress"}
)


class OutputSearch:
    """Looks for the first output in an answer with status 200, as its bytes arrive.

    Whatever is not known counts as output, also an error: the client is to have it.

    >>> search = OutputSearch({"Content-Type": "text/event-stream"})
    >>> search.read(b'data: {"choices": [{"delta": {"role": "assistant"}}]}\\n')
    <FirstOutput.NOT_YET: 'not yet'>
    >>> search.read(b"data: [DONE]\\n")
    <FirstOutput.ABORTED: 'aborted'>
    """

    __slots__ = ("_is_stream", "_nbytes", "_rest", "_skips")

    def __init__(self, headers: Mapping[str, str]) -> None:
        kind, length = headers.get("Content-Type", ""), headers.get("Content-Length", "")
        self._is_stream = kind.startswith("text/event-stream")
        is_long = length.isascii() and length.isdigit() and int(length) > MOST_NBYTES
        is_json = kind.startswith("application/json") and not is_long
        is_plain = headers.get("Content-Encoding", "identity") == "identity"
        self._skips = not (is_plain and (self._is_stream or is_json))
        self._nbytes = 0
        self._rest = b""  # what is not read yet: of a stream the last line, else all

    def read(self, piece: bytes, *, is_whole: bool = False) -> FirstOutput:
        """Read the next bytes; ``is_whole``: they are the last ones."""
        self._nbytes += len(piece)
        if self._skips:
            return FirstOutput.HERE
        self._rest += piece
        if self._is_stream:
            if is_whole:
                self._rest += b"\n"
            found = self._read_lines()
            if found is FirstOutput.NOT_YET and is_whole:
                return FirstOutput.ABORTED
        else:
            found = _of_body(self._rest) if is_whole else FirstOutput.NOT_YET
        if found is FirstOutput.NOT_YET and self._nbytes > MOST_NBYTES:
            return FirstOutput.HERE
        return found

    def _read_lines(self) -> FirstOutput:
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            data = event_data(line)
            if data is None:
                continue
            found = FirstOutput.ABORTED if data == DONE else _of_event(data)
            if found is not FirstOutput.NOT_YET:
                return found
        return FirstOutput.NOT_YET


def _of_body(body: bytes) -> FirstOutput:
    try:
        found = msgspec.json.decode(body, type=_Body)
    except UNREADABLE:
        return FirstOutput.HERE
    used = found.usage or _Usage()
    if found.choices is None:
        is_aborted = used.output_tokens == 0
    else:
        is_aborted = not used.completion_tokens and has_abort(found.choices)
    return FirstOutput.ABORTED if is_aborted else FirstOutput.HERE


def _of_event(data: bytes) -> FirstOutput:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except UNREADABLE:
        return FirstOutput.HERE
    if event.type == "response.failed" or not is_empty(event.error):
        return FirstOutput.HERE
    if event.choices is not None:  # none of a usage
        has_output, is_aborted = any(map(_has_output, event.choices)), has_abort(event.choices)
    else:
        used = (event if event.response is None else event.response).usage or _Usage()
        has_output = event.type not in _BEFORE_OUTPUT
        is_aborted = has_output and used.output_tokens == 0
        has_output = has_output and not is_aborted
    if has_output:
        return FirstOutput.HERE
    return FirstOutput.ABORTED if is_aborted else FirstOutput.NOT_YET


def _has_output(choice: _BegunChoice) -> bool:
    """Whether a token has been generated; its text may be empty."""
    delta = choice.delta or {}
    if choice.text or any(value for name, value in delta.items() if name != "role"):
        return True
    if choice.finish_reason is not None:
        return choice.finish_reason != ABORT
    return "role" not in delta
