"""One rank's part of the store, in a worker process: rows into KV blocks, and out of them.

::

    engine's thread                   readers (2)                     writer (1)
    post_command(Fetch) ──────────►   rows ► staging, verified
    take_results() ◄───────────────   RowTried ► FetchResult
    post_command(LoadRows) ───────►   staging ► KV blocks
    take_loaded() ◄────────────────   request
    post_command(SaveRows), held back
    after_pass() ──────────────────────────────────────────────────►  KV blocks ► parts, notes
    take_results() ◄────────────────────────────────────────────────  SaveResult

The engine's thread only puts tasks, takes answers, and counts what is left of each fetch: the
store's own threads open, read, plan and copy.  Every Fetch, LoadRows and SaveRows is answered, also
by threads that have failed.

Readers and the writer take tasks in the order of :mod:`pdconn.lifecycle.turns`: what requests wait
for, then prefetches, and tenants in turn.

A fetch is answered once, when all its rows have been tried; its bytes belong to it until it is
loaded, or dropped and answered (:mod:`~pdconn.store.rank.fetches`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pdconn.lifecycle.turns import Urgency
from pdconn.planning import cover
from pdconn.planning.plan import Need
from pdconn.store.budget.locks import HeldWriter
from pdconn.store.format.row import RowName
from pdconn.store.format.seals import RowKeys
from pdconn.store.rank.copies import HostArea, copies_of
from pdconn.store.rank.fetches import FetchTable, FetchUnderWay, JoinedPull
from pdconn.store.rank.row_writer import RowWriter, SaveUnderWay, refuse_save, turn_of_save, unsaved
from pdconn.store.rank.shares import OpenedRank
from pdconn.store.rank.tasks import (
    Answer,
    BeginFetch,
    FetchRefused,
    Loaded,
    LoadFailed,
    LoadFetched,
    Problem,
    ReadRow,
    ReadTask,
    RowReader,
    RowTried,
    StagingReady,
    SwitchedOff,
    TaskLoop,
    TaskReport,
    TaskReports,
    refused_read,
    turn_of_read,
)
from pdconn.store.rank_commands import (
    BesideEnded,
    DropFetch,
    FailLoad,
    Fetch,
    JoinPull,
    LoadRows,
    OpenStore,
    SaveRows,
    StoreCommand,
    StoreResult,
)
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.interface import Shelf
from pdconn.store.store_errors import FormatError
from pdconn.store.store_keys import load_keys
from pdconn.threads import Box, RightOfWay, ThreadDied, TurnBox, Worker
from registration.references import KVCacheReferences
from transport import Device
from transport.streams import StreamPoint, stream_point

log = logging.getLogger(__name__)


NUM_READERS = 2
"""One reads while the other verifies or loads."""
READER, WRITER = "pdconn-store-read", "pdconn-store-write"
CLOSE_S = 5.0
"""How long :meth:`RankStore.close` waits for reads and writes under way."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What every thread of a rank's store begins with.

    Attributes:
        settings: of which ``staging`` is used here.
        references: this rank's KV memory.
        rank: its number among the ranks of :attr:`OpenStore.replicas`.
        open_shelf: opens a shelf for one thread.
        hold: locks the account of a writer, so that it counts as alive.
        keys: rows are encrypted with; None where they are not.
    """

    settings: StoreSettings
    references: KVCacheReferences
    rank: int
    open_shelf: Callable[[], Shelf]
    hold: Callable[[str], HeldWriter] | None
    keys: RowKeys | None

    def open_rank(self, opening: OpenStore) -> OpenedRank:
        """Match this rank's memory with the engine's rows.

        Raises:
            FormatError: they do not fit, or the scheduler encrypts rows and this rank does not.
            Incompatible: the share is of other memory.
        """
        is_sealed = opening.layout.fa.is_sealed
        if is_sealed != (self.keys is not None):
            expected = "a key here, as the scheduler has one" if is_sealed else "none"
            raise FormatError("store.key_file", expected, "another setting")
        return OpenedRank.from_opening(opening, self.references, self.rank)

    @property
    def device(self) -> Device:
        """Where the KV memory is."""
        return self.references.tensors[0].device

    def new_area(self, nbytes: int) -> HostArea:
        """Host memory that rows pass through."""
        area = HostArea(nbytes)
        if self.device.kind == "cuda":
            area.pin_pages()
        return area


@dataclass(frozen=True, slots=True)
class EndedBeside:
    """A load beside the pull of ``request`` has ended: ``loaded`` is in the request's blocks."""

    request: str
    loaded: Need


