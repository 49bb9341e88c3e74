"""Tasks that outlive the request that started them.

``asyncio`` keeps only weak references to tasks, and reports a task's error when the task is
garbage-collected, if ever.  ``Background`` holds each task until it ends, logs its error at once,
and has none running after ``close``.
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
        """Start ``work``; returns False, without starting it, when ``limit`` tasks are running."""
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
            log.error("pdconn: background task failed task=%r", task.get_name(), exc_info=error)

    async def close(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for running tasks, then cancel the others.

        Work that is spawned afterwards does not run.
        """
        if self._tasks and grace_s > 0:
            await asyncio.wait(self._tasks, timeout=grace_s)
        self._limit = 0
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
