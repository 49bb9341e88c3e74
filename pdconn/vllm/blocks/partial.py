"""Blocks of windows of which a pull has written only the end: no other request may use them.

Of a window a pull reads what decode's last token attends to.  If the lender's blocks are smaller,
or kernel blocks are handed over, that begins within a block of ours::

    our blocks of 64              |       4       |       5       |       6       | 7
    their blocks of 16            |   |   |   |   |   |   |   |   |   |   |   |   |
    pulled, window 190                        ###################################### up to 493
    attended to at 448 (7 * 64)    ...............................................

vLLM would cache block 4 by its hash, as a whole.  A later prompt that shares 448 tokens would hit
it, and attend to rows before the pulled ones, which were never written.  So such a block is not
cached (:mod:`pdconn.vllm.patches.pool.uncached_blocks`), and not saved to a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PartialBlocks = dict[int, int]
"""By transferred group, the index of the block from the beginning of the prompt."""


def block_tokens(config: Any) -> list[int]:
    """Tokens of the engine's blocks, by transferred group; ``config`` is vLLM's."""
    return [group.kv_cache_spec.block_size for group in config.transfer_groups]


def partial_blocks(begins: Iterable[tuple[int, int]], sizes: Sequence[int]) -> PartialBlocks:
    """The blocks of which only the end is written.

    Args:
        begins: groups, and the first token that is written in each.
        sizes: tokens of the engine's blocks, by group.

    >>> partial_blocks([(0, 304), (1, 320)], [64, 64])
    {0: 4}
    """
    return {group: token // sizes[group] for group, token in begins if token % sizes[group]}


def joined(
    ours: Mapping[str, PartialBlocks], theirs: Mapping[str, PartialBlocks]
) -> dict[str, PartialBlocks]:
    """The union of two workers' reports; ranks of one stage report the same."""
    return {
        request: {**ours.get(request, {}), **theirs.get(request, {})}
        for request in {**ours, **theirs}
    }
