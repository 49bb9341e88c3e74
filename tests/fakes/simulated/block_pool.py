"""vLLM's own block pool, of an engine without requests: what is pinned in it is what we pin."""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.core.block_pool import BlockPool


class CountedPool(BlockPool):  # type: ignore[misc]
    """A pool that knows what is pinned.

    Attributes:
        freed: blocks that were given back, one by one, in this order.
    """

    def __init__(self, num_blocks: int = 16) -> None:
        super().__init__(num_blocks, enable_caching=True, hash_block_size=16)
        self.freed: list[int] = []

    def free_blocks(self, ordered_blocks: Any) -> None:
        """As vLLM's."""
        blocks = list(ordered_blocks)
        self.freed += [block.block_id for block in blocks]
        super().free_blocks(blocks)

    def pinned(self) -> list[int]:
        """Blocks with references."""
        return [block.block_id for block in self.blocks if block.ref_cnt]
