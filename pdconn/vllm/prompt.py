"""A digest of everything that a prompt's KV depends on, for the ticket.

The prompts of prefill and decode must be equal: same tokens, same adapter, same multimodal inputs.
A ticket that a proxy has sent with another request is detected.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from typing import Any

from pdconn.protocol import keep, ticket
from pdconn.protocol.errors import TicketError
from pdconn.protocol.ticket import TOKENS, closed_digest
from pdconn.store.format.row_names import RowNames
from transport.errors import shown

log = logging.getLogger(__name__)

_NAMES = RowNames()
"""Of a store that is not encrypted: labels that go no further than our workers need no secret."""

_PIECE = 1 << 15
"""Tokens that are encoded at a time; msgpack encodes their number in 3 bytes."""

_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)

EMBEDDINGS = "prompts given as embeddings are not handed over"


def has_embeddings(request: Any) -> bool:
    """Whether a part of the prompt is embeddings, which the digest would not cover."""
    return request.prompt_embeds is not None


def prompt_digest(request: Any) -> str:
    """:func:`pdconn.protocol.ticket.prompt_digest` of vLLM's ``Request``."""
    tokens, features = request.prompt_token_ids or (), request.mm_features
    return ticket.prompt_digest(tokens, _adapter(request), _identifiers(features))


def prefix_digest(request: Any, num_tokens: int) -> str:
    """The digest of the first ``num_tokens`` tokens, which differs from that of a whole prompt.

    It covers the cache salt as well, by which vLLM separates tenants.
    """
    return prefix_digests(request, (num_tokens,))[0]


def prefix_digests(request: Any, ends: Sequence[int]) -> list[str]:
    """:func:`prefix_digest` of several prefixes of prompt and answer, in ascending order."""
    tokens = request.all_token_ids
    features = request.mm_features or ()
    salt = request.cache_salt
    digest, digests, begin = hashlib.sha256(), [], 0
    for end in ends:
        for at in range(begin, end, _PIECE):
            digest.update(_without_length(tokens[at : min(end, at + _PIECE)]))
        inside = [one for one in features if one.mm_position.offset < end]
        more = f"|prefix|{end}|{salt!r}"
        closed = closed_digest(digest.copy(), _adapter(request), _identifiers(inside), more)
        digests.append(closed)
        begin = end
    return digests


def _without_length(tokens: Sequence[int]) -> memoryview:
    """At most ``_PIECE`` tokens, encoded by msgpack, without their number."""
    return memoryview(TOKENS.encode(list(tokens)))[1 if len(tokens) < 16 else 3 :]


def _adapter(request: Any) -> str:
    adapter = request.lora_request
    return adapter.lora_name if adapter else ""


def _identifiers(features: Any) -> list[str]:
    return [feature.identifier for feature in features or ()]


def is_prefetch(request: Any) -> bool:
    """Whether nobody waits for the request; a field that cannot be read changes nothing."""
    try:
        return keep.is_prefetch(request.kv_transfer_params)
    except TicketError as error:
        name = shown(request.request_id)
        log.warning("pdconn: served as a request that is waited for: %s request=%s", error, name)
        return False


def tenant_label(request: Any) -> bytes:
    """The label of the request's tenant, by its cache salt as in a store; none without a salt."""
    return _NAMES.tenant(request.cache_salt)


def parent_of(request_id: str) -> str | None:
    """The request that a best-of-n child belongs to, or None."""
    # vLLM makes a request of each answer, and names it ``<index>_<parent>``.
    child = _CHILD.fullmatch(request_id)
    return child.group(1) if child else None
