"""Work that outlives the request that started it, in one place that drains.

``asyncio`` forgets a task that nobody holds, and reports its error when it is
collected, if ever.  Here a task is held until it ends, its error is logged when
it happens, and closing leaves none behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

log = logging.getLogger(__name__)


class Background:
    """A bounded set of running tasks."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[None, None, None], name: str) -> bool:
        """Run work; False, and nothing runs, when there is too much already."""
        if len(self._tasks) >= self._limit:
            work.close()
            return False
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("background task %s failed", task.get_name(), exc_info=error)

    async def close(self, grace_s: float) -> None:
        """Let tasks end by themselves for a while, then cancel what is left.

        What is spawned from here on does not run.
        """
        if self._tasks and grace_s > 0:
            await asyncio.wait(self._tasks, timeout=grace_s)
        self._limit = 0
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
