"""The bodies that engines get for a client's request, and the ticket in an answer.  Pure.

::

    client   {"model": m, "prompt": p, "max_tokens": 64, "stream": true}
    prefill  {"model": m, "prompt": p, "max_tokens": 1, "stream": false, "n": 1,
              "kv_transfer_params": {"do_remote_decode": true, ...}}
    decode   {"model": m, "prompt": p, "max_tokens": 64, "stream": true,
              "kv_transfer_params": the ticket, as prefill wrote it}

and where an engine holds the first n tokens of the prompt, which prefill pulls from it::

    holder   {"model": m, "prompt": [n + 1 token ids], "max_tokens": 1,
              "kv_transfer_params": {"do_remote_decode": true, "pdconn": {"lend": n}, ...}}
    prefill  as above, and in "kv_transfer_params" "pdconn": {"from": the holder's ticket}

Tickets are the connector's: the router passes them on unread.  With ``--reuse-tokens`` it asks
prefill for a chat's token ids (``return_token_ids``), and puts them beside the ticket: vLLM takes
``prompt_token_ids`` out of the parameters, and renders and tokenizes the chat no second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw

from pdconn.router.openai.requests import TICKET_FIELD, ParsedBody, Route, is_empty, kind_of

#: Prefill samples one token, which is discarded.  These fields only shape that token's answer,
#: or forbid an answer of one token.  Everything that shapes the *prompt* (tools, templates,
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
"""The field that bounds an answer's tokens; on the other routes ``max_tokens``."""

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

#: No engine serves a model of this name; see ``return_body``.
RETURN_MODEL = "pdconn-returns-a-ticket"


def lend_params() -> dict[str, object]:
    """``kv_transfer_params`` of a request whose blocks are to be lent."""
    return dict(_LEND)


def prefill_body(
    body: ParsedBody, source: Raw | None = None, *, returns_tokens: bool = False
) -> bytes:
    """The same prompt, one token of answer, and a request to lend the blocks.

    ``source`` is a ticket for the prompt's prefix.  ``returns_tokens``: a chat's answer is to hold
    the token ids of its prompt.
    """
    fields = _prefill_fields(body)
    if returns_tokens and body.route is Route.CHAT:
        fields["return_token_ids"] = True
    if source is not None:
        fields[TICKET_FIELD] = {**_LEND, "pdconn": {"from": source}}
    return msgspec.json.encode(fields)


def prefix_body(body: ParsedBody, prefix: Sequence[int]) -> bytes:
    """A request for the KV cache of a prompt's first tokens; ``prefix`` has one token more."""
    lend = {**_LEND, "pdconn": {"lend": len(prefix) - 1}}
    return msgspec.json.encode(
        {
            **_hash_fields(body),
            "prompt": prefix,
            "max_tokens": 1,
            "stream": False,
            TICKET_FIELD: lend,
        }
    )


def without_prompt(body: ParsedBody) -> ParsedBody:
    """One to return a prefix's ticket with: the prompt does not matter to that."""
    fields = {**_hash_fields(body), "prompt": Raw(b"[0]")}
    return ParsedBody(Route.COMPLETIONS, b"", fields, None)


def _hash_fields(body: ParsedBody) -> dict[str, Raw]:
    return {name: body.fields[name] for name in _SHAPES_HASHES if name in body.fields}


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
    # Its budget has to be smaller than max_tokens, which vLLM checks before the model's name.
    fields.pop("thinking", None)
    return msgspec.json.encode({**fields, "model": RETURN_MODEL, TICKET_FIELD: ticket})


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: Raw = Raw(b"null")
    prompt_token_ids: Raw = Raw(b"null")


class _PrefixTicket(msgspec.Struct):
    do_remote_prefill: bool


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


def with_tokens(ticket: Raw, answer: bytes) -> Raw:
    """The ticket with the token ids of the prompt beside it, if prefill's answer has them.

    >>> bytes(with_tokens(Raw(b'{"x": 1}'), b'{"prompt_token_ids": [5, 6]}'))
    b'{"x":1,"prompt_token_ids":[5, 6]}'
    """
    found = msgspec.json.decode(answer, type=_PrefillAnswer).prompt_token_ids
    if kind_of(found) != "a list":
        return ticket
    fields = msgspec.json.decode(ticket, type=dict[str, Raw])
    return Raw(msgspec.json.encode({**fields, _TOKENS_FIELD: found}))


def find_prefix_ticket(answer: bytes) -> Raw | None:
    """The ticket in the answer to ``prefix_body``; None where nothing is lent.

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
        fields["store"] = False  # of one token, and for nobody
    if body.route is Route.CHAT or "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    return fields
