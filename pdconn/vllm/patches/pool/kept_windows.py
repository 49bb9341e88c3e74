"""Keeps the one block that decode needs and prefill would free.

Decode recomputes the last prompt token, at position N-1, and attends to the window *before that
token*.  Prefill has computed N tokens when it finishes, and vLLM has freed the blocks outside the
window of the *next* token, N::

    window 4, block 2, N = 9        0 1 | 2 3 | 4 5 | 6 7 | 8
    window of token 9 (prefill)                       6 7   8 9
    window of token 8 (decode)                      5 6 7   8
                                    block (4 5) is freed, and token 5 is needed

This happens whenever N - window + 1 is a multiple of the block size (for chunked attention, when N
is a multiple of the chunk: the whole chunk is freed).  So once the prompt is computed, prefill
frees as if one token fewer had been computed; or more, if decode computes more
(:mod:`pdconn.vllm.speculation`).

Until then it frees as vLLM does.  A request holds most blocks while its prompt is computed, those
of a window and a whole step of tokens, by which vLLM admits it; so it needs no more than without
pdconn.

A state that has processed the last token cannot be reverted, so prefill leaves that token to decode
(:mod:`pdconn.vllm.lends.tickets`).

Replaced: ``remove_skipped_blocks`` of the managers of groups with windows, of one engine.
Checked at the start by :func:`check_windows`.
Tested by ``tests/vllm/windows/test_retention.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from pdconn.vllm.blocks.kinds import is_state, kinds_of
from pdconn.vllm.patches.live import Live, changed, expect, replaced
from pdconn.vllm.patches.pool.admitted_blocks import admit_more
from registration.references import AttentionKind

SOURCES = {
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks": (
        672,
        682,
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.get_num_skipped_tokens": (
        1135,
        1148,
    ),
    "vllm.v1.core.single_type_kv_cache_manager:"
    "ChunkedLocalAttentionManager.get_num_skipped_tokens": (1368, 1381),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.remove_skipped_blocks": (429, 433),
}

_METHOD = "remove_skipped_blocks"
_LATE = 1 << 10
"""More tokens than are kept behind a window, without those of an alignment."""


def keep_window_of_last_token(kv_cache_manager: Any, num_tokens: int = 1) -> int:
    """Make every windowed group of a prefill engine keep ``num_tokens`` more tokens.

    Args:
        kv_cache_manager: vLLM's ``KVCacheManager``, before any request.
        num_tokens: that decode computes at the end of a prompt.

    Returns:
        The number of windowed groups.
    """
    managers = [
        manager
        for manager in kv_cache_manager.coordinator.single_type_managers
        if has_window(manager)
    ]

    def freed_as(processed: int, num_prompt_tokens: int | None) -> int:
        late = max(0, processed - num_tokens)
        if num_prompt_tokens is None:  # vLLM passes it in all of its calls
            return late
        return max(late, min(processed, num_prompt_tokens - num_tokens))

    for manager in managers:
        _free_as(manager, freed_as)
    return len(managers)


def keep_more_tokens(managers: Iterable[Any], num_tokens: int) -> None:
    """Make groups keep ``num_tokens`` more tokens than their windows, at any time.

    The blocks by which vLLM admits a request grow, too
    (:mod:`pdconn.vllm.patches.pool.admitted_blocks`).

    Args:
        managers: vLLM's ``SingleTypeKVCacheManager`` of each group, before any request.
        num_tokens: 1 or more.
    """
    for manager in managers:
        _free_as(manager, lambda processed, _: max(0, processed - num_tokens))
        admit_more(manager, num_tokens)


def _free_as(manager: Any, freed_as: Callable[[int, int | None], int]) -> None:
    """Make a group free blocks as if another number of tokens were computed.

    Args:
        manager: vLLM's, of the group.
        freed_as: returns that number, from the numbers of computed tokens and of the prompt's.
    """
    freeing = manager.remove_skipped_blocks

    def remove_skipped_blocks(
        request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        freed = freed_as(processed_computed_tokens, num_prompt_tokens)
        freeing(request_id, freed, num_prompt_tokens)

    manager.remove_skipped_blocks = remove_skipped_blocks


def has_window(manager: Any) -> bool:
    """Whether the group of this manager frees blocks of a running request."""
    return not is_state(manager.kv_cache_spec) and manager.get_num_skipped_tokens(1 << 30) > 0


def first_needed(manager: Any, num_tokens: int) -> int:
    """The first block that the token behind ``num_tokens`` attends to."""
    return int(manager.get_num_skipped_tokens(num_tokens)) // int(manager.block_size)


def holds_windows(
    manager: Any, config: Any, blocks: Sequence[Sequence[int]], num_tokens: int
) -> bool:
    """Whether every group has what the token behind ``num_tokens`` attends to.

    Args:
        manager: vLLM's ``KVCacheManager``.
        config: the engine's groups.
        blocks: of a request, by transferred group; 0 is a hole.
        num_tokens: that were computed.
    """
    for group, ids in zip(config.transfer_group_ids, blocks, strict=True):
        of_group = manager.coordinator.single_type_managers[group]
        end = -(-num_tokens // of_group.block_size)
        if not all(ids[first_needed(of_group, num_tokens) : end]):
            return False
    return True


def check_windows(live: Live) -> None:
    """Check that blocks before a window are freed in time, and no others.

    Raises:
        ConfigError: naming the method that works differently.
    """
    config = live.manager.kv_cache_config
    for group, kind in zip(config.transfer_group_ids, kinds_of(config), strict=True):
        _check_reach(live.managers[group], kind)
    windows = [one for one in live.managers if has_window(one)]
    _check_calls(live, windows)
    with live.computed_request(live.tokens) as request:
        for one in windows:
            _check_frees(live, one, request.request_id)


def _check_reach(one: Any, kind: AttentionKind | None) -> None:
    """Check that no token that attention reads counts as skipped, since pulls are planned by it."""
    if kind is AttentionKind.SLIDING_WINDOW:
        most = one.kv_cache_spec.sliding_window + 1
        tokens = 2 * most - 2
    elif kind is AttentionKind.CHUNKED_LOCAL:
        most = one.kv_cache_spec.attention_chunk_size
        tokens = 2 * most - 1
    else:
        return
    skipped = one.get_num_skipped_tokens(tokens)
    if skipped > most:
        name = f"{type(one).__name__}.get_num_skipped_tokens({tokens})"
        raise changed(name, f"at most {most}", skipped)


def _check_calls(live: Live, windows: Iterable[Any]) -> None:
    """Check that the method is called with the numbers of processed and of prompt tokens."""
    calls: dict[int, list[tuple[int, int | None]]] = {id(one): [] for one in windows}

    def called(
        one: Any, request_id: str, processed: int, num_prompt_tokens: int | None = None
    ) -> None:
        calls[id(one)].append((processed, num_prompt_tokens))

    with live.computed_request(live.tokens) as request, ExitStack() as noted:
        for one in windows:
            noted.enter_context(replaced(one, _METHOD, partial(called, one)))
        request.append_output_token_ids(0)
        live.manager.allocate_slots(request, 1, has_scheduled_reqs=False)
    for seen in calls.values():
        expect(f"KVCacheManager.allocate_slots, calls of {_METHOD}", [(live.tokens,) * 2], seen)


def _check_frees(live: Live, one: Any, request_id: str) -> None:
    """Check that the first block is freed after its last reader, or later where we keep it."""
    passed = _passes_first_block(one)
    table = one.req_to_blocks[request_id]
    held = sum(not block.is_null for block in table)
    free = live.pool.get_num_free_blocks()
    one.remove_skipped_blocks(request_id, passed - 1, passed - 1)
    expect(f"{_METHOD}, before a window", False, table[0].is_null)
    one.remove_skipped_blocks(request_id, passed, passed)
    expect(f"{_METHOD}, at a window", _METHOD not in vars(one), table[0].is_null)
    one.remove_skipped_blocks(request_id, passed + live.segment + _LATE, passed)
    expect(f"{_METHOD}, behind a window", True, table[0].is_null)
    left = sum(not block.is_null for block in table)
    freed = live.pool.get_num_free_blocks() - free
    expect(f"{_METHOD}, blocks that are free then", held - left, freed)


def _passes_first_block(one: Any) -> int:
    """The least number of computed tokens after which the first block is not attended to."""
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if first_needed(one, middle) > 0 else (middle + 1, high)
    if first_needed(one, low - 1) or not first_needed(one, low):
        raise changed(f"{type(one).__name__}.get_num_skipped_tokens", "rising", "falling")
    return low
