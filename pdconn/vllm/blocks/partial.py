"""Blocks of windows of which a pull wrote only the end: no other request may use them.

A pull brings of a window what decode's last token attends to.  Where the lender's blocks are
smaller, or kernel blocks are handed over, that begins within a block of ours::

    our blocks of 64              |       4       |       5       |       6       | 7
    their blocks of 16            |   |   |   |   |   |   |   |   |   |   |   |   |
    pulled, window 190                        ###################################### up to 493
    attended to at 448 (7 * 64)    ...............................................

vLLM caches block 4 by its hash all the same, as a whole.  A later prompt that shares 448 tokens
would hit, and attend to rows before the pulled ones, which nobody wrote.  So such a block is
never found (:mod:`pdconn.vllm.patches.pool.uncached_blocks`), nor is it saved to a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PartialBlocks = dict[int, int]
"""By transferred group the number of the block, counted from the prompt's beginning."""


def block_tokens(config: Any) -> list[int]:
    """Tokens of the engine's blocks, by transferred group; ``config`` is vLLM's."""
    return [group.kv_cache_spec.block_size for group in config.transfer_groups]


def partial_blocks(begins: Iterable[tuple[int, int]], sizes: Sequence[int]) -> PartialBlocks:
    """The blocks of which only the end is written.

    Args:
        begins: groups, and the first token that is written of each.
        sizes: tokens of the engine's blocks, by group.

    >>> partial_blocks([(0, 304), (1, 320)], [64, 64])
    {0: 4}
    """
    return {group: token // sizes[group] for group, token in begins if token % sizes[group]}


def joined(
    ours: Mapping[str, PartialBlocks], theirs: Mapping[str, PartialBlocks]
) -> dict[str, PartialBlocks]:
    """What two workers tell of their requests; ranks of one stage tell the same."""
    return {
        request: {**ours.get(request, {}), **theirs.get(request, {})}
        for request in {**ours, **theirs}
    }
