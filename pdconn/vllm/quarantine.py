"""Blocks of decode that a read can still write to, although their request is over.

A read cannot be cancelled.  When it hangs (a stopped peer, a lost route), its request is
reported failed after a while, and the engine frees the request's blocks; a reference of our
own keeps them out of the pool until every rank's read has settled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)


class Quarantine:
    """Pins blocks in vLLM's block pool.  Only on the engine's thread."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._blocks: dict[str, list[Any]] = {}
        self._ranks: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def bind(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in."""
        self._pool = block_pool

    def begin(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A rank can still write to these blocks, before the engine frees them."""
        self._ranks[request_id] = self._ranks.get(request_id, 0) + 1
        if request_id in self._blocks:
            return
        self._blocks[request_id] = [self._pool.blocks[block] for block in block_ids]
        self._pool.touch(self._blocks[request_id])
        log.warning("pdconn: %d blocks of %s are quarantined", len(block_ids), request_id)

    def end(self, request_id: str) -> None:
        """A rank cannot write to them any more."""
        self._ranks[request_id] -= 1
        if self._ranks[request_id] == 0:
            del self._ranks[request_id]
            self._pool.free_blocks(reversed(self._blocks.pop(request_id)))
            log.warning("pdconn: blocks of %s are out of quarantine", request_id)
