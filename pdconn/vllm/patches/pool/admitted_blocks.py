"""How many blocks a request is admitted by, and more of them where it holds more.

vLLM admits a request when the pool has blocks for its whole sequence.  A group with a window never
holds more than a window and a step of tokens, so there the number is capped::

    of 100 000 tokens    full attention    6250 blocks
                         window            at most max_admission_blocks_per_request

Where windows are kept longer (:func:`pdconn.vllm.patches.pool.kept_windows.keep_more_tokens`) the
cap grows, and with it what the longest prompt needs, for which there must be room all the same: a
request that is never admitted holds up all others behind it.

Written: ``SingleTypeKVCacheManager.max_admission_blocks_per_request``.
Checked at the start by :func:`check_admission`.
Tested by ``tests/vllm/windows/test_longest_prompt.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdconn.vllm.patches.live import Live, expect

SOURCES = {
    "vllm.v1.core.single_type_kv_cache_manager:"
    "SingleTypeKVCacheManager.get_num_blocks_to_allocate": (175, 176),
}


def blocks_for(
    manager: Any, num_tokens: int, keeping: Iterable[Any] = (), num_further: int = 0
) -> int:
    """The most blocks that a request of so many tokens holds, in all groups together.

    Args:
        manager: vLLM's ``KVCacheManager``.
        num_tokens: of the request.
        keeping: managers of groups that are to keep more.
        num_further: tokens that these are to keep.
    """
    more = {id(one): further_blocks(one, num_further) for one in keeping}
    total = 0
    for one in manager.coordinator.single_type_managers:
        blocks, most = -(-num_tokens // one.block_size), one.max_admission_blocks_per_request
        total += blocks if most is None else min(blocks, most + more.get(id(one), 0))
    return total


def num_free_blocks(manager: Any) -> int:
    """Blocks of the pool that a request can have now, those of hits that nobody uses among them."""
    return int(manager.block_pool.get_num_free_blocks())


def has_room_to_keep(manager: Any, keeping: Iterable[Any], num_further: int, longest: int) -> bool:
    """Whether a prompt of ``longest`` tokens is admitted where groups keep ``num_further`` more.

    vLLM takes memory for one such prompt at least.
    """
    needed = blocks_for(manager, longest, keeping, num_further)
    return bool(needed < manager.block_pool.num_gpu_blocks)  # one is the null block


def admit_more(manager: Any, num_further: int) -> None:
    """Let the cap of a group grow by what it keeps: ``num_further`` tokens."""
    if manager.max_admission_blocks_per_request is not None:
        manager.max_admission_blocks_per_request += further_blocks(manager, num_further)


def further_blocks(manager: Any, num_tokens: int) -> int:
    """What the cap grows by: the most blocks more that a request may hold at once.

    One more now, and another for each block of further tokens.
    """
    further = -(-(num_tokens - 1) // manager.kv_cache_spec.block_size) if num_tokens > 1 else 0
    return 1 + further


def check_admission(live: Live) -> None:
    """Whether a long request is admitted by the cap, as it is now.

    Raises:
        ConfigError: it is admitted in another way.
    """
    for one in live.managers:
        cap = one.max_admission_blocks_per_request
        if cap is None:
            continue
        tokens = (cap + 2) * one.block_size
        name = "SingleTypeKVCacheManager.max_admission_blocks_per_request"
        admitted = one.get_num_blocks_to_allocate(
            "", tokens, (), 0, 0, tokens, apply_admission_cap=True
        )
        expect(name, cap, admitted)
