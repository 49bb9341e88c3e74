"""Block tables of one request on an engine that does not exist.

Real caches are fragmented: block ids of a request are scattered over the pool, and
neighbours in the sequence are seldom neighbours in memory.  That is the default; ids in
ascending order are what an empty engine gives its first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pdconn.forecast.grouping import Group
from pdconn.planning.plan import window_start
from pdconn.protocol.ticket import BlockList

Ids = Literal["random", "contiguous"]


@dataclass(frozen=True, slots=True)
class Tables:
    """A block list per group, and the blocks of the pool they are taken from."""

    num_blocks: int
    lists: tuple[BlockList, ...]


def block_tables(groups: Sequence[Group], until: int, ids: Ids, seed: int) -> Tables:
    """Blocks that an engine keeps for tokens ``[0, until)``, without those before a window.

    The pool is twice what the request needs.  Id 0 is vLLM's null block and never used.
    """
    spans = [_span(group, until) for group in groups]
    needed = sum(count for _, count in spans)
    pool = np.arange(1, 2 * needed + 1, dtype=np.int64)
    if ids == "random":
        np.random.default_rng(seed).shuffle(pool)
    lists, used = [], 0
    for first, count in spans:
        lists.append(BlockList(first, tuple(pool[used : used + count].tolist())))
        used += count
    return Tables(2 * needed + 1, tuple(lists))


def _span(group: Group, until: int) -> tuple[int, int]:
    """First block that a token to come still reads, and how many there are from it on."""
    first = window_start(group.header, until) // group.block_tokens
    return first, max(0, -(-until // group.block_tokens) - first)
