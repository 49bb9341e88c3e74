"""Lends prompt and answer to the engine that computes the next turn of a conversation.

With the key ``lend_back`` the answer to a request with ``kv_transfer_params`` contains such
parameters, which its proxy copies into the next turn's request to prefill::

    {"do_remote_decode": true, "pdconn": {"from": {...ticket of prompt and answer...}}}

The next prompt may share less than that, for example if a template drops an earlier turn's
reasoning.  So the ticket has *cuts*, with a digest each: prefill pulls up to the last cut that its
prompt shares.  Full attention can be cut at every block; windows and states only at the end, and at
the end of the prompt if the cache still holds its window::

    prompt, reasoning, answer      ##################|~~~~~~~~~~~~~~|==========
    lent of full attention         ############################################
    lent of windows                             ####                       ####
    next prompt                    ##################|==========|######
                                   pulled up to here ^
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from pdconn.protocol.prefix import lends_back
from pdconn.protocol.ticket import MAX_CUTS
from pdconn.vllm.blocks.kinds import kinds_of
from pdconn.vllm.blocks.transferred import TransferBlocks
from pdconn.vllm.patches.pool.kept_windows import holds_windows
from pdconn.vllm.patches.pool.local_hits import agreed_hit
from pdconn.vllm.values import LendBack
from registration.references import AttentionKind

BlockIds = tuple[list[int], ...]
"""By transferred group; 0 is a hole."""


@dataclass(frozen=True, slots=True)
class LendableAnswer:
    """What is lent of a finished request.

    Attributes:
        num_tokens: of prompt and answer whose KV is held.
        blocks: that hold it.
        cuts: shorter prefixes, in tokens and ascending order, of which all KV is held, too.
    """

    num_tokens: int
    blocks: BlockIds
    cuts: tuple[int, ...] = ()


@dataclass(slots=True)
class LentAnswers:
    """Decides which answers are lent.

    Attributes:
        settings: the lease, and the share.
        has_states: whether the model keeps recurrent states.
        has_drafts: whether a drafter is used.
        manager: vLLM's ``KVCacheManager``; nothing is lent before it is bound.
    """

    settings: LendBack
    has_states: bool = False
    has_drafts: bool = False
    manager: Any = None

    @classmethod
    def from_settings(
        cls, settings: LendBack | None, has_states: bool, has_drafts: bool
    ) -> LentAnswers | None:
        """None if ``settings`` are None: no answers are lent."""
        return None if settings is None else cls(settings, has_states, has_drafts)

    def answer_of(
        self, request: Any, blocks: TransferBlocks, num_tokens: int
    ) -> LendableAnswer | None:
        """What is lent of a request of which ``num_tokens`` were computed; None for nothing."""
        if self.manager is None or not num_tokens or not self.is_wanted(request):
            return None
        held = blocks.of_tokens(num_tokens)
        return answer_of(self.manager, blocks.config, request, held, num_tokens)

    def is_wanted(self, request: Any) -> bool:
        """Whether the request's answer is lent."""
        # A proxy that sends kv_transfer_params knows tickets, and may decline.
        params = request.kv_transfer_params
        if not params or params.get("do_remote_decode") or request.resumable:
            return False
        return lends_back(params) and not (self.has_states and self._moves_on(request))

    def _moves_on(self, request: Any) -> bool:
        """Whether the request's state may be that of other tokens than it has computed."""
        # A step in flight, which asynchronous scheduling has when an answer ends, overwrites the
        # state with that of the next token.  With a drafter the state behind the accepted tokens is
        # in a block of its own until the next step.
        return self.has_drafts or request.num_in_flight_tokens > 0


def num_held(blocks: BlockIds) -> int:
    """Blocks of all groups, without holes."""
    return sum(1 for ids in blocks for block in ids if block)


def answer_of(
    manager: Any, config: KVCacheConfig, request: Any, blocks: BlockIds, num_tokens: int
) -> LendableAnswer:
    """What can be lent of a request.

    Args:
        manager: vLLM's ``KVCacheManager``.
        config: the engine's groups.
        request: vLLM's ``Request``, which still has its blocks.
        blocks: of the request, as they hold ``num_tokens`` tokens.
        num_tokens: that were computed.

    Returns:
        Without blocks if a window has moved on, by drafts behind the end of the answer.
    """
    if not holds_windows(manager, config, blocks, num_tokens):
        return LendableAnswer(num_tokens, ())
    prompt = min(int(request.num_prompt_tokens), num_tokens - 1)
    if set(kinds_of(config)) == {AttentionKind.FULL}:
        size = max(group.kv_cache_spec.block_size for group in config.transfer_groups)
        return LendableAnswer(num_tokens, blocks, _cuts(num_tokens, prompt, size))
    found, cut = agreed_hit(manager, request, prompt)
    if not cut:
        return LendableAnswer(num_tokens, blocks)
    of_groups = (found[group] for group in config.transfer_group_ids)
    filled = tuple(
        [block or (hit[at].block_id if at < len(hit) else 0) for at, block in enumerate(ids)]
        for ids, hit in zip(blocks, of_groups, strict=True)
    )
    return LendableAnswer(num_tokens, filled, (cut,))


def _cuts(num_tokens: int, prompt: int, size: int) -> tuple[int, ...]:
    """Ends of blocks, with the last one of the prompt.

    >>> _cuts(100, 50, 16)
    (16, 32, 48, 64, 80, 96)
    >>> len(_cuts(100_000, 5_000, 16)), 4992 in _cuts(100_000, 5_000, 16)
    (64, True)
    """
    apart = -(-num_tokens // (MAX_CUTS * size)) * size
    ends = set(range(apart, num_tokens, apart))
    if prompt >= size:
        ends.add(prompt // size * size)
    return tuple(sorted(ends)[-MAX_CUTS:])
