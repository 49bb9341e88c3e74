"""Builds the bodies that engines get for a client's request, and parses their answers.  Pure.

::

    client   {"model": m, "prompt": p, "max_tokens": 64, "stream": true}
    prefill  {"model": m, "prompt": p, "max_tokens": 1, "stream": false, "n": 1,
              "kv_transfer_params": {"do_remote_decode": true, ...}}
    decode   {"model": m, "prompt": p, "max_tokens": 64, "stream": true,
              "kv_transfer_params": the ticket, as prefill wrote it}

and where an engine holds the first n tokens of the prompt, for prefill to pull::

    holder   {"model": m, "prompt": [n + 1 token ids], "max_tokens": 1,
              "kv_transfer_params": {"do_remote_decode": true, "pdconn": {"lend": n}, ...}}
    prefill  as above, and in "kv_transfer_params" "pdconn": {"from": the holder's ticket}

Tickets belong to the connector: the router passes them on unchanged.  With ``--reuse-tokens`` it
asks prefill for a chat's token ids (``return_token_ids``) and adds them to the ticket: vLLM takes
``prompt_token_ids`` from the parameters and does not render and tokenize the chat again.

An answer's HTTP status is sent before the first token, so it does not show how a stream ended; and
a client may close its connection after the last event, before the engine closes its own.  So the
reader inspects the relayed bytes::

    data: {"choices": ...}         a token
    data: {"error": {...}}         a failure, of the client or of the engine: ``code``
    ... "finish_reason": "abort"   the engine has ended the request (``openai.first_output``)
    data: [DONE]                   the answer is complete, even if the connection breaks now

Each route has its own last event (``message_stop``, ``response.completed``).  A JSON body is
complete after ``Content-Length`` bytes.  Only events that may hold one of these are decoded, and
the state kept between two calls is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Raw

from pdconn.router.openai.event_stream import DONE, event_data
from pdconn.router.openai.requests import TICKET_FIELD, ParsedBody, Route, is_empty, kind_of

#: Prefill samples one token, which is discarded.  These fields only shape that token's answer, or
#: forbid an answer of one token.  Everything that shapes the *prompt* (tools, templates,
#: response_format, ...) must stay.
_NOT_FOR_PREFILL = frozenset(
    {
        "best_of",
        "enable_response_messages",
        "include",
        "logprobs",
        "logprob_token_ids",
        "min_tokens",
        "return_token_ids",
        "stream_options",
        "top_logprobs",
    }
)

_ANSWERS_BOUND: Mapping[Route, str] = {Route.RESPONSES: "max_output_tokens"}
"""The field that limits an answer's tokens; other routes use ``max_tokens``."""

