"""One rank's part of the store, in a worker process: rows into KV blocks, and out of them.

::

    engine's thread                readers (2)                        writer (1)
    post(Fetch) ───────────────►   rows ► staging, verified
    results() ◄────────────────    FetchResult
    post(LoadRows) ────────────────►   staging ► KV blocks
    take_loaded() ◄────────────    request
    post(SaveRows), held back
    after_pass() ──────────────────────────────────────────────────►  KV blocks ► parts, notes
    results() ◄─────────────────────────────────────────────────────  SaveResult

The engine's thread queues and takes, and does nothing else: what a store opens, reads, plans and
copies is done on the store's own threads.  Every Fetch, LoadRows and SaveRows is answered, also by
threads that have failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from pdconn.store.budget.locks import HeldWriter
from pdconn.store.commands import (
    DropFetch,
    FailLoad,
    Fetch,
    LoadRows,
    OpenStore,
    SaveRows,
    StoreCommand,
    StoreResult,
)
from pdconn.store.rank.copies import copies_of
from pdconn.store.rank.fetches import (
    FetchTable,
    FetchUnderWay,
    LoadUnderWay,
    Problem,
    ReadTask,
    RowRead,
    RowReader,
)
from pdconn.store.rank.reports import StoreReports
from pdconn.store.rank.saves import RowWriter, SaveUnderWay, answer, refuse_save
from pdconn.store.rank.shares import OpenedRank
from pdconn.store.rank.staging import HostArea
from pdconn.store.rank.task_threads import TaskThreads
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.base import Shelf
from registration.references import KVCacheReferences
from transport import Device
from transport.streams import StreamPoint, stream_point

log = logging.getLogger(__name__)

NUM_READERS = 2
"""One reads while the other verifies or loads."""
CLOSE_S = 5.0
"""How long :meth:`RankStore.close` waits for reads and writes under way."""


class RankStore:
    """Fetches, loads and saves of one rank.  All methods are for the engine's thread.

    Args:
        settings: ``staging`` counts here.
        references: this rank's KV memory.
        rank: its number among the ranks of :attr:`OpenStore.replicas`.
        open_shelf: opens a shelf for one thread.
        wake: called on any thread whenever there is something new to take.
        hold: opens what shows that a process of the writer lives, see :mod:`..budget.accounts`.
    """

    def __init__(
        self,
        settings: StoreSettings,
        references: KVCacheReferences,
        rank: int,
        open_shelf: Callable[[], Shelf],
        *,
        wake: Callable[[], None] = lambda: None,
        hold: Callable[[str], HeldWriter] | None = None,
    ) -> None:
        self._settings, self._references, self._rank = settings, references, rank
        self._open_shelf, self._hold = open_shelf, hold
        self._held_writer: HeldWriter | None = None
        self._reports = StoreReports(wake)
        self._fetches = FetchTable(self._reports)
        self._opening: OpenStore | None = None
        self._opened: OpenedRank | None = None
        self._lock = threading.Lock()
        self._areas: list[HostArea] = []
        self._held: list[SaveRows] = []
        self._is_closed = False
        self._readers: TaskThreads[ReadTask] = TaskThreads(
            "pdconn-store-read", NUM_READERS, self._begin_reader, self._refuse_read
        )
        self._writers: TaskThreads[SaveUnderWay] = TaskThreads(
            "pdconn-store-write", 1, self._begin_writer, self._refuse_save
        )

    @property
    def _device(self) -> Device:
        return self._references.tensors[0].device

    # The engine's thread

    def post(self, command: StoreCommand, after: StreamPoint | None = None) -> None:
        """Begin a command; saves wait for :meth:`after_pass`.  Commands keep their order.

        Args:
            after: a load writes to its blocks once the GPU has come to this point.
        """
        if self._is_closed:
            return
        if isinstance(command, OpenStore):
            self._open(command)
        elif isinstance(command, Fetch):
            opening = self._opening
            fetch = self._fetches.add(command, opening.namespace if opening else "")
            if opening is None:
                self._fetches.all_missing(fetch)
            else:
                self._readers.put(fetch)
        elif isinstance(command, LoadRows):
            self._readers.put_first([LoadUnderWay(command, after)])
        elif isinstance(command, DropFetch):
            self._fetches.drop(command.number)
        elif isinstance(command, FailLoad):
            self._fail(command.request)
        else:
            self._held.append(command)

    def after_pass(self) -> None:
        """This step's forward pass was started: saves posted before may begin when it is done."""
        if not self._held:
            return
        held, self._held = self._held, []
        after = stream_point(self._device)
        for save in held:
            self._writers.put(SaveUnderWay(save, after))

    def has_results(self) -> bool:
        """Whether there is something to take: answers, or requests that were loaded or failed."""
        return self._reports.has_any

    def results(self) -> list[StoreResult]:
        """Answers since the last call, for the scheduler."""
        return self._reports.take_results()

    def take_loaded(self) -> list[str]:
        """Requests whose rows are in their blocks, since the last call."""
        return self._reports.take_loaded()

    def take_load_failures(self) -> list[str]:
        """Requests whose blocks do not hold what was to be loaded, since the last call."""
        return self._reports.take_failed()

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call: rows and bytes read and written, failures."""
        return self._reports.take_counts()

    def close(self) -> None:
        """End all threads; what is under way is given a few seconds, the rest is dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._held.clear()
        self._readers.stop()
        self._writers.stop()
        deadline = time.monotonic() + CLOSE_S
        ended = self._readers.join(deadline), self._writers.join(deadline)
        if not all(ended):
            log.warning("pdconn: store: threads did not end in time: rank=%d", self._rank)
            return
        if self._held_writer is not None:
            self._held_writer.close()
            self._held_writer = None
        for area in self._areas:
            area.unpin()
        self._areas.clear()

    def _open(self, opening: OpenStore) -> None:
        """The first opening starts the threads; later ones tell of another namespace."""
        if self._opening is None:
            self._opening = opening
            self._readers.start()
            self._writers.start()
        elif opening.layout == self._opening.layout and opening.writer == self._opening.writer:
            self._opening = opening
        else:
            log.error("pdconn: store: opened again with another layout or writer: ignored")

    # The store's threads

    def _begin_reader(self) -> tuple[Callable[[ReadTask], None], Callable[[], None]]:
        opened, staging = self._opened_rank()
        reader = RowReader(
            opened,
            staging,
            self._fetches,
            self._reports,
            open_shelf=self._open_shelf,
            put_first=self._readers.put_first,
            copies=copies_of(self._references.memories()),
        )
        return reader.work, reader.close

    def _begin_writer(self) -> tuple[Callable[[SaveUnderWay], None], Callable[[], None]]:
        opened, _ = self._opened_rank()
        if self._hold is not None and self._held_writer is None:
            self._held_writer = self._hold(opened.writer)
        buffer = self._new_area(opened.most_nbytes)
        copies = copies_of(self._references.memories())
        held = self._held_writer
        writer = RowWriter(
            opened,
            buffer,
            self._reports,
            self._open_shelf,
            copies,
            begins=_nothing if held is None else held.renew,
        )
        return writer.work, writer.close

    def _opened_rank(self) -> tuple[OpenedRank, HostArea]:
        """What all threads share; the first that asks makes it.

        Raises:
            FormatError, Incompatible: this rank's memory does not fit the engine's rows.
            OSError: there is no room for the staging area.
        """
        with self._lock:
            if self._opened is None:
                assert self._opening is not None
                opened = OpenedRank.of(self._opening, self._references, self._rank)
                self._new_area(self._settings.staging)
                self._opened = opened
            return self._opened, self._areas[0]

    def _new_area(self, nbytes: int) -> HostArea:
        area = HostArea(nbytes)
        if self._device.kind == "cuda":
            area.pin()
        self._areas.append(area)
        return area

    def _refuse_read(self, task: ReadTask) -> None:
        if isinstance(task, RowRead):
            self._fetches.tried(task.of, task.place, Problem.MISSING)
        elif isinstance(task, FetchUnderWay):
            self._fetches.all_missing(task)
        else:
            self._fail(task.load.request)

    def _fail(self, request: str) -> None:
        self._reports.count(load_failures=1)
        self._reports.load_failed(request)

    def _refuse_save(self, task: SaveUnderWay) -> None:
        if self._opening is None:
            answer(task, self._reports)
        else:
            refuse_save(task, self._opening.writer, self._rank, self._open_shelf, self._reports)


def _nothing() -> None:
    """Nothing is held."""