@dataclass(slots=True)
class _Answers:
    """What threads have reported, until the engine's thread takes it."""

    results: list[StoreResult] = field(default_factory=list)
    beside: list[EndedBeside] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class RankStore:
    """Fetches, loads and saves of one rank, for the engine's thread.

    Args:
        settings, references, rank, open_shelf, hold: those of :class:`RankSetup`.

    Raises:
        StoreSettingError, StoreError: the key file cannot be used.
    """

    def __init__(
        self,
        settings: StoreSettings,
        references: KVCacheReferences,
        rank: int,
        open_shelf: Callable[[], Shelf],
        *,
        hold: Callable[[str], HeldWriter] | None = None,
    ) -> None:
        keys = load_keys(settings.key_file).rows
        self._setup = RankSetup(settings, references, rank, open_shelf, hold, keys)
        self._opening: OpenStore | None = None
        self._outbox: Box[TaskReport | ThreadDied] = Box()
        # What the puller moves, to which prefetches give way; and all transfers, to which saves do.
        self._pulls, self._transfers = RightOfWay(), RightOfWay()
        self._to_read: TurnBox[ReadTask] = TurnBox(turn_of_read, self._pulls)
        self._to_write: TurnBox[SaveUnderWay] = TurnBox(turn_of_save, self._transfers)
        self._workers: dict[str, Worker[ReadTask] | Worker[SaveUnderWay]] = {}
        self._fetches, self._joined = FetchTable(), dict[int, FetchUnderWay]()
        self._answers = _Answers()
        self._held: list[SaveRows] = []
        self._reads = False
        self._staging: HostArea | None = None
        self._is_closed = False

    def post_command(self, command: StoreCommand, after: StreamPoint | None = None) -> None:
        """Begin a command; saves wait for :meth:`after_pass`.  Commands keep their order.

        Args:
            after: a load writes to its blocks once the GPU has reached this point.
        """
        if self._is_closed:
            return
        if isinstance(command, OpenStore):
            self._open(command)
        elif isinstance(command, Fetch):
            self._fetches.add_fetch(command)
            namespace = self._opening.namespace if self._opening else ""
            self._read(BeginFetch(command, namespace))
        elif isinstance(command, LoadRows):
            self._load(command, after)
        elif isinstance(command, JoinPull):
            self._join(JoinedPull(command, after))
        elif isinstance(command, DropFetch):
            self._drop(command.number)
        elif isinstance(command, FailLoad):
            self._note(LoadFailed(command.request))
        else:
            self._held.append(command)

    def after_pass(self) -> None:
        """Begin the saves posted before, once the forward pass that was started has ended."""
        if not self._held:
            return
        held, self._held = self._held, []
        after = stream_point(self._setup.device)
        # Rows of a namespace that has changed since they were posted are not committed.
        namespace = self._opening.namespace if self._opening else ""
        for save in held:
            nbytes = sum(self._row_nbytes(row.name) for row in save.rows)
            task = SaveUnderWay(save, after, namespace, nbytes)
            if WRITER in self._workers:
                self._to_write.put(task)
            else:
                for answer in unsaved(task):
                    self._note(answer)

    def _row_nbytes(self, name: RowName) -> int:
        return self._opening.layout.for_kind(name.kind).data_nbytes if self._opening else 0

    def set_waiting(self, pulls: Urgency | None, *, is_loading: bool) -> None:
        """Say what else moves, to which prefetches and saves give way.

        Args:
            pulls: the most urgent class of pulls under way; None without one.
            is_loading: whether this store was asked for something that it has not answered.
        """
        self._pulls.set_most_urgent(pulls)
        moved = [] if pulls is None else [pulls]
        moved += [Urgency.LOAD] if is_loading else []
        self._transfers.set_most_urgent(min(moved, default=None))

    def wait_for_answer(self, timeout_s: float) -> None:
        """Sleep until there is something to take."""
        answers = self._answers
        if not (answers.results or answers.beside or answers.loaded or answers.failed):
            self._outbox.wait_for_item(timeout_s)

    def has_results(self) -> bool:
        """Whether there is something to take: results, or requests loaded or failed."""
        self._take_reports()
        answers = self._answers
        return bool(answers.results or answers.beside or answers.loaded or answers.failed)

    def take_results(self) -> list[StoreResult]:
        """Results since the last call, for the scheduler."""
        self._take_reports()
        results, self._answers.results = self._answers.results, []
        return results

    def take_loaded(self) -> list[str]:
        """Requests whose rows are in their blocks, since the last call."""
        self._take_reports()
        loaded, self._answers.loaded = self._answers.loaded, []
        return loaded

    def take_ended_beside(self) -> list[EndedBeside]:
        """Loads beside pulls that have ended since the last call: each is reported once."""
        self._take_reports()
        ended, self._answers.beside = self._answers.beside, []
        return ended

    def take_load_failures(self) -> list[str]:
        """Requests whose blocks do not hold what was to be loaded, since the last call."""
        self._take_reports()
        failed, self._answers.failed = self._answers.failed, []
        return failed

    def take_rank_counts(self) -> dict[str, int]:
        """What was counted since the last call: rows and bytes read and written, failures."""
        self._take_reports()
        if overdue := self._to_read.take_overdue() + self._to_write.take_overdue():
            self._answers.counts["turns_overdue"] += overdue
        if not self._answers.counts:
            return {}
        counts = {name: amount for name, amount in self._answers.counts.items() if amount}
        self._answers.counts.clear()
        return counts

    def close(self) -> None:
        """End all threads.  Reads and writes under way get a few seconds; the rest is dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self.set_waiting(None, is_loading=False)
        self._held.clear()
        self._to_read.close()
        self._to_write.close()
        deadline = time.monotonic() + CLOSE_S
        ended = [each.end_thread(deadline - time.monotonic()) for each in self._workers.values()]
        self._take_reports()
        if not all(ended):
            log.warning("pdconn: store: threads did not end in time: rank=%d", self._setup.rank)
        elif self._staging is not None:
            self._staging.unpin_pages()

    def _open(self, opening: OpenStore) -> None:
        """Start the threads; a later command changes the namespace."""
        if self._opening is None:
            self._opening = opening
            self._reads = self._start_reader(None)
            self._start_writer(opening)
        elif opening.layout == self._opening.layout and opening.writer == self._opening.writer:
            self._opening = opening
        else:
            log.error("pdconn: store: opened again with another layout or writer: ignored")

    def _read(self, task: ReadTask) -> None:
        """Put a task for the readers."""
        if not self._reads:
            self._note(refused_read(task))
        else:
            self._to_read.put(task)

    def _load(self, load: LoadRows, after: StreamPoint | None) -> None:
        fetch = self._fetches.take_fetch(load.number)
        if fetch is None:
            log.warning("pdconn: store: a load without its rows: request=%s", load.request)
            self._note(LoadFailed(load.request, load.number))
        else:
            self._read(LoadFetched(fetch, load, after))

    def _join(self, joined: JoinedPull) -> None:
        """Copy a fetch's rows beside a pull, now or once they were tried."""
        fetch = self._fetches.find_fetch(joined.join.number)
        if fetch is None:
            # Its rows were dropped in the step in which it was joined.
            self._answers.beside.append(EndedBeside(joined.join.request, cover.NOTHING))
            self._answers.results.append(BesideEnded(joined.join.number, 0))
        else:
            fetch.joined = joined
            self._copy_if_due(fetch)

    def _copy_if_due(self, fetch: FetchUnderWay) -> None:
        """Copy the rows before the first that is missing, if the pull waits for no others."""
        joined, opening = fetch.joined, self._opening
        if joined is None or opening is None or not fetch.may_copy:
            return
        end = fetch.rows_end(opening.layout.block_tokens)
        loaded = joined.loaded = cover.until(joined.join.need, self._setup.references.groups, end)
        if any(loaded.tokens):
            self._joined[joined.join.number] = fetch
            load = LoadRows(joined.join.number, joined.join.request, loaded)
            self._read(LoadFetched(fetch.fetch, load, joined.after))
        else:
            self._end_copy(fetch)

    def _end_copy(self, fetch: FetchUnderWay) -> None:
        """The pull may read what was not copied; the bytes are free once no row is being read."""
        joined = fetch.joined
        assert joined is not None
        joined.has_ended = True
        self._answers.beside.append(
            EndedBeside(joined.join.request, joined.loaded or cover.NOTHING)
        )
        self._answer_if_over(fetch)

    def _answer_if_over(self, fetch: FetchUnderWay) -> None:
        joined = fetch.joined
        if joined is not None and self._fetches.forget_if_over(fetch):
            self._answers.results.append(BesideEnded(joined.join.number, joined.num_tokens))

    def _drop(self, number: int) -> None:
        """Take back rows that no reader has begun; the others answer the fetch."""
        dropped = self._fetches.drop_fetch(number)

        def is_of_it(task: ReadTask) -> bool:
            begun = task.of if isinstance(task, ReadRow) else task
            return isinstance(begun, BeginFetch) and begun.fetch.number == number

        for task in self._to_read.take_back(is_of_it):
            places = [task.place] if isinstance(task, ReadRow) else None
            self._rows_tried(number, places, Problem.LEFT_OUT)
        if dropped is not None:  # rows that are being read may never come
            self._copy_if_due(dropped)

    def _take_reports(self) -> None:
        """Apply what the threads have reported."""
        if not self._outbox.items:
            return
        for report in self._outbox.take_all():
            if isinstance(report, ThreadDied):
                self._switch_off(report.thread)
                continue
            self._answers.counts.update(report.counts)
            if report.answer is not None:
                self._note(report.answer)

    def _note(self, answer: Answer) -> None:
        answers = self._answers
        if isinstance(answer, RowTried):
            self._rows_tried(answer.number, [answer.place], answer.problem)
        elif isinstance(answer, FetchRefused):
            self._rows_tried(answer.number, None, Problem.MISSING)
        elif isinstance(answer, Loaded):
            if (fetch := self._joined.pop(answer.number, None)) is not None:
                self._end_copy(fetch)
            else:
                answers.loaded.append(answer.request)
        elif isinstance(answer, LoadFailed):
            answers.counts["load_failures"] += 1
            number = answer.number
            if number and (fetch := self._joined.pop(number, None)) is not None:
                assert fetch.joined is not None
                fetch.joined.loaded = cover.NOTHING
                self._end_copy(fetch)
            else:
                answers.failed.append(answer.request)
        elif isinstance(answer, SwitchedOff):
            self._switch_off(answer.name)
        elif isinstance(answer, StagingReady):
            self._staging = answer.staging
            for _ in range(NUM_READERS - 1):
                self._start_reader(answer.staging)
        else:
            answers.results.append(answer)

    def _rows_tried(self, number: int, places: list[int] | None, problem: Problem | None) -> None:
        fetch = self._fetches.rows_tried(number, places, problem)
        if fetch is None:
            return
        result, counts = fetch.result(), self._answers.counts
        counts["rows_missing"] += len(result.missing)
        counts["rows_damaged"] += len(result.damaged)
        self._answers.results.append(result)
        self._copy_if_due(fetch)
        self._answer_if_over(fetch)

    def _switch_off(self, name: str) -> None:
        """Refuse all reads, as the reader does.  A writer goes on, to write notes of failure."""
        if name == WRITER or not self._reads:
            return
        self._reads = False
        for task in self._to_read.take_all():
            self._note(refused_read(task))

    # Threads, and what they begin with

    def _start_reader(self, staging: HostArea | None) -> bool:
        """Start a reader; the first makes the staging area.  Returns whether it was started."""
        assert self._opening is not None
        name = f"{READER}-{sum(READER in known for known in self._workers)}"
        reports = TaskReports(self._outbox)
        begin = _ReaderBegin(self._setup, self._opening, self._to_read, reports, staging)
        loop = TaskLoop(
            name,
            self._to_read,
            reports,
            begin=begin,
            refuse=lambda task: reports.answer(refused_read(task)),
        )
        worker: Worker[ReadTask] = Worker(name, loop.run_tasks, self._to_read, self._outbox)
        return not self._is_closed and self._start(worker)

    def _start_writer(self, opening: OpenStore) -> None:
        setup, reports = self._setup, TaskReports(self._outbox)
        loop = TaskLoop(
            WRITER,
            self._to_write,
            reports,
            begin=_WriterBegin(setup, opening, reports, self._transfers),
            refuse=lambda task: refuse_save(
                task, opening.writer, setup.rank, setup.open_shelf, reports
            ),
        )
        self._start(Worker(WRITER, loop.run_tasks, self._to_write, self._outbox))

    def _start(self, worker: Worker[ReadTask] | Worker[SaveUnderWay]) -> bool:
        try:
            worker.start_thread()
        except RuntimeError:
            log.exception("pdconn: store: no thread: name=%s", worker.name)
            return False
        self._workers[worker.name] = worker
        return True