_LEND: Mapping[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_TOKENS_FIELD = "prompt_token_ids"

_SHAPES_HASHES = ("model", "cache_salt")
"""Fields beside the prompt that an engine's block hashes depend on."""

#: A model name that no engine serves; see ``return_body``.
RETURN_MODEL = "pdconn-returns-a-ticket"


def lend_params() -> dict[str, object]:
    """``kv_transfer_params`` of a request whose blocks are to be lent."""
    return dict(_LEND)


def prefill_body(
    body: ParsedBody,
    source: Raw | None = None,
    stream: str | None = None,
    *,
    returns_tokens: bool = False,
    keep: Mapping[str, object] | None = None,
) -> bytes:
    """The body for prefill: the same prompt, one output token, and a request to lend the blocks.

    ``source`` is a ticket for the prompt's prefix, and ``stream`` what an early ticket names.
    ``returns_tokens``: ask for the token ids of a chat's prompt.  ``keep``: what is asked for its
    session.
    """
    fields = _prefill_fields(body)
    if returns_tokens and body.route is Route.CHAT:
        fields["return_token_ids"] = True
    ours = {"from": source, "stream": stream, "keep": keep}
    if given := {name: value for name, value in ours.items() if value is not None}:
        fields[TICKET_FIELD] = {**_LEND, "pdconn": given}
    return msgspec.json.encode(fields)


LEAST_PRIORITY = 1 << 20
"""vLLM's ``priority`` of a prefetch: engines that schedule by priority compute it last."""


def prefetch_body(
    body: ParsedBody, source: Raw | None = None, keep: Mapping[str, object] | None = None
) -> bytes:
    """A request that leaves the prompt's KV in an engine's cache, and lends nothing.

    ``source`` is a ticket for the prompt's prefix, ``keep`` what is asked for its session.
    """
    ours = {"from": source, "keep": keep, "lend_back": False, "prefetch": True}
    given = {name: value for name, value in ours.items() if value is not None}
    fields = _prefill_fields(body)
    if body.route is not Route.MESSAGES:
        fields["priority"] = LEAST_PRIORITY
    return msgspec.json.encode({**fields, TICKET_FIELD: {"pdconn": given}})


def release_body(model: Raw | None, keep: Mapping[str, object]) -> bytes:
    """A request of one token that releases a session; its prompt is of no use to anybody."""
    named = {} if model is None else {"model": model}
    params = {"pdconn": {"keep": keep, "lend_back": False}}
    return msgspec.json.encode(
        {**named, "prompt": [0], "max_tokens": 1, "stream": False, TICKET_FIELD: params}
    )


def prefix_body(body: ParsedBody, prefix: Sequence[int]) -> bytes:
    """A request for the KV cache of a prompt's first tokens; ``prefix`` has one token more."""
    lend = {**_LEND, "pdconn": {"lend": len(prefix) - 1}}
    return msgspec.json.encode(
        {
            **_hash_fields(body),
            "prompt": list(prefix),
            "max_tokens": 1,
            "stream": False,
            TICKET_FIELD: lend,
        }
    )


def without_prompt(body: ParsedBody) -> ParsedBody:
    """A body for returning a prefix's ticket, which does not depend on the prompt."""
    fields = {**_hash_fields(body), "prompt": Raw(b"[0]")}
    return ParsedBody(Route.COMPLETIONS, b"", fields, None)


def _hash_fields(body: ParsedBody) -> dict[str, Raw]:
    return {name: body.fields[name] for name in _SHAPES_HASHES if name in body.fields}


def decode_body(
    body: ParsedBody, ticket: Raw | None, keep: Mapping[str, object] | None = None
) -> bytes:
    """The client's body, with the ticket if there is one, and what is asked for its session."""
    if keep is None:
        if ticket is None:
            return body.raw
        return msgspec.json.encode({**body.fields, TICKET_FIELD: ticket})
    params: dict[str, Raw] = {}
    ours: dict[str, object] = {"lend_back": False}
    if ticket is not None:
        params = msgspec.json.decode(ticket, type=dict[str, Raw])
        known = params.get("pdconn")
        ours = {} if known is None else msgspec.json.decode(known, type=dict[str, object])
    return msgspec.json.encode(
        {**body.fields, TICKET_FIELD: {**params, "pdconn": {**ours, "keep": keep}}}
    )


def return_body(body: ParsedBody, ticket: Raw) -> bytes:
    """A request that makes decode return the ticket unused.

    It asks for a model that does not exist.  vLLM checks the name first, and reports every refused
    request that held a ticket to the connector, so that the lender frees its blocks: nothing is
    queued, pulled or computed, and a second return has no effect.  Where names are not checked
    (``VLLM_SKIP_MODEL_NAME_VALIDATION``) the same body is a request for one token: decode pulls the
    blocks, and then the lender frees them.
    """
    fields = _prefill_fields(body)
    # The thinking budget has to be below max_tokens, which vLLM checks before the model's name.
    fields.pop("thinking", None)
    return msgspec.json.encode({**fields, "model": RETURN_MODEL, TICKET_FIELD: ticket})


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: Raw = Raw(b"null")
    prompt_token_ids: Raw = Raw(b"null")


class _PrefixTicket(msgspec.Struct):
    do_remote_prefill: bool


def find_ticket(answer: bytes) -> Raw | None:
    """The ticket in prefill's JSON answer; None without one.

    >>> bytes(find_ticket(b'{"id": 1, "kv_transfer_params": {"x": 1}}'))
    b'{"x": 1}'
    """
    try:
        found = msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if is_empty(found) or kind_of(found) != "an object" else found


def with_tokens(ticket: Raw, answer: bytes) -> Raw:
    """The ticket with the prompt's token ids added, if prefill's answer has them.

    >>> bytes(with_tokens(Raw(b'{"x": 1}'), b'{"prompt_token_ids": [5, 6]}'))
    b'{"x":1,"prompt_token_ids":[5, 6]}'
    """
    found = msgspec.json.decode(answer, type=_PrefillAnswer).prompt_token_ids
    if kind_of(found) != "a list":
        return ticket
    fields = msgspec.json.decode(ticket, type=dict[str, Raw])
    return Raw(msgspec.json.encode({**fields, _TOKENS_FIELD: found}))


def find_prefix_ticket(answer: bytes) -> Raw | None:
    """The ticket in the answer to ``prefix_body``; None if nothing is lent.

    >>> find_prefix_ticket(b'{"kv_transfer_params": {"pdconn": {"lend": 9, "held": 4}}}')
    """
    found = find_ticket(answer)
    try:
        lent = found is not None and msgspec.json.decode(found, type=_PrefixTicket)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if lent and lent.do_remote_prefill else None


def _prefill_fields(body: ParsedBody) -> dict[str, object]:
    fields: dict[str, object] = {
        name: value for name, value in body.fields.items() if name not in _NOT_FOR_PREFILL
    }
    fields.update({_ANSWERS_BOUND.get(body.route, "max_tokens"): 1, "stream": False})
    fields[TICKET_FIELD] = _LEND
    if body.route in (Route.COMPLETIONS, Route.CHAT):
        fields["n"] = 1
    if body.route is Route.RESPONSES:
        fields["store"] = False  # of one token, which is not read
    if body.route is Route.CHAT or "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    return fields


#: Maximum bytes of a decoded event or body; longer ones are not decoded.
MOST_NBYTES = 1 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

_LAST_EVENTS = frozenset(
    {"message_stop", "response.completed", "response.incomplete", "response.failed"}
)
_FAILED = ("error", "response.failed")
_UNKNOWN_ERROR = 500
_UNAVAILABLE = 503
ABORT = "abort"
"""The finish reason of a request that vLLM ends because it stops, pauses or sleeps."""


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
    cache_read_input_tokens: _Count | None = None  # of /v1/messages, which counts these separately
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
        """Cached tokens of the prompt, as ``--enable-prompt-tokens-details`` reports them."""
        details = self.prompt_tokens_details or self.input_tokens_details
        return self.cache_read_input_tokens if details is None else details.cached_tokens


NO_USAGE = AnswerUsage()


class _Inner(msgspec.Struct):
    """``response`` of an event of ``/v1/responses``, or ``message`` of ``/v1/messages``."""

    usage: AnswerUsage | None = None


class _Used(msgspec.Struct):
    usage: AnswerUsage | None = None


def find_usage(answer: bytes) -> AnswerUsage:
    """The usage in a whole JSON answer; empty without one.

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
    detail: Raw = Raw(b"null")  # FastAPI's own errors
    usage: AnswerUsage | None = None
    response: _Inner | None = None
    message: _Inner | str | None = None


class EndedChoice(msgspec.Struct):
    """A choice of an answer or event, and why it ended; None while it goes on."""

    finish_reason: str | None = None


class _Choices(msgspec.Struct):
    choices: list[EndedChoice]


class _Error(msgspec.Struct):
    code: int | str | None = None


def _is_tokens(chunk: bytes) -> bool:
    """Whether a chunk is whole events that neither end their stream, fail, abort, nor hold usage.

    For streams without event names, as most are; ``[DONE]`` is the last event of one.  Within a
    JSON string the quotation marks would be escaped.  This runs for each token of each stream, so
    it searches for few bytes.
    """
    return (
        chunk.startswith(b"data: {")
        and chunk.endswith(b"}\n\n")
        and b'"error"' not in chunk
        and b'"abort"' not in chunk
        and b'"usage"' not in chunk
        and b'"type"' not in chunk  # of a named event that was split after its name
    )


class AnswerReader:
    """Parses an answer while it is relayed unchanged.

    Attributes:
        status: the HTTP status.
        error: the status of an error in the answer, or 503 if the engine has ended the request;
            None without one.
        has_no_route: the answer is a web framework's 404 or 405, not one of an OpenAI API.
        prompt_tokens: as counted in its usage; None without usage.
        is_whole: the client has the complete answer.

    >>> reader = AnswerReader(200, {"Content-Type": "text/event-stream"})
    >>> reader.read_chunk(b'data: {"error": {"code": 400}}\\n\\ndata: [DONE]\\n\\n')
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
        self._rest: bytes | None = b""  # unparsed bytes; None: too long
        self._is_json = kind.startswith("application/json")

    def read_chunk(self, chunk: bytes) -> None:
        """Parse the next bytes that were written to the client."""
        self._nbytes += len(chunk)
        if self.is_stream:
            if self._rest != b"" or not _is_tokens(chunk):
                self._read_lines(chunk)
        elif self._is_json:
            self._keep(chunk)
        if self._nbytes == self._expected:
            self.read_end()

    def read_end(self) -> None:
        """Finish: all bytes have been written."""
        self.is_whole = True
        if not self.is_stream and self._rest:
            self._read(self._rest)
        self._rest = None

    def _read_lines(self, chunk: bytes) -> None:
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
        data = event_data(line)
        if data == DONE:
            self.is_whole = True
        elif data is not None:
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
        elif b'"abort"' in data and _is_aborted(data):
            self.error = _UNAVAILABLE
        elif self.status in (404, 405):
            self.has_no_route = not is_empty(found.detail)
        inner = found.message if isinstance(found.message, _Inner) else found.response
        usage = found.usage or (None if inner is None else inner.usage)
        if usage is not None and usage.prompt:  # a stream of /v1/messages begins with 0
            self.prompt_tokens = usage.prompt


def has_abort(choices: Sequence[EndedChoice]) -> bool:
    """Whether the engine has ended one of them."""
    return any(choice.finish_reason == ABORT for choice in choices)


def _is_aborted(data: bytes) -> bool:
    try:
        return has_abort(msgspec.json.decode(data, type=_Choices).choices)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _code(error: Raw) -> int:
    try:
        code = msgspec.json.decode(error, type=_Error).code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _UNKNOWN_ERROR
    return code if isinstance(code, int) and 400 <= code < 600 else _UNKNOWN_ERROR


class Card(msgspec.Struct):
    """A model as an engine lists it; ``parent`` is an adapter's base model, ``root`` its path."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelCards(msgspec.Struct):
    """An engine's answer to ``GET /v1/models``."""

    data: list[Card]


def base_models(listed: bytes) -> list[str]:
    """The base models, without adapters, in an engine's answer to ``GET /v1/models``.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: the answer does not parse.
    """
    cards = msgspec.json.decode(listed, type=ModelCards).data
    return [card.id for card in cards if card.parent is None]
