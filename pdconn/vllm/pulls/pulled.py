"""What pulls leave in vLLM's cache: blocks written in part, blocks still written to, answers.

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
    """Keeps what was pulled into the engine's blocks true for others that find them.

    Attributes:
        quarantine: blocks that a read can still write to.
        completes_windows: whether a pull completes hits that windows do not reach.
        answers: caches windows of requests that end; None before the manager is taken.
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
            pulled_until: see :func:`~pdconn.vllm.patches.pool.local_hits.complete_windows`.
        """
        self._manager = manager
        self.completes_windows = complete_windows(manager, pulled_until)
        self.answers = AnswerWindows.of(manager, manager.max_model_len)

    def mark_partial(self, request_id: str, blocks: PartialBlocks) -> None:
        """A pull wrote only the end of these blocks; vLLM has not heard yet that it is over."""
        if self._manager is not None:
            never_cache(self._manager, self._manager.kv_cache_config, request_id, blocks)
        if self.answers is not None:
            self.answers.mark_partial(request_id, blocks)

    def keep_answer(self, request: Any, num_computed: int) -> None:
        """A request is about to leave; ``num_computed`` tokens were computed, or 0 if it failed."""
        if self.answers is not None:
            self.answers.keep_answer(request, num_computed)
