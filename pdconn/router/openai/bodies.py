"""The bodies that engines get for a client's request, and the ticket in an answer.  Pure.

::

    client   {"model": m, "prompt": p, "max_tokens": 64, "stream": true}
    prefill  {"model": m, "prompt": p, "max_tokens": 1, "stream": false, "n": 1,
              "kv_transfer_params": {"do_remote_decode": true, ...}}
    decode   {"model": m, "prompt": p, "max_tokens": 64, "stream": true,
              "kv_transfer_params": the ticket, as prefill wrote it}

The ticket is the connector's: the router passes it on unread.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from pdconn.router.openai.requests import TICKET_FIELD, ParsedBody, Route, is_empty, kind_of

#: Prefill samples one token, which is discarded.  These fields only shape that token's answer,
#: or forbid an answer of one token.  Everything that shapes the *prompt* (tools, templates,
#: response_format, ...) must stay.
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


def prefill_body(body: ParsedBody) -> bytes:
    """The same prompt, one token of answer, and a request to lend the blocks."""
    return msgspec.json.encode(_prefill_fields(body))


def decode_body(body: ParsedBody, ticket: Raw | None) -> bytes:
    """What the client sent, and the ticket if there is one."""
    if ticket is None:
        return body.raw
    return msgspec.json.encode({**body.fields, TICKET_FIELD: ticket})


def return_body(body: ParsedBody, ticket: Raw) -> bytes:
    """A request that makes decode return the ticket unused.

    It asks for a model that does not exist.  vLLM checks the name before all
    else, and tells the connector of every refused request that held a ticket,
    so that the lender frees its blocks: nothing is queued, pulled or computed,
    and a second return has no effect.  Where names are not checked
    (``VLLM_SKIP_MODEL_NAME_VALIDATION``) the same body is a request for one token:
    decode pulls the blocks, and then the lender frees them.
    """
    fields = _prefill_fields(body)
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
    """Prompt tokens from the prefix cache, as ``--enable-prompt-tokens-details`` reports them.

    >>> find_cached_tokens(b'{"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}')
    32
    """
    try:
        usage = msgspec.json.decode(answer, type=_Used).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    details = None if usage is None else usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def _prefill_fields(body: ParsedBody) -> dict[str, object]:
    fields: dict[str, object] = {
        name: value for name, value in body.fields.items() if name not in _NOT_FOR_PREFILL
    }
    fields.update({"max_tokens": 1, "n": 1, "stream": False, TICKET_FIELD: _LEND})
    if body.route is Route.CHAT or "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    return fields
