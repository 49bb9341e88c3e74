"""What can be lent of a request that has ended, and where less of it is there, too."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from pdconn.protocol.ticket import MAX_CUTS
from pdconn.vllm.blocks.kinds import kinds_of
from pdconn.vllm.lends.answers import BlockIds, LendableAnswer
from pdconn.vllm.patches.pool.kept_windows import holds_windows
from pdconn.vllm.patches.pool.local_hits import agreed_hit
from registration.references import AttentionKind


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
        Without blocks where a window has moved on, with drafts behind the end of the answer.
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
    """Ends of blocks, and among them the last one of the prompt.

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
