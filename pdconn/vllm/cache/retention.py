"""Keeping the one block that decode needs and prefill would drop.

Decode recomputes the last prompt token, at position N-1, and so attends to the
window *before that token*.  Prefill has computed N tokens when it finishes, and
vLLM has freed what lies outside the window of the *next* token, N::

    window 4, block 2, N = 9        0 1 | 2 3 | 4 5 | 6 7 | 8
    window of token 9 (prefill)                       6 7   8 9
    window of token 8 (decode)                      5 6 7   8
                                    block (4 5) is dropped, and token 5 is needed

It happens whenever N - window + 1 is a multiple of the block size (for chunked
attention, when N is a multiple of the chunk: the whole chunk is dropped).  Once the prompt is
computed, prefill therefore frees as if one token fewer had been; as if more, where decode computes
more (:mod:`pdconn.vllm.speculation`).

Until then it frees as vLLM does.  So a request holds most while its prompt is computed, when a
window, and a whole step of tokens, have blocks; what vLLM admits by that is enough for what is kept
behind it, and the longest prompt is admitted as without pdconn.

A state is another matter: one that has seen the last token cannot be taken back, so prefill
leaves that token to decode (:mod:`pdconn.vllm.lends.tickets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pdconn.vllm.blocks.kinds import is_state


def keep_window_of_last_token(kv_cache_manager: Any, num_tokens: int = 1) -> int:
    """Let every windowed group of a prefill engine keep one token more.

    Args:
        kv_cache_manager: vLLM's ``KVCacheManager``, before any request.
        num_tokens: that decode computes at the prompt's end, and as many more are kept.

    Returns:
        How many groups were changed.
    """
    managers = [
        manager
        for manager in kv_cache_manager.coordinator.single_type_managers
        if not is_state(manager.kv_cache_spec) and manager.get_num_skipped_tokens(1 << 30) > 0
    ]

    def freed_as(processed: int, num_prompt_tokens: int | None) -> int:
        late = max(0, processed - num_tokens)
        if num_prompt_tokens is None:  # vLLM says it in every call of its own
            return late
        return max(late, min(processed, num_prompt_tokens - num_tokens))

    for manager in managers:
        _free_as(manager, freed_as)
    return len(managers)


def keep_more_tokens(managers: Iterable[Any], num_tokens: int) -> None:
    """Let groups keep ``num_tokens`` tokens more than their windows reach, all the time.

    What vLLM admits a request by grows with it, see :func:`has_room_to_keep`.

    Args:
        managers: vLLM's ``SingleTypeKVCacheManager`` of each group, before any request.
        num_tokens: 1 or more.
    """
    for manager in managers:
        _free_as(manager, lambda processed, _: max(0, processed - num_tokens))
        if manager.max_admission_blocks_per_request is not None:
            manager.max_admission_blocks_per_request += _further_blocks(manager, num_tokens)


def _free_as(manager: Any, freed_as: Callable[[int, int | None], int]) -> None:
    """Let a group free as if another number of tokens were computed.

    Args:
        manager: vLLM's, of the group.
        freed_as: of the number of tokens that are computed, and that of the prompt's.
    """
    freeing = manager.remove_skipped_blocks

    def remove_skipped_blocks(
        request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        freed = freed_as(processed_computed_tokens, num_prompt_tokens)
        freeing(request_id, freed, num_prompt_tokens)

    manager.remove_skipped_blocks = remove_skipped_blocks


def _further_blocks(manager: Any, num_tokens: int) -> int:
    """What the admission cap grows by: the most blocks that a request may hold at once.

    One more now, and another for each block of further tokens.
    """
    further = -(-(num_tokens - 1) // manager.kv_cache_spec.block_size) if num_tokens > 1 else 0
    return 1 + further


def has_room_to_keep(
    kv_cache_manager: Any, managers: Iterable[Any], num_tokens: int, longest: int
) -> bool:
    """Whether the longest prompt is admitted with what these groups would keep more of it.

    vLLM takes memory for one such prompt at least, and a request that is never admitted holds up
    all others behind it.

    Args:
        kv_cache_manager: vLLM's ``KVCacheManager``.
        managers: of groups with windows, as for :func:`keep_more_tokens`.
        num_tokens: as there.
        longest: tokens of that prompt.
    """
    further = {id(manager): _further_blocks(manager, num_tokens) for manager in managers}
    needed = 0
    for manager in kv_cache_manager.coordinator.single_type_managers:
        blocks = -(-longest // manager.block_size)
        cap = manager.max_admission_blocks_per_request
        if cap is not None:
            blocks = min(blocks, cap + further.get(id(manager), 0))
        needed += blocks
    return bool(needed < kv_cache_manager.block_pool.num_gpu_blocks)  # one is the null block
