"""What an engine's answer says of its own end, read while its bytes pass.  Pure.

An HTTP status is sent before the first token, so it does not say how a stream ended, and a client
that has the last event may close its connection before the engine closes its own.  So the reader
looks at what passes::

    data: {"choices": ...}         a token
    data: {"error": {...}}         it failed, as a client's mistake or an engine's: ``code``
    data: [DONE]                   the client has everything, whoever closes the connection first

Each route has an end of its own (``message_stop``, ``response.completed``).  A JSON body is whole
once ``Content-Length`` bytes have passed.  Only events that may hold one of these are decoded, and
of what is remembered between two calls there is a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Raw

from pdconn.router.openai.requests import is_empty

#: Of an event or of a body that is read; of longer ones nothing is known.
MOST_NBYTES = 1 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

_DONE = b"[DONE]"
_LAST_EVENTS = frozenset(
    {"message_stop", "response.completed", "response.incomplete", "response.failed"}
)
_FAILED = ("error", "response.failed")
_UNKNOWN_ERROR = 500


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class AnswerUsage(msgspec.Struct):
    """``usage`` of an answer, on any route.

    >>> find_usage(b'{"usage": {"input_tokens": 8, "cache_read_input_tokens": 32}}').prompt
    40
    """

    prompt_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Count | None = None  # /v1/responses and /v1/messages
    input_tokens_details: _Details | None = None  # /v1/responses
    cache_read_input_tokens: _Count | None = None  # of /v1/messages, which counts these apart
    cache_creation_input_tokens: _Count | None = None

    @property
    def prompt(self) -> int | None:
        """Tokens of the prompt, cached or not."""
        if self.prompt_tokens is not None or self.input_tokens is None:
            return self.prompt_tokens
        apart = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return self.input_tokens + apart

    @property
    def cached(self) -> int | None:
        """Those of them that were cached, as ``--enable-prompt-tokens-details`` reports them."""
        details = self.prompt_tokens_details or self.input_tokens_details
        return self.cache_read_input_tokens if details is None else details.cached_tokens


NO_USAGE = AnswerUsage()


class _Inner(msgspec.Struct):
    """``response`` of an event of ``/v1/responses``, and ``message`` of ``/v1/messages``."""

    usage: AnswerUsage | None = None


class _Used(msgspec.Struct):
    usage: AnswerUsage | None = None


def find_usage(answer: bytes) -> AnswerUsage:
    """The usage in a whole JSON answer; empty where there is none.

    >>> find_usage(b'{"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}').cached
    32
    """
    try:
        return msgspec.json.decode(answer, type=_Used).usage or NO_USAGE
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_USAGE


class _AnswerOrEvent(msgspec.Struct):
    """A whole answer, or an event of a stream."""

    type: str | None = None
    error: Raw = Raw(b"null")
    detail: Raw = Raw(b"null")  # of FastAPI itself
    usage: AnswerUsage | None = None
    response: _Inner | None = None
    message: _Inner | str | None = None


class _Error(msgspec.Struct):
    code: int | str | None = None


def _is_tokens(chunk: bytes) -> bool:
    """Whether it is whole events that neither end their stream, nor fail, nor hold its usage.

    Of streams without names of events, as most are; ``[DONE]`` is the last event of one.  Within a
    JSON string the quotation marks would be escaped.  It is asked for each token of each stream, so
    it searches for few bytes.
    """
    return (
        chunk.startswith(b"data: {")
        and chunk.endswith(b"}\n\n")
        and b'"error"' not in chunk
        and b'"usage"' not in chunk
        and b'"type"' not in chunk  # of a named event that was cut behind its name
    )


class AnswerReader:
    """Reads an answer that passes, of which it changes nothing.

    Attributes:
        status: of the answer.
        error: the status that an error in the answer names; None without one.
        has_no_route: it is a web framework's 404 or 405, not one of an OpenAI API.
        prompt_tokens: as its usage counts them; None where it does not say.
        is_whole: the client needs no more bytes.

    >>> reader = AnswerReader(200, {"Content-Type": "text/event-stream"})
    >>> reader.feed(b'data: {"error": {"code": 400}}\\n\\ndata: [DONE]\\n\\n')
    >>> reader.error, reader.is_whole
    (400, True)
    """

    __slots__ = ("_expected", "_is_json", "_nbytes", "_rest", "error", "has_no_route", "is_stream",
                 "is_whole", "prompt_tokens", "status")  # fmt: skip

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.error: int | None = None
        self.has_no_route = False
        self.prompt_tokens: int | None = None
        kind = headers.get("Content-Type", "")
        self.is_stream = kind.startswith("text/event-stream")
        length = headers.get("Content-Length", "")
        self._expected = int(length) if length.isascii() and length.isdigit() else None
        self.is_whole = self._expected == 0
        self._nbytes = 0
        self._rest: bytes | None = b""  # of what is not read yet; None: it is too long
        self._is_json = kind.startswith("application/json")

    def feed(self, chunk: bytes) -> None:
        """The next bytes have been written to the client."""
        self._nbytes += len(chunk)
        if self.is_stream:
            self._read_lines(chunk)
        elif self._is_json:
            self._keep(chunk)
        if self._nbytes == self._expected:
            self.end()

    def end(self) -> None:
        """All bytes have been written."""
        self.is_whole = True
        if not self.is_stream and self._rest:
            self._read(self._rest)
        self._rest = None

    def _read_lines(self, chunk: bytes) -> None:
        if self._rest == b"" and _is_tokens(chunk):
            return
        head, *others = chunk.split(b"\n")
        self._keep(head)
        for line in others:
            if self._rest is not None:
                self._line(self._rest)
            self._rest = b""
            self._keep(line)

    def _keep(self, piece: bytes) -> None:
        if self._rest is None or not piece:
            return
        if len(self._rest) + len(piece) > MOST_NBYTES:
            self._rest = None
        else:
            self._rest += piece

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == _DONE:
            self.is_whole = True
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        try:
            found = msgspec.json.decode(data, type=_AnswerOrEvent)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if found.type in _LAST_EVENTS:
            self.is_whole = True
        if found.type in _FAILED or not is_empty(found.error):
            self.error = _code(found.error)
        elif self.status in (404, 405):
            self.has_no_route = not is_empty(found.detail)
        inner = found.message if isinstance(found.message, _Inner) else found.response
        usage = found.usage or (None if inner is None else inner.usage)
        if usage is not None and usage.prompt:  # a stream of /v1/messages begins with 0
            self.prompt_tokens = usage.prompt


def _code(error: Raw) -> int:
    try:
        code = msgspec.json.decode(error, type=_Error).code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _UNKNOWN_ERROR
    return code if isinstance(code, int) and 400 <= code < 600 else _UNKNOWN_ERROR
