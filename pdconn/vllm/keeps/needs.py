"""How many blocks requests lack: those that were not admitted, and those that run.

vLLM allocates blocks in its own code, before a connector hears of a step.  So after each step this
counts what the next one needs::

    asked, and not admitted        its whole sequence, less what its session keeps already; nothing
                                   if that is more than promises can give, and requests run
    running                        the rest of its prompt, as far as a step goes; or one token more

Both are upper bounds, so a request that runs is not preempted for the sake of kept blocks, and one
that waits is admitted in the next step if giving up promises can do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pdconn.vllm.patches.pool.admitted_blocks import (
    block_sizes,
    blocks_for,
    num_free_blocks,
)

_MOST_SAMPLED = 16
"""Tokens that a request which has its prompt computes in a step: one, and drafts."""

WAITS_S = 1.0
"""A request that waits for so long lacks a block, though by this count it does not."""


class BlockNeeds:
    """Requests of one engine that need blocks.

    Attributes:
        manager: vLLM's ``KVCacheManager``.
    """

    def __init__(self) -> None:
        self.manager: Any = None
        self._asked: dict[str, int] = {}
        self._running: dict[str, Any] = {}
        self._waits_since = math.inf

    def __len__(self) -> int:
        """Known requests; 0 when the engine is idle."""
        return len(self._asked) + len(self._running)

    def note_asked(self, request: Any) -> None:
        """Note a request for which vLLM allocates blocks next, if there are enough."""
        self._asked[request.request_id] = int(request.num_tokens)

    def note_admitted(self, request: Any) -> None:
        """Note that a request has blocks."""
        self._asked.pop(request.request_id, None)
        self._running[request.request_id] = request
        self._waits_since = math.inf

    def note_finished(self, request_id: str) -> None:
        """Forget a request that leaves the engine."""
        self._asked.pop(request_id, None)
        self._running.pop(request_id, None)

    def forget_asked(self) -> None:
        """Forget the requests that were not admitted in a step: no promise can give way to them."""
        self._asked.clear()
        self._waits_since = math.inf

    def take_lacking(
        self, counts: Mapping[str, int], now: float, num_kept: int, kept_for: Callable[[str], int]
    ) -> int:
        """Blocks that promises are to give up after a step; 0 or less for none.

        Args:
            counts: tokens of the step, by request.
            now: in seconds.
            num_kept: blocks that promises keep.
            kept_for: returns the blocks that are kept for the session of a request.
        """
        free, total = num_free_blocks(self.manager), sum(counts.values())
        lacking = self._growth(counts, total, free) - free
        asked, self._asked = self._asked, {}
        if not asked:
            return lacking
        short = max(
            blocks_for(self.manager, num_tokens) - kept_for(request_id) - free
            for request_id, num_tokens in asked.items()
        )
        self._waits_since = min(self._waits_since, now)
        # 1. Nothing else can run.
        if not total:
            return max(lacking, short, 1)
        # 2. Promises can give what it lacks.  Otherwise requests that run have to end first.
        if 0 < short <= num_kept:
            return max(lacking, short)
        # 3. By this count it lacks nothing, but vLLM reserves blocks for others.
        if short <= 0 and now - self._waits_since >= WAITS_S:
            self._waits_since = now
            return max(lacking, 1)
        return lacking

    def _growth(self, counts: Mapping[str, int], total: int, free: int) -> int:
        """Blocks that running requests need in the next step, at most."""
        sizes = block_sizes(self.manager)
        most = sum(len(counts) + total // size for size in sizes)
        if most <= free:  # nearly always
            return most
        growth = 0
        for request_id, count in counts.items():
            request = self._running.get(request_id)
            after = count if request is None else int(request.num_computed_tokens) + count
            left = 0 if request is None else int(request.num_tokens) - after
            further = after + (min(left, total) if left > 0 else min(count, _MOST_SAMPLED))
            growth += sum(-(-further // size) - -(-after // size) for size in sizes)
        return growth