@dataclass(slots=True)
class _ReaderBegin:
    """Makes a reader, on its thread.

    Raises:
        FormatError, Incompatible: this rank's memory does not fit the engine's rows.
        OSError: there is no room for the staging area.
    """

    setup: RankSetup
    opening: OpenStore
    inbox: TurnBox[ReadTask]
    reports: TaskReports
    staging: HostArea | None

    def __call__(self) -> tuple[Callable[[ReadTask], None], Callable[[], None]]:
        setup = self.setup
        opened = setup.open_rank(self.opening)
        copies = copies_of(setup.references.memories())
        staging = self.staging
        if staging is None:
            staging = setup.new_area(setup.settings.staging)
            self.reports.answer(StagingReady(staging))
        reader = RowReader(
            opened, staging, self.inbox, self.reports, open_shelf=setup.open_shelf,
            copies=copies, keys=setup.keys,
        )  # fmt: skip
        return reader.do_read, reader.close


@dataclass(slots=True)
class _WriterBegin:
    """Makes the writer, on its thread.

    Raises:
        FormatError, Incompatible: this rank's memory does not fit the engine's rows.
        ShelfFailure: the writer's account cannot be locked.
    """

    setup: RankSetup
    opening: OpenStore
    reports: TaskReports
    right_of_way: RightOfWay

    def __call__(self) -> tuple[Callable[[SaveUnderWay], None], Callable[[], None]]:
        setup = self.setup
        opened = setup.open_rank(self.opening)
        writer = RowWriter(
            opened,
            setup.new_area(opened.most_nbytes),
            self.reports,
            setup.open_shelf,
            copies_of(setup.references.memories()),
            held=None if setup.hold is None else setup.hold(opened.writer),
            right_of_way=self.right_of_way,
            keys=setup.keys,
        )
        return writer.do_save, writer.close
