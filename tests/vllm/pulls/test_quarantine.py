"""Blocks under a read stay out of the pool until every rank's read is over."""

from __future__ import annotations

from pdconn.vllm.memory.quarantine import Quarantine
from tests.fakes.simulated.block_pool import CountedPool


def used_pool() -> CountedPool:
    """A pool of which the engine uses all blocks."""
    pool = CountedPool(8)
    pool.get_new_blocks(pool.get_num_free_blocks())
    return pool


def free(pool: CountedPool) -> list[int]:
    return [block.block_id for block in pool.blocks[1:] if not block.ref_cnt]


def test_blocks_are_free_once_the_engine_and_every_rank_are_done() -> None:
    pool, quarantine = used_pool(), Quarantine()
    quarantine.bind_gpu_block_pool(pool)
    quarantine.keep_blocks("r", (3, 4))
    pool.free_blocks([pool.blocks[3], pool.blocks[4]])  # the engine is done with the request
    quarantine.keep_blocks("r", (3, 4))  # the second rank says so a step later
    assert free(pool) == []
    quarantine.end_read("r")
    assert free(pool) == []
    quarantine.end_read("r")
    assert free(pool) == [3, 4]
    assert len(quarantine) == 0


def test_a_request_under_the_same_name_keeps_its_own_blocks() -> None:
    pool, quarantine = used_pool(), Quarantine()
    quarantine.bind_gpu_block_pool(pool)
    for block in (1, 2):
        quarantine.keep_blocks("r", (block,))
        pool.free_blocks([pool.blocks[block]])
    quarantine.end_read("r")
    assert free(pool) == []
    quarantine.end_read("r")
    assert free(pool) == [1, 2]


def test_after_a_sleep_nothing_is_in_quarantine() -> None:
    pool, quarantine = used_pool(), Quarantine()
    quarantine.bind_gpu_block_pool(pool)
    for request, block in (("a", 1), ("b", 2), ("b", 2)):
        quarantine.keep_blocks(request, (block,))
    pool.free_blocks([pool.blocks[1], pool.blocks[2]])
    quarantine.end_read("b")
    quarantine.end_all_reads()
    assert free(pool) == [1, 2]
    assert len(quarantine) == 0
    quarantine.end_read("b")  # reported by a step that was in flight
    quarantine.keep_blocks("b", (3,))
    assert free(pool) == [1, 2]
    pool.free_blocks([pool.blocks[3]])
    assert free(pool) == [1, 2], "a read of before the sleep does not count"
    quarantine.end_read("b")
    assert free(pool) == [1, 2, 3]
