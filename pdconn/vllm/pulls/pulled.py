"""vLLM's cache after pulls: blocks written in part, quarantined blocks, answers.

Only on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdconn.vllm.blocks.partial import PartialBlocks
from pdconn.vllm.memory.quarantine import Quarantine
from pdconn.vllm.patches.pool.answer_windows import AnswerWindows
from pdconn.vllm.patches.pool.local_hits import complete_windows
from pdconn.vllm.patches.pool.uncached_blocks import never_cache


class PulledBlocks:
    """Keeps blocks that were not pulled completely out of vLLM's cache.

    Attributes:
        quarantine: blocks that a read can still write to.
        completes_windows: whether a pull completes local hits that windows do not have.
        answers: caches windows of finished requests; None before the manager is bound.
    """

    def __init__(self) -> None:
        self.quarantine = Quarantine()
        self.completes_windows = False
        self._manager: Any = None
        self.answers: AnswerWindows | None = None

    def use_manager(self, manager: Any, pulled_until: Callable[[Any], int]) -> None:
        """Take vLLM's ``KVCacheManager``.

        Args:
            manager: before any request.
            pulled_until: for :func:`~pdconn.vllm.patches.pool.local_hits.complete_windows`.
        """
        self._manager = manager
        self.completes_windows = complete_windows(manager, pulled_until)
        self.answers = AnswerWindows.from_manager(manager, manager.max_model_len)

    def mark_partial(self, request_id: str, blocks: PartialBlocks) -> None:
        """A pull has written only the end of these blocks.  Call it before vLLM caches them."""
        if self._manager is not None:
            never_cache(self._manager, self._manager.kv_cache_config, request_id, blocks)
        if self.answers is not None:
            self.answers.mark_partial(request_id, blocks)

    def keep_answer(self, request: Any, num_computed: int) -> None:
        """Cache the windows of a finished request that has computed ``num_computed`` tokens."""
        if self.answers is not None:
            self.answers.keep_answer(request, num_computed)
