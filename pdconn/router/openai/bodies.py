"""The bodies that engines get for a client's request, and what they answer.  Pure.

::

    client   {"model": m, "prompt": p, "max_tokens": 64, "stream": true}
    prefill  {"model": m, "prompt": p, "max_tokens": 1, "stream": false, "n": 1,
              "kv_transfer_params": {"do_remote_decode": true, ...}}
    decode   {"model": m, "prompt": p, "max_tokens": 64, "stream": true,
              "kv_transfer_params": the ticket, as prefill wrote it}

The ticket is the connector's own matter: it is never looked into.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from pdconn.router.openai.requests import TICKET_FIELD, GenerateRequest, Route, is_empty, kind_of

#: Prefill samples one token that nobody reads.  These only shape that token's
#: answer, or forbid that there be a single one.  Everything that shapes the
#: *prompt* (tools, templates, response_format, ...) must stay.
_NOT_FOR_PREFILL = frozenset(
    {
        "best_of",
        "logprobs",
        "logprob_token_ids",
        "min_tokens",
        "return_token_ids",
        "stream_options",
        "top_logprobs",
    }
)

_LEND = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)

#: No engine serves a model of this name; see ``return_body``.
RETURN_MODEL = "pdconn-returns-a-ticket"


def prefill_body(request: GenerateRequest) -> bytes:
    """The same prompt, one token of answer, and the wish to lend its blocks."""
    return msgspec.json.encode(_prefill_fields(request))


def decode_body(request: GenerateRequest, ticket: Raw | None) -> bytes:
    """What the client sent, and the ticket if there is one."""
    if ticket is None:
        return request.raw
    return msgspec.json.encode({**request.fields, TICKET_FIELD: ticket})


def return_body(request: GenerateRequest, ticket: Raw) -> bytes:
    """A request that makes decode give the ticket back without using it.

    It asks for a model that does not exist.  vLLM checks the name before all
    else, and tells the connector of every refused request that held a ticket,
    so that the lender frees its blocks: nothing is queued, pulled or computed,
    and doing it twice does no harm.  Where names are not checked
    (``VLLM_SKIP_MODEL_NAME_VALIDATION``) the same body is a whole request for
    one token: decode pulls the blocks, and gives them back like any other.
    """
    fields = _prefill_fields(request)
    return msgspec.json.encode({**fields, "model": RETURN_MODEL, TICKET_FIELD: ticket})


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: Raw = Raw(b"null")


class _Details(msgspec.Struct):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Used(msgspec.Struct):
    usage: _Usage | None = None


def find_ticket(answer: bytes) -> Raw | None:
    """The ticket in prefill's JSON answer, or None where there is none.

    >>> bytes(find_ticket(b'{"id": 1, "kv_transfer_params": {"x": 1}}'))
    b'{"x": 1}'
    """
    try:
        found = msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if is_empty(found) or kind_of(found) != "an object" else found


def find_cached_tokens(answer: bytes) -> int | None:
    """What an engine with ``--enable-prompt-tokens-details`` found in its prefix cache.

    >>> find_cached_tokens(b'{"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}')
    32
    """
    try:
        usage = msgspec.json.decode(answer, type=_Used).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    details = None if usage is None else usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def _prefill_fields(request: GenerateRequest) -> dict[str, object]:
    fields: dict[str, object] = {
        name: value for name, value in request.fields.items() if name not in _NOT_FOR_PREFILL
    }
    fields.update({"max_tokens": 1, "n": 1, "stream": False, TICKET_FIELD: _LEND})
    if request.route is Route.CHAT or "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    return fields
