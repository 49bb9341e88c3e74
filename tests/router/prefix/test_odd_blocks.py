"""Block sizes that no engine would have cost their own pod its hits, and other pods nothing."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np

from pdconn.router.prefix.block_index import Index
from pdconn.router.prefix.ends import covered
from pdconn.router.prefix.groups import STORED, GroupSpec
from pdconn.router.prefix.kv_events import MAX_BLOCK_TOKENS
from pdconn.router.prefix.score import Prompt, Scorer

BLOCK = 16
HASHES = list(range(1, 5))


def test_a_pod_whose_hits_end_nowhere_leaves_others_theirs() -> None:
    """Its blocks have a common multiple beyond 64 bits, and rows in a store."""
    index = Index()
    for name in ("odd", "plain"):
        index.add_pod(name)
    sizes = [MAX_BLOCK_TOKENS - BLOCK * odd for odd in (1, 3, 5, 7, 9)]
    assert math.lcm(*sizes) > 1 << 64
    for group, size in enumerate(sizes):
        index.learn_group("odd", group, GroupSpec("full_attention", None, size))
    index.learn_row("odd", 64)
    index.store_blocks("odd", 0, STORED, HASHES)
    index.learn_group("plain", 0, GroupSpec("full_attention", None, BLOCK))
    index.store_blocks("plain", 0, "gpu", HASHES)
    hits = Scorer(index).score(Prompt(HASHES, 100, BLOCK))
    assert (hits["odd"].blocks, hits["plain"].blocks) == (0, len(HASHES))


def test_a_long_block_costs_no_more_than_the_prompt() -> None:
    held = np.array([0, 3, 0, 1, 0], np.uint64)
    tracemalloc.start()
    found = covered(held, MAX_BLOCK_TOKENS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tolist() == [3, 3, 1, 1, 0]
    assert peak < 1 << 16
    assert covered(held[:0], MAX_BLOCK_TOKENS).tolist() == []
