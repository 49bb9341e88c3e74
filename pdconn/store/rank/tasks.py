"""The threads of a rank's store.  Every task is answered, also by a thread that has failed.

::

    RankStore ── task ──► inbox ──► TaskLoop: work(task) ── TaskReport ──► RankStore
                                       │ an unexpected error
                                       ▼
                                    refuse(task)      so is every later task, after the third such
                                                      error, or if the thread could not begin

    RowReader    rows ──read, verify──► staging ──► KV blocks
                 encrypted rows ──read──► another buffer ──decrypt, verify──► staging
                 packed rows ──read──► another buffer ──(decrypt,) verify, unpack──► staging

Several readers take rows from one box, so that one reads while another verifies: in the order of
:mod:`pdconn.lifecycle.turns`, and each request's in its own.  Saves are those
of :mod:`~pdconn.store.rank.row_writer`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import Any, Generic, TypeVar

from pdconn.integrity.zeros import fill_with_zeros
from pdconn.lifecycle.turns import TurnKey, Urgency
from pdconn.planning.planning_errors import PlanningError
from pdconn.sidechannel.quiet_log import QuietLog
from pdconn.store.format.row import RowKind
from pdconn.store.format.seals import TAG_NBYTES, RowKeys
from pdconn.store.rank.copies import Copies, HostArea
from pdconn.store.rank.packed_shares import read_packed, unpack_share
from pdconn.store.rank.sealed_shares import open_row, open_slabs
from pdconn.store.rank.shares import OpenedRank, RowShare, check_sums
from pdconn.store.rank_commands import (
    Fetch,
    LoadRows,
    SaveFailed,
    SaveResult,
)
from pdconn.store.settings import REPEAT_S
from pdconn.store.shelf.interface import Shelf
from pdconn.store.store_errors import RowDamaged, RowLocked, RowMissing, StoreError
from pdconn.threads import Box, TurnBox
from transport import Spans
from transport.streams import StreamPoint

log = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE = 3
"""Unexpected errors of a thread; then it refuses everything."""


class Problem(Enum):
    """Why a row is not in staging.  LEFT_OUT: its fetch was dropped before the row was tried."""

    MISSING = auto()
    DAMAGED = auto()
    LEFT_OUT = auto()


@dataclass(frozen=True, slots=True)
class RowTried:
    """Row ``place`` of fetch ``number`` was read, or could not be."""

    number: int
    place: int
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class FetchRefused:
    """No row of fetch ``number`` will be tried: all are missing."""

    number: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rows of fetch ``number`` are in the blocks of ``request``."""

    request: str
    number: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The blocks of ``request`` do not hold what they should; ``number``: of its fetch, if any."""

    request: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class StagingReady:
    """The staging area is made: further readers may begin."""

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
    """What one thread reports: answers and counts in the outbox, warnings in the log."""

    def __init__(self, outbox: Box[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._outbox = outbox
        self._warnings = QuietLog(log, clock, pause_s=REPEAT_S)
        self._counts: Counter[str] = Counter()

    def answer(self, answer: Answer, *, quietly: bool = False) -> None:
        """Put an answer; ``quietly`` if the engine needs further answers before it can go on."""
        report = TaskReport(answer, self._take_counts())
        (self._outbox.put_quietly if quietly else self._outbox.put)(report)

    def add_counts(self, **counts: int) -> None:
        """Add to the counts of the next report."""
        self._counts.update(counts)

    def report_counts(self) -> None:
        """Put the counts that no answer has carried."""
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
        inbox: tasks; other threads may take from it as well.
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

    def run_tasks(self) -> None:
        """Do tasks until the inbox is closed; tasks left in it are dropped."""
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


@dataclass(frozen=True, slots=True, eq=False)
class BeginFetch:
    """A fetch whose rows have no places in staging yet."""

    fetch: Fetch
    namespace: str


@dataclass(frozen=True, slots=True, eq=False)
class ReadRow:
    """A row to read: its place in its fetch, and where it lies in staging."""

    of: BeginFetch
    place: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadFetched:
    """A load of a fetch, which writes to its blocks once the GPU has reached ``after``."""

    fetch: Fetch
    load: LoadRows
    after: StreamPoint | None


ReadTask = BeginFetch | ReadRow | LoadFetched


def turn_of_read(task: ReadTask) -> TurnKey:
    """What a task is served by.

    A copy of rows that were read counts as a pull unless nobody waits for it: its request has its
    blocks, and it is short.
    """
    fetch = task.of.fetch if isinstance(task, ReadRow) else task.fetch
    tenant = fetch.rows[0].tenant if fetch.rows else b""
    if isinstance(task, ReadRow):
        return TurnKey(fetch.urgency, tenant, task.nbytes)
    if isinstance(task, LoadFetched) and fetch.urgency is not Urgency.PREFETCH:
        return TurnKey(Urgency.PULL, tenant)
    return TurnKey(fetch.urgency, tenant)


def refused_read(task: ReadTask) -> Answer:
    """The answer to a task that is not done."""
    if isinstance(task, ReadRow):
        return RowTried(task.of.fetch.number, task.place, Problem.MISSING)
    if isinstance(task, BeginFetch):
        return FetchRefused(task.fetch.number)
    return LoadFailed(task.load.request, task.load.number)


class RowReader:
    """One thread's reads and loads.

    Args:
        inbox: gets the rows of a fetch, before others of its tenant.
        open_shelf: opens the thread's own shelf, at the first row and again after a failure.
        copies: the thread's own, to KV memory.
        keys: those of rows that are encrypted.
    """

    def __init__(
        self,
        opened: OpenedRank,
        staging: HostArea,
        inbox: TurnBox[ReadTask],
        reports: TaskReports,
        *,
        open_shelf: Callable[[], Shelf],
        copies: Copies,
        keys: RowKeys | None = None,
    ) -> None:
        self._opened, self._staging = opened, staging
        self._inbox, self._reports = inbox, reports
        self._open_shelf, self._copies = open_shelf, copies
        self._footer = HostArea(opened.most_footer_nbytes)
        self._keys = keys
        # What is read of rows that are not in staging as they are stored.  Lazy: pages that are
        # not used take no memory.
        stored = opened.most_stored_nbytes
        self._stored, self._opened_slabs = HostArea(stored + TAG_NBYTES), HostArea(stored)
        self._shelf: Shelf | None = None

    def close(self) -> None:
        """Close the shelf."""
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None

    def do_read(self, task: ReadTask) -> None:
        """Do one task and report it."""
        if isinstance(task, ReadRow):
            tried = RowTried(task.of.fetch.number, task.place, self._read(task))
            self._reports.answer(tried, quietly=self._has_more(task.of))
        elif isinstance(task, BeginFetch):
            self._begin(task)
        else:
            if task.after is not None:
                task.after.synchronize()
            self._load(task)

    def _has_more(self, fetch: BeginFetch) -> bool:
        """Whether rows of the same fetch wait, without which the fetch has no answer."""
        following = self._inbox.first_item()
        return isinstance(following, ReadRow) and following.of is fetch

    def _begin(self, begun: BeginFetch) -> None:
        """Put the fetch's rows before its tenant's others; refuse it if staging is too small."""
        tasks: list[ReadTask] = []
        for place, (offset, end) in enumerate(pairwise(self._offsets(begun.fetch))):
            tasks.append(ReadRow(begun, place, offset, end - offset))
        if not tasks or not self._fits(begun.fetch):
            self._reports.answer(FetchRefused(begun.fetch.number))
        else:
            self._inbox.put_first(tasks)

    def _offsets(self, fetch: Fetch) -> list[int]:
        """Where each row begins in staging, and where the last one ends."""
        offsets = [fetch.offset]
        for name in fetch.rows:
            offsets.append(offsets[-1] + self._opened.kinds[name.kind].share.nbytes)
        return offsets

    def _fits(self, fetch: Fetch) -> bool:
        nbytes = self._offsets(fetch)[-1] - fetch.offset
        if self._staging.holds(fetch.offset, nbytes):
            return True
        self._reports.warn(
            "a fetch is outside of the staging area: offset=%d nbytes=%d staging=%d",
            fetch.offset,
            nbytes,
            self._staging.nbytes,
        )
        return False

    def _read(self, task: ReadRow) -> Problem | None:
        """Read and verify one row.  Returns why it is not in staging, or None."""
        name = task.of.fetch.rows[task.place]
        share = self._opened.kinds[name.kind].share
        if not share.slabs:
            return None
        try:
            self._read_share(share, self._staging.bytes_at(task.offset, share.nbytes), task)
        except RowMissing:
            return Problem.MISSING
        except RowLocked as error:
            self._reports.add_counts(rows_locked=1)
            self._reports.warn("a row cannot be decrypted: row=%s: %s", name.file_name, error)
            return Problem.MISSING
        except RowDamaged as error:
            self._reports.warn("a damaged row: row=%s: %s", name.file_name, error)
            return Problem.DAMAGED
        except StoreError as error:
            self._reports.add_counts(read_failures=1)
            self._reports.warn("a row could not be read: row=%s: %s", name.file_name, error)
            return Problem.MISSING
        return None

    def _read_share(self, share: RowShare, data: memoryview, task: ReadRow) -> None:
        """Fill ``data`` with our share of a row, decrypted and verified."""
        namespace, name = task.of.namespace, task.of.fetch.rows[task.place]
        footer = self._footer.bytes_at(0, share.most_footer_nbytes)
        if share.heads:
            self._read_packed(share, data, footer, task)
            return
        nbytes = share.nbytes + share.footer_nbytes
        if self._keys is None:
            self._own_shelf().read(namespace, name, share.ranges(data, footer))
            share.verify_row(data, footer, namespace, name)
        else:
            sealed = self._stored.bytes_at(0, share.nbytes + TAG_NBYTES)
            self._own_shelf().read(namespace, name, share.ranges(sealed, footer))
            open_row(share, sealed, footer, namespace, name, keys=self._keys, into=data)
        self._reports.add_counts(rows_read=1, bytes_read=nbytes)

    def _read_packed(
        self, share: RowShare, data: memoryview, footer: memoryview, task: ReadRow
    ) -> None:
        """Fill ``data`` with our share of a packed row, decrypted, verified, unpacked."""
        namespace, name = task.of.namespace, task.of.fetch.rows[task.place]
        stored = self._stored.bytes_at(0, share.stored_nbytes + TAG_NBYTES)
        found, slabs = read_packed(
            self._own_shelf(), share, namespace, name, data=stored, footer=footer
        )
        if self._keys is None:
            check_sums(slabs, stored, found)
        else:
            sealed, stored = stored, self._opened_slabs.bytes_at(0, share.stored_nbytes)
            open_slabs(slabs, sealed, found, keys=self._keys, into=stored)
        unpack_share(share.heads, found.has_slab, stored, data)
        nbytes = sum(slab.nbytes for slab in slabs) + found.nbytes - found.data_nbytes
        self._reports.add_counts(rows_read=1, bytes_read=nbytes)

    def _load(self, task: LoadFetched) -> None:
        load = task.load
        try:
            for spans in self._spans(task.fetch, load):
                self._copies.copy_in(spans)
            for gaps in self._opened.gaps_of_load(load.need):
                fill_with_zeros(gaps)
        except (StoreError, PlanningError, MemoryError, RuntimeError) as error:
            # torch raises RuntimeError where a GPU has no memory: an expected error, which must not
            # count towards those that switch the store off.
            self._reports.warn("a load failed: request=%s: %s", load.request, error)
            self._reports.answer(LoadFailed(load.request, load.number))
            return
        self._reports.add_counts(loads=1)
        self._reports.answer(Loaded(load.request, load.number))

    def _spans(self, fetch: Fetch, load: LoadRows) -> Iterator[Spans]:
        """What is to be copied, kind by kind; planning fails if a kind without rows needs some."""
        rows: dict[RowKind, list[tuple[int, int]]] = {kind: [] for kind in self._opened.kinds}
        for name, offset in zip(fetch.rows, self._offsets(fetch), strict=False):
            rows[name.kind].append((name.index, self._staging.address + offset))
        for kind, of_kind in rows.items():
            own = self._opened.kinds[kind]
            if own.share.slabs:
                yield from own.pairing.spans_to_load(load.need, of_kind)

    def _own_shelf(self) -> Shelf:
        if self._shelf is None:
            self._shelf = self._open_shelf()
        return self._shelf
