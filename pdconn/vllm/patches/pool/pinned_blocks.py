"""Blocks that are pinned in vLLM's block pool, by a reference of our own.

vLLM reuses a block once its last reference is dropped.  It has no hook by which a connector keeps
blocks of a finished request, other than to keep the request, for which the engine goes on stepping.
So leases, saves, prefixes, promises and quarantined reads hold references, like another request
that hits the same blocks::

    free list      1 2 3 4 5 6 …        ref_cnt of 2 and 3
    a request      1 · · 4 5 6          1
    pin 2 3        1 · · 4 5 6          2
    its end        1 · · 4 5 6          1       without the pin they would be free now
    unpin 3 2      … 3 2 … or at the end, as long as they are found by their hashes

Nothing is replaced.  A block's number is its index in ``BlockPool.blocks``.

Read: ``KVCacheManager.get_block_ids``, ``BlockPool.blocks``, ``touch``, ``free_blocks``,
``get_num_free_blocks``, ``num_gpu_blocks`` and ``KVCacheBlock.ref_cnt``.
Checked at the start by :func:`check_pins`.  Tested by ``tests/vllm/lends/test_pins.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pdconn.vllm.patches.live import Live, expect

SOURCES = {
    "vllm.v1.core.block_pool:BlockPool.touch": (752, 792),
    "vllm.v1.core.block_pool:BlockPool.free_blocks": (774, 816),
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": (868, 912),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": (176, 162),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": (727, 736),
}


def block_ids_of(manager: Any, request_id: str) -> tuple[list[int], ...]:
    """Block ids of a request that has been scheduled, by group of the engine; 0 is a hole."""
    ids: tuple[list[int], ...] = manager.get_block_ids(request_id)
    return ids


def pin_blocks(pool: Any, numbers: Iterable[int]) -> list[Any]:
    """Take a reference to each of these blocks, which must be in use, or not reused yet."""
    blocks = [pool.blocks[number] for number in numbers]
    pool.touch(blocks)
    return blocks


def unpin_blocks(pool: Any, blocks: Sequence[Any]) -> None:
    """Drop these references: tail first, so that the head of a prefix stays cached longest."""
    pool.free_blocks(reversed(blocks))


class NumberedPins:
    """Pinned blocks, under numbers that their owner gives: of a save, or of a promise.

    Attributes:
        pool: vLLM's block pool.
        num_blocks: blocks pinned; one that several numbers pin counts for each.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self.num_blocks = 0
        self._pinned: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._pinned)

    def pin_blocks(self, number: int, ids: Iterable[int]) -> None:
        """Pin these blocks under ``number``, under which nothing is pinned."""
        blocks = pin_blocks(self.pool, ids)
        self._pinned[number] = blocks
        self.num_blocks += len(blocks)

    def unpin_blocks(self, number: int) -> None:
        """Unpin the blocks of ``number``.  Idempotent."""
        blocks = self._pinned.pop(number, None)
        if blocks is not None:
            self.num_blocks -= len(blocks)
            unpin_blocks(self.pool, blocks)

    def unpin_all(self) -> None:
        """Unpin the blocks of every number."""
        for number in list(self._pinned):
            self.unpin_blocks(number)


def is_used_by_others(pool: Any, pinned: Iterable[Iterable[Any]]) -> bool:
    """Whether a block has references besides these pins; then vLLM refuses a reset."""
    counts = Counter(block.block_id for held in pinned for block in held)
    used = pool.num_gpu_blocks - pool.get_num_free_blocks()
    is_shared = any(pool.blocks[block].ref_cnt > count for block, count in counts.items())
    return bool(is_shared or used - 1 > len(counts))  # the null block is always in use


def check_pins(live: Live) -> None:
    """Check that a pinned block stays in use after its request's end, until it is unpinned.

    Raises:
        ConfigError: naming the pool's method that works differently.
    """
    pool = live.pool
    expect("null block", (0, True), (pool.null_block.block_id, pool.null_block.is_null))
    free = pool.get_num_free_blocks()
    with live.computed_request(live.tokens) as request:
        numbers = [block.block_id for block in live.blocks(request)]
        expect("BlockPool.get_num_free_blocks", free - len(numbers), pool.get_num_free_blocks())
        listed = block_ids_of(live.manager, request.request_id)
        found = sorted(block for ids in listed for block in ids if block)
        expect("KVCacheManager.get_block_ids", sorted(numbers), found)
        pinned = pin_blocks(pool, numbers)
        expect("BlockPool.blocks", numbers, [block.block_id for block in pinned])
        expect("BlockPool.touch", {2}, {block.ref_cnt for block in pinned})
        expect("KVCacheBlock.ref_cnt", True, is_used_by_others(pool, [pinned]))
    expect("BlockPool.touch", free - len(numbers), pool.get_num_free_blocks())
    name = "BlockPool.get_num_free_blocks, of num_gpu_blocks: used by others than us"
    expect(name, False, is_used_by_others(pool, [pinned]))
    unpin_blocks(pool, pinned)
    expect("BlockPool.free_blocks", free, pool.get_num_free_blocks())
