"""Threads that work a queue off, of which every task is answered whatever happens::

    put ──► queue ──► thread: worker(task)
                         │ an unexpected error
                         ▼
                      refuse(task)      and so every later task, after the third such error,
                                        or where a thread could not begin

So a request that waits for a task never waits for a thread that is no more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE = 3
"""Unexpected errors of one group of threads; then it refuses everything."""


class TaskThreads(Generic[T]):
    """Threads with a common queue.

    Args:
        name: of the threads.
        count: how many.
        begin: called on each thread; returns what does a task, and what frees its resources.
        refuse: answers a task that cannot be done; on any thread.
    """

    def __init__(
        self,
        name: str,
        count: int,
        begin: Callable[[], tuple[Callable[[T], None], Callable[[], None]]],
        refuse: Callable[[T], None],
    ) -> None:
        self._name, self._begin, self._refuse = name, begin, refuse
        self._tasks: deque[T] = deque()
        self._changed = threading.Condition()
        self._errors_left = _PATIENCE
        self._is_refusing = False
        self._is_closing = False
        self._count = count
        self._threads: list[threading.Thread] = []

    @property
    def is_refusing(self) -> bool:
        """Whether too many errors came: every task is refused from now on."""
        return self._is_refusing

    def start(self) -> None:
        """Start the threads; where the system has none left, tasks are refused."""
        for number in range(self._count):
            name = f"{self._name}-{number}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                log.exception("pdconn: store: no thread: name=%s", name)
                break
            self._threads.append(thread)

    def put(self, task: T) -> None:
        """Add a task at the end of the queue."""
        if not self._threads:
            self._refuse_safely(task)
            return
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def put_first(self, tasks: Sequence[T]) -> None:
        """Add tasks that come before all others, in order."""
        if not self._threads:
            for task in tasks:
                self._refuse_safely(task)
            return
        with self._changed:
            self._tasks.extendleft(reversed(tasks))
            self._changed.notify(len(tasks))

    def stop(self) -> None:
        """Let the tasks under way end, and drop the others."""
        with self._changed:
            self._is_closing = True
            self._tasks.clear()
            self._changed.notify_all()

    def join(self, deadline: float) -> bool:
        """After :meth:`stop`: whether all threads ended before ``deadline`` (monotonic, s)."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _all(self) -> Iterator[T]:
        while True:
            with self._changed:
                while not self._tasks and not self._is_closing:
                    self._changed.wait()
                if self._is_closing:
                    return
                task = self._tasks.popleft()
            yield task

    def _run(self) -> None:
        work: Callable[[T], None]
        try:
            work, end = self._begin()
        except BaseException:  # the outermost loop: tasks must be answered
            log.exception("pdconn: store: switched off on this rank: thread=%s", self._name)
            self._is_refusing = True
            work, end = self._refuse_safely, _nothing
        try:
            for task in self._all():
                if self._is_refusing:
                    self._refuse_safely(task)
                else:
                    self._do(work, task)
                del task
        finally:
            end()

    def _do(self, work: Callable[[T], None], task: T) -> None:
        try:
            work(task)
        except BaseException as error:  # the outermost loop: tasks must be answered
            log.exception("pdconn: store: a task failed: thread=%s", self._name)
            self._errors_left -= 1
            if self._errors_left <= 0 or not isinstance(error, Exception):
                self._is_refusing = True
                log.warning("pdconn: store: switched off on this rank: thread=%s", self._name)
            self._refuse_safely(task)

    def _refuse_safely(self, task: T) -> None:
        try:
            self._refuse(task)
        except BaseException:  # later tasks must be answered all the same
            log.exception("pdconn: store: a task was not refused: thread=%s", self._name)


def _nothing() -> None:
    """Frees nothing."""
