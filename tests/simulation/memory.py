"""KV memory of a simulated rank, every cell labelled with what it must hold.

A cell is one token of one head of one layer, eight bytes: request, block position, head,
layer and token in one number, so that any byte in a wrong place is seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    build_kv_cache_references,
)
from tests.fakes.layouts import layout_memory

HEADS = 2
LAYERS = ("a", "b")
BLOCK_TOKENS = 2
_AXES = {"B": 0, "L": 1, "H": 2, "N": 3}


class Memory:
    """``num_blocks`` blocks of heads ``first_head`` to ``first_head + num_heads - 1``."""

    def __init__(self, layout: str, num_blocks: int, first_head: int, num_heads: int) -> None:
        sizes = {"B": num_blocks, "L": len(LAYERS), "H": num_heads, "N": BLOCK_TOKENS}
        order = layout[:-1]
        self.raw = np.zeros(tuple(sizes[axis] for axis in order), dtype=np.uint64)
        self.cells: NDArray[np.uint64] = self.raw.transpose(*(order.index(axis) for axis in _AXES))
        """Shape (blocks, layers, heads, tokens), whatever the layout."""
        self.first_head = first_head
        self.references: KVCacheReferences = build_kv_cache_references(
            [
                GroupMemory(
                    AttentionKind.FULL,
                    None,
                    BLOCK_TOKENS,
                    layout_memory(
                        layout,
                        base=self.raw.ctypes.data,
                        num_blocks=num_blocks,
                        layers=LAYERS,
                        num_heads=num_heads,
                        block_tokens=BLOCK_TOKENS,
                        token_nbytes=8,
                        first_head=first_head,
                    ),
                )
            ]
        )

    def content(self, number: int, position: int) -> NDArray[np.uint64]:
        """What block ``position`` of request ``number`` holds here: (layers, heads, tokens)."""
        _, layers, heads, tokens = self.cells.shape
        made = np.uint64(number << 32 | position << 16)
        made = made + (np.arange(layers, dtype=np.uint64)[:, None, None] << np.uint64(12))
        head = np.arange(self.first_head, self.first_head + heads, dtype=np.uint64)
        made = made + (head[None, :, None] << np.uint64(8))
        return made + np.arange(tokens, dtype=np.uint64)[None, None, :]

    def write_token(self, number: int, at: int, block: int) -> None:
        """Compute token ``at`` of request ``number`` into its ``block``."""
        within = at % BLOCK_TOKENS
        self.cells[block, ..., within] = self.content(number, at // BLOCK_TOKENS)[..., within]

    def holds_token(self, number: int, at: int, block: int) -> bool:
        """Whether ``block`` holds token ``at`` of request ``number``."""
        within = at % BLOCK_TOKENS
        expected = self.content(number, at // BLOCK_TOKENS)[..., within]
        return bool((self.cells[block, ..., within] == expected).all())

    def write(self, number: int, blocks: tuple[int, ...]) -> None:
        """Compute request ``number`` into ``blocks``."""
        for position, block in enumerate(blocks):
            self.write_block(number, position, block)

    def write_block(self, number: int, position: int, block: int) -> None:
        """Compute block ``position`` of request ``number`` into ``block``."""
        self.cells[block] = self.content(number, position)

    def holds(self, number: int, blocks: tuple[int, ...]) -> bool:
        """Whether ``blocks`` hold exactly request ``number``."""
        return all(
            bool((self.cells[block] == self.content(number, position)).all())
            for position, block in enumerate(blocks)
        )
