"""Blocks of decode to which a read can still write, although their request has failed.

A read cannot be cancelled.  When it hangs (a stopped peer, a lost route), its request is reported
failed after ``drain_timeout``, and vLLM frees the request's blocks; a reference of our own keeps
them out of the pool until every rank's read has settled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pdconn.vllm.patches.pool.pinned_blocks import pin_blocks, unpin_blocks

log = logging.getLogger(__name__)


class Quarantine:
    """Pins blocks in vLLM's block pool.  Only on the engine's thread."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._held: dict[str, list[list[Any]]] = {}
        self._ended: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in."""
        self._pool = block_pool

    def keep_blocks(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Pin blocks to which a rank's read can still write.  Call it before vLLM frees them."""
        blocks = pin_blocks(self._pool, block_ids)
        self._held.setdefault(request_id, []).append(blocks)
        log.warning("pdconn: blocks quarantined: request=%s blocks=%d", request_id, len(blocks))

    def end_read(self, request_id: str) -> None:
        """Record that a rank's read has settled; the last one unpins the blocks."""
        if request_id not in self._held:
            return  # the report of a step in flight, while the engine has slept
        self._ended[request_id] = self._ended.get(request_id, 0) + 1
        if self._ended[request_id] < len(self._held[request_id]):
            return
        self._release(request_id)

    def end_all_reads(self) -> None:
        """Unpin all blocks: a worker sleeps only once no read can write.

        Reports of reads that settled just before are lost with the worker's puller.
        """
        for request_id in list(self._held):
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        self._ended.pop(request_id, None)
        for blocks in self._held.pop(request_id):
            unpin_blocks(self._pool, blocks)
        log.warning("pdconn: blocks released from quarantine: request=%s", request_id)
