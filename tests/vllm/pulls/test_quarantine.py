"""Blocks under a read stay out of the pool until every rank's read is over."""

from __future__ import annotations

from pdconn.vllm.memory.quarantine import Quarantine


class Pool:
    """vLLM's block pool, as far as it matters: references, and what is free."""

    def __init__(self) -> None:
        self.blocks = [[number, 1] for number in range(8)]

    def touch(self, blocks: list[list[int]]) -> None:
        for block in blocks:
            block[1] += 1

    def free_blocks(self, blocks: object) -> None:
        for block in blocks:  # type: ignore[attr-defined]
            block[1] -= 1

    @property
    def free(self) -> list[int]:
        return [number for number, references in self.blocks if not references]


def test_blocks_are_free_once_the_engine_and_every_rank_are_done() -> None:
    pool, quarantine = Pool(), Quarantine()
    quarantine.bind_gpu_block_pool(pool)
    quarantine.keep_blocks("r", (3, 4))
    pool.free_blocks([pool.blocks[3], pool.blocks[4]])  # the engine is done with the request
    quarantine.keep_blocks("r", (3, 4))  # the second rank says so a step later
    assert pool.free == []
    quarantine.end_read("r")
    assert pool.free == []
    quarantine.end_read("r")
    assert pool.free == [3, 4]
    assert len(quarantine) == 0


def test_a_request_under_the_same_name_keeps_its_own_blocks() -> None:
    pool, quarantine = Pool(), Quarantine()
    quarantine.bind_gpu_block_pool(pool)
    for block in (1, 2):
        quarantine.keep_blocks("r", (block,))
        pool.free_blocks([pool.blocks[block]])
    quarantine.end_read("r")
    assert pool.free == []
    quarantine.end_read("r")
    assert pool.free == [1, 2]


def test_after_a_sleep_nothing_is_in_quarantine() -> None:
    pool, quarantine = Pool(), Quarantine()
    quarantine.bind_gpu_block_pool(pool)
    for request, block in (("a", 1), ("b", 2), ("b", 2)):
        quarantine.keep_blocks(request, (block,))
    pool.free_blocks([pool.blocks[1], pool.blocks[2]])
    quarantine.end_read("b")
    quarantine.end_all_reads()
    assert pool.free == [1, 2]
    assert len(quarantine) == 0
    quarantine.end_read("b")  # reported by a step that was in flight
    quarantine.keep_blocks("b", (3,))
    assert pool.free == [1, 2]
    pool.free_blocks([pool.blocks[3]])
    assert pool.free == [1, 2], "a read of before the sleep does not count"
    quarantine.end_read("b")
    assert pool.free == [1, 2, 3]
