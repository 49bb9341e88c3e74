"""Keeps blocks of which a pull has written only the end out of vLLM's cache.

:mod:`pdconn.vllm.blocks.partial` explains these blocks.  vLLM caches a received block by its hash,
and cannot leave one out.  But it begins behind the blocks of a request that it counts as cached; so
blocks that were written in part are counted as cached::

    blocks             | 0 | 1 | 2 | 3 | 4 |      block 2 is written in part
    num_cached_block     0  ─────────► 3
    cached, and found                | 3 | 4 |

Written: ``SingleTypeKVCacheManager.num_cached_block``, where ``cache_blocks`` begins.
Checked at the start by :func:`check_uncached`.
Tested by ``tests/vllm/windows/test_partial.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdconn.vllm.blocks.kinds import is_state
from pdconn.vllm.blocks.partial import PartialBlocks
from pdconn.vllm.patches.live import Live, expect

SOURCES = {
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks": (476, 477),
    "vllm.v1.core.single_type_kv_cache_manager:"
    "SingleTypeKVCacheManager.add_local_computed_blocks": (267, 268),
}


def never_cache(manager: Any, config: Any, request_id: str, blocks: PartialBlocks) -> None:
    """Make vLLM count these blocks of a request, and those before, as cached.

    Call it before the request is reported received, since vLLM caches its blocks then.

    Args:
        manager: vLLM's ``KVCacheManager``.
        config: vLLM's KV cache configuration.
    """
    for group, block in blocks.items():
        of_group = manager.coordinator.single_type_managers[config.transfer_group_ids[group]]
        if request_id in of_group.req_to_blocks:
            known = of_group.num_cached_block.get(request_id, 0)
            of_group.num_cached_block[request_id] = max(known, block + 1)


def check_uncached(live: Live) -> None:
    """Check that such a block is not cached, and those behind it are.

    Raises:
        ConfigError: naming the method that works differently.
    """
    end = live.end
    if not end:
        return
    manager, name = live.manager, "SingleTypeKVCacheManager.cache_blocks"
    with live.loaded_request(end) as request:
        loading = [block.block_id for block in live.blocks(request) if block.block_hash is not None]
        expect("KVCacheManager.allocate_slots, blocks with a hash of a load", [], loading)
        partial, groups = {}, list(_groups(live, request.request_id, end))
        for at, known, table in groups:
            first = next(place for place, block in enumerate(table) if not block.is_null)
            expect("SingleTypeKVCacheManager.num_cached_block of a load", first, known)
            partial[at] = first
        never_cache(manager, manager.kv_cache_config, request.request_id, partial)
        manager.cache_blocks(request, end)
        for at, _, table in groups:
            behind = partial[at] + 1
            cached = [place for place, block in enumerate(table) if block.block_hash is not None]
            before = [place for place in cached if place < behind]
            expect(f"{name}, before num_cached_block", [], before)
            if behind < len(table) and live.is_found:
                expect(f"{name}, the last block", len(table) - 1, cached[-1] if cached else None)


def _groups(live: Live, request_id: str, end: int) -> Iterator[tuple[int, Any, list[Any]]]:
    """Groups that can be pulled in part; a request's number of cached blocks, and its blocks."""
    for at, group in enumerate(live.manager.kv_cache_config.transfer_group_ids):
        one = live.managers[group]
        table = one.req_to_blocks[request_id][: end // one.block_size]
        is_held = any(not block.is_null for block in table)  # a chunk may just have ended
        if one in live.cached and not is_state(one.kv_cache_spec) and is_held:
            yield at, one.num_cached_block.get(request_id), table
