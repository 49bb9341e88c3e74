"""Block tables of requests on an engine shape.

Real caches are fragmented: block ids of a request are scattered over the pool, and neighbours in
the sequence are seldom neighbours in memory.  That is the default.  Ascending ids are those of the
first request of an empty engine, and runs those after whole requests were freed::

    random      17  3 40  9 22 ...
    runs        16 17 18 ... 23 | 40 41 ... 47 | 8 9 ...
    contiguous   1  2  3  4  5 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pdconn.planning.plan import window_start
from pdconn.protocol.ticket import BlockList
from pdconn.tools.plan.grouping import LayerGroup
from registration.references import AttentionKind

Ids = Literal["random", "runs", "contiguous"]
IDS: tuple[Ids, ...] = get_args(Ids)

RUN_BLOCKS = 8
"""Blocks in a run of ``runs``."""


@dataclass(frozen=True, slots=True)
class Tables:
    """A block list per group, and the number of blocks in the pool."""

    num_blocks: int
    lists: tuple[BlockList, ...]


def block_tables(groups: Sequence[LayerGroup], until: int, ids: Ids, seed: int) -> Tables:
    """Blocks that an engine keeps for tokens ``[0, until)``, without those before a window.

    The pool has twice the blocks of the request.  Id 0, vLLM's null block, is never used.
    """
    return tables_of_requests(groups, until, ids, seed, 1)[0]


def tables_of_requests(
    groups: Sequence[LayerGroup], until: int, ids: Ids, seed: int, requests: int
) -> list[Tables]:
    """``block_tables`` for ``requests`` requests that share a pool and no block."""
    spans = [_span(group, until) for group in groups]
    needed = requests * sum(count for _, count in spans)
    num_blocks, pool = _pool(needed, ids, seed)
    made, used = [], 0
    for _ in range(requests):
        lists = []
        for first, count in spans:
            lists.append(BlockList(first, tuple(pool[used : used + count].tolist())))
            used += count
        made.append(Tables(num_blocks, tuple(lists)))
    return made


def _pool(needed: int, ids: Ids, seed: int) -> tuple[int, NDArray[np.int64]]:
    """Size of a pool of at least twice ``needed`` blocks, and its ids in order of allocation."""
    length = RUN_BLOCKS if ids == "runs" else 1
    pool = np.arange(1, -(-2 * needed // length) * length + 1, dtype=np.int64)
    if ids != "contiguous":
        runs = pool.reshape(-1, length)
        np.random.default_rng(seed).shuffle(runs)
        pool = runs.ravel()
    return len(pool) + 1, pool


def _span(group: LayerGroup, until: int) -> tuple[int, int]:
    """First block that the next token still reads, and the number of blocks from there.

    Of a state only the last block, which holds everything before it.
    """
    if group.kind is AttentionKind.STATE:
        return max(0, until - 1) // group.block_tokens, 1
    first = window_start(group.header, until) // group.block_tokens
    return first, max(0, -(-until // group.block_tokens) - first)
