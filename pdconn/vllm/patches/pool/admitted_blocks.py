"""The blocks by which a request is admitted, and more of them if it holds more.

vLLM admits a request when the pool has blocks for its whole sequence.  A group with a window never
holds more than a window and a step of tokens, so its number is capped::

    of 100 000 tokens    full attention    6250 blocks
                         window            at most max_admission_blocks_per_request

If windows are kept longer (:func:`pdconn.vllm.patches.pool.kept_windows.keep_more_tokens`) the cap
is raised.  The longest prompt must still fit into the pool: a request that is never admitted blocks
all others behind it.

Written: ``SingleTypeKVCacheManager.max_admission_blocks_per_request``.
Checked at the start by :func:`check_admission`.
Tested by ``tests/vllm/windows/test_longest_prompt.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdconn.vllm.blocks.kinds import is_state
from pdconn.vllm.patches.live import Live, expect

SOURCES = {
    "vllm.v1.core.single_type_kv_cache_manager:"
    "SingleTypeKVCacheManager.get_num_blocks_to_allocate": (175, 176),
}


def blocks_for(
    manager: Any, num_tokens: int, keeping: Iterable[Any] = (), num_further: int = 0
) -> int:
    """The most blocks that a request of ``num_tokens`` holds, in all groups together.

    Args:
        manager: vLLM's ``KVCacheManager``.
        num_tokens: of the request.
        keeping: managers of groups that will keep more tokens.
        num_further: how many.
    """
    more = {id(one): further_blocks(one, num_further) for one in keeping}
    total = 0
    for one in manager.coordinator.single_type_managers:
        blocks, most = -(-num_tokens // one.block_size), one.max_admission_blocks_per_request
        if is_state(one.kv_cache_spec) and one.kv_cache_spec.mamba_cache_mode == "align":
            blocks = min(blocks, most_states(one.kv_cache_spec))
        total += blocks if most is None else min(blocks, most + more.get(id(one), 0))
    return total


def most_states(spec: Any) -> int:
    """Blocks of states that a request holds at most, where states are kept at boundaries only."""
    # The state that a step reads, the one that it writes, one for each draft, and a checkpoint.
    return 2 + int(spec.num_speculative_blocks) + int(spec.num_prefill_checkpoint_blocks)


def block_sizes(manager: Any) -> list[int]:
    """Tokens of a block, by group; all groups take their blocks from one pool."""
    return [int(one.block_size) for one in manager.coordinator.single_type_managers]


def num_free_blocks(manager: Any) -> int:
    """Free blocks of the pool, with cached ones that no request uses."""
    return int(manager.block_pool.get_num_free_blocks())


def has_room_to_keep(manager: Any, keeping: Iterable[Any], num_further: int, longest: int) -> bool:
    """Whether a prompt of ``longest`` tokens is admitted if groups keep ``num_further`` more.

    vLLM allocates memory for at least one such prompt.
    """
    needed = blocks_for(manager, longest, keeping, num_further)
    return bool(needed < manager.block_pool.num_gpu_blocks)  # one is the null block


def admit_more(manager: Any, num_further: int) -> None:
    """Raise the cap of a group that keeps ``num_further`` more tokens."""
    if manager.max_admission_blocks_per_request is not None:
        manager.max_admission_blocks_per_request += further_blocks(manager, num_further)


def further_blocks(manager: Any, num_tokens: int) -> int:
    """By how many blocks the cap is raised: one, and one for each block of further tokens."""
    further = -(-(num_tokens - 1) // manager.kv_cache_spec.block_size) if num_tokens > 1 else 0
    return 1 + further


def check_admission(live: Live) -> None:
    """Check that a long request is admitted by the present cap.

    Raises:
        ConfigError: it is admitted differently.
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
