"""The threads of a rank's store: each works tasks off, and every task is answered whatever happens.

::

    RankStore ── task ──► inbox ──► TaskLoop: work(task) ── TaskReport ──► RankStore
                                       │ an unexpected error
                                       ▼
                                    refuse(task)      and so every later task, after the third such
                                                      error, or where the thread could not begin

So a request that waits for a task never waits for a thread that is no more.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar

from pdconn.sidechannel.quiet_log import QuietLog
from pdconn.store.commands import SaveFailed, SaveResult
from pdconn.store.rank.staging import HostArea
from pdconn.store.settings import REPEAT_S
from pdconn.threads import Box

log = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE = 3
"""Unexpected errors of a thread; then it refuses everything."""


class Problem(Enum):
    """Why a row is not in staging; left out are rows of dropped fetches, which are not tried."""

    MISSING = auto()
    DAMAGED = auto()
    LEFT_OUT = auto()


@dataclass(frozen=True, slots=True)
class RowTried:
    """Row ``place`` of fetch ``number`` was read, or why not."""

    number: int
    place: int
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class FetchRefused:
    """No row of fetch ``number`` will be tried: all are missing."""

    number: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rows of ``request`` are in its blocks."""

    request: str


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The blocks of ``request`` do not hold what they should."""

    request: str


@dataclass(frozen=True, slots=True)
class StagingReady:
    """The staging area is there: further readers may begin."""

    staging: HostArea


@dataclass(frozen=True, slots=True)
class SwitchedOff:
    """The thread ``name`` refuses everything from now on."""

    name: str


Answer = (
    RowTried
    | FetchRefused
    | Loaded
    | LoadFailed
    | StagingReady
    | SwitchedOff
    | SaveResult
    | SaveFailed
)


@dataclass(frozen=True, slots=True)
class TaskReport:
    """An answer, if there is one, and what was counted since the last report of the thread."""

    answer: Answer | None
    counts: dict[str, int]


class TaskReports:
    """One thread's end of the outbox: answers, counts, few warnings."""

    def __init__(self, outbox: Box[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._outbox = outbox
        self._warnings = QuietLog(log, clock, pause_s=REPEAT_S)
        self._counts: Counter[str] = Counter()

    def answer(self, answer: Answer, *, quietly: bool = False) -> None:
        """Put an answer; ``quietly`` where the engine waits for others with it."""
        report = TaskReport(answer, self._take_counts())
        (self._outbox.put_quietly if quietly else self._outbox.put)(report)

    def count(self, **counts: int) -> None:
        """Add to what the next report says."""
        self._counts.update(counts)

    def report_counts(self) -> None:
        """Put what no answer has carried."""
        if self._counts:
            self._outbox.put_quietly(TaskReport(None, self._take_counts()))

    def warn(self, text: str, *values: object) -> None:
        """Log a warning; each text at most once in ``REPEAT_S``."""
        self._warnings.warning(f"pdconn: store: {text}", *values)

    def _take_counts(self) -> dict[str, int]:
        counts = dict(self._counts)
        self._counts.clear()
        return counts


class TaskLoop(Generic[T]):
    """What one thread does.

    Args:
        name: the thread's.
        inbox: tasks; other threads may take of it, too.
        reports: the thread's own.
        begin: called on the thread; returns what does a task, and what frees its resources.
        refuse: answers a task that cannot be done.
    """

    def __init__(
        self,
        name: str,
        inbox: Box[T],
        reports: TaskReports,
        *,
        begin: Callable[[], tuple[Callable[[T], None], Callable[[], None]]],
        refuse: Callable[[T], None],
    ) -> None:
        self._name, self._inbox, self._reports = name, inbox, reports
        self._begin, self._refuse = begin, refuse
        self._errors_left = _PATIENCE
        self._work: Callable[[T], None] = self._refuse_safely
        self._end: Callable[[], None] = _nothing

    def run(self) -> None:
        """Do tasks until the inbox is closed; those that are in it then are dropped."""
        try:
            self._work, self._end = self._begin()
        except BaseException:  # the outermost loop: tasks must be answered
            log.exception("pdconn: store: switched off on this rank: thread=%s", self._name)
            self._switch_off()
        try:
            while not self._inbox.is_closed and (task := self._inbox.take_one()) is not None:
                self._do(self._work if self._errors_left > 0 else self._refuse_safely, task)
                self._reports.report_counts()
                del task
        finally:
            self._end()

    def _do(self, work: Callable[[T], None], task: T) -> None:
        try:
            work(task)
        except BaseException as error:  # the outermost loop: tasks must be answered
            log.exception("pdconn: store: a task failed: thread=%s", self._name)
            self._errors_left -= 1
            if self._errors_left <= 0 or not isinstance(error, Exception):
                log.warning("pdconn: store: switched off on this rank: thread=%s", self._name)
                self._switch_off()
            self._refuse_safely(task)

    def _switch_off(self) -> None:
        self._errors_left = 0
        self._reports.answer(SwitchedOff(self._name))

    def _refuse_safely(self, task: T) -> None:
        try:
            self._refuse(task)
        except BaseException:  # later tasks must be answered all the same
            log.exception("pdconn: store: a task was not refused: thread=%s", self._name)


def _nothing() -> None:
    """Frees nothing."""
