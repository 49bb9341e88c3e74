"""What leases pin in vLLM's block pool: a reference of our own for each block of each lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any


class LeaseKind(StrEnum):
    """What is lent: a whole prompt; a prefix; prompt and answer."""

    PROMPT = "prompt"
    PREFIX = "prefix"
    ANSWER = "answer"


class LeasePins:
    """Pinned blocks, by the request that is lent.  Only on the engine's thread."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._blocks: dict[str, list[Any]] = {}
        self._kinds: dict[str, LeaseKind] = {}
        self._leases_of: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._blocks

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._blocks.values())

    def has(self, kind: LeaseKind) -> bool:
        """Whether anything of this kind is lent."""
        return kind in self._kinds.values()

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned; one that several leases pin counts once."""
        return len(self._leases_of)

    def bind(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in."""
        self._pool = block_pool

    def pin(self, request_id: str, block_ids: Iterable[Iterable[int]], kind: LeaseKind) -> None:
        """Pin the blocks of a request that is lent, by group; holes are left out."""
        blocks = [self._pool.blocks[block] for ids in block_ids for block in ids if block]
        self._pool.touch(blocks)
        self._blocks[request_id], self._kinds[request_id] = blocks, kind
        self._leases_of.update(block.block_id for block in blocks)

    def unpin(self, request_id: str) -> None:
        """Its lease has ended.  Tail first, so that the head of a prefix stays cached longest."""
        blocks = self._blocks.pop(request_id)
        del self._kinds[request_id]
        for block in blocks:
            self._leases_of[block.block_id] -= 1
            if not self._leases_of[block.block_id]:
                del self._leases_of[block.block_id]
        self._pool.free_blocks(reversed(blocks))

    def unpin_all(self) -> None:
        """Every lease has ended."""
        for request_id in list(self._blocks):
            self.unpin(request_id)
