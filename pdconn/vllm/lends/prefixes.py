"""Lends a prefix that this engine holds in its cache, to the engine that computes the rest.

Only a request can pin cached blocks, so an ordinary request asks for a prefix.  Its prompt is the
prefix and one more token, since a hit never covers the last token, and its ``kv_transfer_params``
contain the length of the prefix::

    {"do_remote_decode": true, "pdconn": {"lend": 3200}}        of 3201 tokens

    hit of 3200      one token is computed; the ticket covers the 3200
    hit of 1600      refused: the prompt is cut behind its hit, a block at most is computed,
                     and the answer has {"pdconn": {"lend": 3200, "held": 1600}}

So a prefix that was evicted meanwhile is computed by the engine that needs it, and not here.  The
ticket's digest is of the prefix, its salt and its adapter
(:func:`~pdconn.vllm.prompt.prefix_digest`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pdconn.protocol.errors import TicketError
from pdconn.protocol.prefix import lend_of
from pdconn.vllm.patches.pool.local_hits import held_by_all
from pdconn.vllm.patches.pool.pinned_blocks import pin_blocks, unpin_blocks
from pdconn.vllm.patches.request_writes import answer_one_token, shorten
from pdconn.vllm.prompt import EMBEDDINGS, has_embeddings, prefix_digest
from transport.errors import shown

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lend:
    """A request for a prefix of ``num_tokens`` tokens.

    Attributes:
        held: tokens that its last look-up has found.
        blocks: that it was given, by group.
        pins: references to them.
    """

    num_tokens: int
    digest: str
    held: int = 0
    blocks: tuple[list[int], ...] = ()
    pins: list[Any] = field(default_factory=list)

    def unpin_prefix(self, pool: Any) -> None:
        """Unpin the blocks of the prefix, which is not lent."""
        if self.pins:
            unpin_blocks(pool, self.pins)
        self.held, self.blocks, self.pins = 0, (), []


class PrefixLends:
    """Requests for a prefix, from their arrival to their end.

    Args:
        block_tokens: tokens of the engine's largest blocks; connectors are given hits in whole
            blocks.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._manager: Any = None
        self._pool: Any = None
        self._lends: dict[str, _Lend] = {}

    def __len__(self) -> int:
        return len(self._lends)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._lends

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``, to look up what every group holds."""
        self._manager = manager

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in."""
        self._pool = block_pool

    def takes_request(self, request: Any) -> bool:
        """Whether a new request asks for a prefix; an invalid one is served like any other."""
        try:
            num_tokens = _asked_of(request)
        except TicketError as error:
            name = shown(request.request_id)
            log.warning("pdconn: no prefix is lent: %s request=%s", error, name)
            return False
        if num_tokens is None:
            return False
        answer_one_token(request)
        self._lends[request.request_id] = _Lend(num_tokens, prefix_digest(request, num_tokens))
        return True

    def note_hit(self, request: Any, num_local: int) -> bool:
        """Record a local hit of ``num_local`` tokens; whether the request asks for a prefix.

        If less than the prefix is held, the prompt is shortened, so that it is not computed.
        """
        lend = self._lends.get(request.request_id)
        if lend is None:
            return False
        if self._manager is not None:
            num_local = held_by_all(self._manager, request, num_local)
        lend.held = min(num_local, lend.num_tokens)
        most = num_local + self._block_tokens
        if lend.held < lend.num_tokens and most < request.num_prompt_tokens:
            shorten(request, most)
        return True

    def prefix_of(self, request_id: str) -> tuple[int, str] | None:
        """Tokens and digest of the prefix that a request asks for; None for other requests."""
        lend = self._lends.get(request_id)
        return None if lend is None else (lend.num_tokens, lend.digest)

    def pin_prefix(self, request_id: str, blocks: tuple[list[int], ...]) -> None:
        """Pin the blocks of a prefix that is held, until its request ends."""
        # vLLM frees the state at the end of the prefix once the token behind it is computed.
        lend = self._lends.get(request_id)
        if lend is None or lend.held < lend.num_tokens or lend.pins:
            return
        lend.blocks = blocks
        lend.pins = pin_blocks(self._pool, (block for ids in blocks for block in ids if block))

    def blocks_of(self, request_id: str) -> tuple[list[int], ...]:
        """Blocks of the prefix that a request asks for; empty for other requests."""
        lend = self._lends.get(request_id)
        return () if lend is None else lend.blocks

    def refusal_of(self, request_id: str, is_within: bool) -> dict[str, Any] | None:
        """The answer instead of a ticket if the prefix is not held, or may not be lent.

        ``is_within``: whether it is within the share of the blocks that prefixes may pin.
        """
        lend = self._lends.get(request_id)
        if lend is None or (lend.held == lend.num_tokens and is_within):
            return None
        held = lend.held if lend.held < lend.num_tokens else 0
        return {"pdconn": {"lend": lend.num_tokens, "held": held}}

    def forget_prefix(self, request_id: str) -> None:
        """Forget a request that leaves the engine; its lease has pins of its own."""
        lend = self._lends.pop(request_id, None)
        if lend is not None:
            lend.unpin_prefix(self._pool)

    def pinned_blocks(self) -> Iterator[list[Any]]:
        """Pinned blocks, by request."""
        return (lend.pins for lend in self._lends.values())

    def unpin_prefixes(self) -> None:
        """Unpin all prefixes before a cache reset: their requests are refused."""
        for lend in self._lends.values():
            lend.unpin_prefix(self._pool)


def _asked_of(request: Any) -> int | None:
    """Tokens of the prefix that a request asks for; None for other requests.

    Raises:
        TicketError: its parameters are invalid, or its prompt consists of embeddings.
    """
    num_tokens = lend_of(request.kv_transfer_params, request.num_prompt_tokens)
    if num_tokens is not None and has_embeddings(request):
        raise TicketError("prompt", "token ids", "embeddings", EMBEDDINGS)
    return num_tokens
