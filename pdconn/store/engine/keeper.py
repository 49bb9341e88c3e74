"""The store's keeper in the scheduler's process: commits, budget, eviction, on a thread of its own.

::

    engine's thread   Keeper ── SaveBatch, RowsUsed, RowsFailed, … ──► _KeeperLoop ──► shelf,
                        ◄── KeeperReport: settled, committed, gone ──      │      ledger, evictor
                        takes from AmountBox ◄── bytes that may be written ┘
    look-ups          ◄── RowsListed, RowsStored, RowsGone ────────────────┘

The engine's thread asks it for nothing that takes a system call: rows to save are admitted by
an allowance that the keeper keeps topped up.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdconn.store.engine.catalogue import (
    Catalogue,
    Learnt,
    NamespaceChanged,
    RowsFailed,
    RowsGone,
    RowsListed,
    RowsStored,
)
from pdconn.store.engine.commits import Committer, SaveBatch
from pdconn.store.engine.lookups import LookupAnswer, ShareSizes
from pdconn.store.errors import StoreError
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.base import Shelf, StoredPart, StoredRow
from pdconn.threads import AmountBox, Box, ThreadDied, Worker

log = logging.getLogger(__name__)

_BUSY_S = 0.02
"""How often notes are looked for while rows are being saved."""
_IDLE_S = 0.5
_TOUCH_S = 60.0
"""A row's last use is noted that often at most."""
_FAULT_S = 5.0
"""After the shelf failed, the next try."""
MAX_STORED = 1 << 17
"""Rows of each kind that the engine's thread remembers to be there."""
MAX_WAITING = 4096
"""Uses of rows are dropped while more waits for the keeper, which may hang in its shelf."""
_ROWS_AT_ONCE = 512
_REPORTS_AT_ONCE = 16
"""Rows that one report says are gone, and reports that wait for the engine's next step at once: an
engine without work takes no step for hours, while others evict."""


class Budget(Protocol):
    """The byte budget, as the keeper uses it."""

    @property
    def room(self) -> AmountBox:
        """Bytes that may be written, kept topped up by :meth:`step`."""

    def open(self, shelf: Shelf) -> None:
        """Called first."""

    def step(self, shelf: Shelf, namespace: str) -> list[RowName]:
        """Top up, evict; rows of ``namespace`` that were evicted."""

    def commit(self, shelf: Shelf, part: StoredPart, namespace: str, name: RowName) -> bool:
        """Commit a part of taken bytes, to be evicted one day; False if the row was there."""

    def release(self, nbytes: int) -> None:
        """Taken bytes are free again."""

    def remove(self, shelf: Shelf, namespace: str, name: RowName) -> int:
        """Remove a damaged row; its bytes."""

    def usage(self) -> dict[str, int]:
        """Gauges for metrics."""

    def take_listing(self) -> list[StoredRow] | None:
        """All rows that are there, if they were listed anew since the last call."""

    def take_evicted(self) -> tuple[int, int]:
        """Rows of any namespace, and their bytes, evicted since the last call."""

    def close(self) -> None:
        """Give back what was not used."""


Told = Callable[[Sequence[RowName], Sequence[RowName]], None]
"""Is given rows that are there now, and rows that are gone, on the engine's thread."""


@dataclass(frozen=True, slots=True)
class RowsUsed:
    """Rows were loaded."""

    rows: Sequence[RowName]


@dataclass(frozen=True, slots=True)
class PartNotSaved:
    """A rank cannot save its share of a row."""

    part: str


@dataclass(frozen=True, slots=True)
class KeeperReport:
    """What the keeper has come to since the last one.

    Attributes:
        namespace: of rows committed and gone.
        settled: rows that are not being saved any more, committed or given up.
        committed: rows that are there now.
        gone: rows that are not there any more.
        usage: gauges of the budget.
    """

    namespace: str
    settled: Sequence[RowName]
    committed: Sequence[RowName]
    gone: Sequence[RowName]
    counts: Mapping[str, int]
    usage: dict[str, int]


KeeperCommand = SaveBatch | PartNotSaved | RowsUsed | Learnt


class StoredKeys:
    """Keys of rows that are there, those of the latest requests, by kind.

    Bounded: when the young ones are half of the most, the old ones are forgotten.
    """

    def __init__(self) -> None:
        self._young: dict[RowKind, dict[bytes, None]] = {kind: {} for kind in RowKind}
        self._old: dict[RowKind, dict[bytes, None]] = {kind: {} for kind in RowKind}

    def has(self, name: RowName) -> bool:
        """Whether the row is known to be there."""
        return name.key in self._young[name.kind] or name.key in self._old[name.kind]

    def add_keys(self, kind: RowKind, keys: Sequence[bytes]) -> None:
        """The rows are there."""
        young = self._young[kind]
        young.update(dict.fromkeys(keys))
        if len(young) > MAX_STORED // 2:
            self._old[kind], self._young[kind] = young, {}

    def remove(self, names: Iterable[RowName]) -> None:
        """The rows are not there any more."""
        for name in names:
            self._young[name.kind].pop(name.key, None)
            self._old[name.kind].pop(name.key, None)


class Keeper:
    """The engine's end of the keeper's boxes.

    Args:
        worker: the keeper's thread.
        sizes: of rows in staging.
        row_nbytes: bytes of a row of each kind, as the budget counts them.
        room: bytes that may be written; None for a store that is only read.
        lookups: the inbox of the look-ups, which learn with the keeper.
        namespace: where the engine's rows are, until :meth:`cleared`.
        told: is given rows committed and gone.
    """

    def __init__(
        self,
        worker: Worker[KeeperCommand],
        *,
        sizes: ShareSizes,
        row_nbytes: Mapping[RowKind, int],
        room: AmountBox | None,
        lookups: Box[Any],
        namespace: str,
        told: Told | None = None,
    ) -> None:
        self.sizes = sizes
        self._worker, self._lookups = worker, lookups
        self._row_nbytes, self._room = row_nbytes, room
        self._namespace = namespace
        self._told = told or (lambda new, gone: None)
        self._saving: set[RowName] = set()
        self._stored = StoredKeys()
        self._counts: Counter[str] = Counter()
        self._usage: dict[str, int] = {}
        worker.start()

    def is_wanted(self, name: RowName) -> bool:
        """Whether the row is neither being saved nor known to be there."""
        return name not in self._saving and not self._stored.has(name)

    def note_answer(self, answer: LookupAnswer) -> None:
        """A look-up has found rows."""
        if answer.namespace == self._namespace:
            for kind, keys in answer.there:
                self._stored.add_keys(kind, keys)

    def admit_rows(self, names: Sequence[RowName]) -> list[RowName]:
        """Those of ``names``, from the first on, that the budget has room for now."""
        taken: list[RowName] = []
        for name in names:
            room = self._room
            if room is not None and not room.take_amount(self._row_nbytes[name.kind]):
                self._counts["store_saves_skipped"] += len(names) - len(taken)
                break
            taken.append(name)
        self._saving.update(taken)
        return taken

    def add_batch(self, batch: SaveBatch) -> None:
        """Rows are on their way to the shelf."""
        self._worker.inbox.put(batch)

    def part_not_saved(self, part: str) -> None:
        """A rank cannot save its share of the row."""
        self._worker.inbox.put(PartNotSaved(part))

    def rows_used(self, rows: Sequence[RowName]) -> None:
        """The rows were used.  Forgotten where the keeper is far behind."""
        if len(self._worker.inbox.items) < MAX_WAITING:
            self._worker.inbox.put(RowsUsed(rows))

    def rows_failed(self, missing: Iterable[RowName], damaged: Iterable[RowName]) -> None:
        """Rows could not be read, or were not what was saved: the latter are removed."""
        failed = RowsFailed(self._namespace, tuple(missing), tuple(damaged))
        self._stored.remove((*failed.missing, *failed.damaged))
        self._lookups.put(failed)
        self._worker.inbox.put(failed)

    def cleared(self, namespace: str) -> None:
        """Rows are saved to and looked up in ``namespace`` from now on."""
        self._namespace = namespace
        self._stored = StoredKeys()
        changed = NamespaceChanged(namespace)
        self._lookups.put(changed)
        self._worker.inbox.put(changed)

    def is_saving(self) -> bool:
        """Whether a row is on its way to the shelf."""
        self.take_reports()
        return bool(self._saving)

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        self.take_reports()
        if not self._counts:
            return {}
        counts, self._counts = self._counts, Counter()
        return {name: amount for name, amount in counts.items() if amount}

    def usage(self) -> dict[str, int]:
        """Gauges: bytes of the budget, as last seen."""
        self.take_reports()
        return self._usage

    def take_reports(self) -> None:
        """Take over some of what the keeper has reported; call it in each step."""
        reports = self._worker.outbox.items
        for _ in range(min(len(reports), _REPORTS_AT_ONCE)):
            report = reports.popleft()
            if isinstance(report, ThreadDied):
                # What is being saved stays unsaved, and no bytes are handed out any more.
                self._saving.clear()
                self._room = AmountBox()
            else:
                self._take_report(report)

    def close(self) -> None:
        """End the thread; rows whose notes are all there are committed first."""
        self._worker.end(20.0)

    def _take_report(self, report: KeeperReport) -> None:
        self._saving.difference_update(report.settled)
        self._counts.update(report.counts)
        self._usage = report.usage
        if report.namespace != self._namespace:  # of before a reset
            return
        for name in report.committed:
            self._stored.add_keys(name.kind, (name.key,))
        self._stored.remove(report.gone)
        if report.committed or report.gone:
            self._told(report.committed, report.gone)


class _Owed:
    """What is to be reported."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.settled: list[RowName] = []
        self.committed: list[RowName] = []
        self.gone: list[RowName] = []
        self.counts: Counter[str] = Counter()
        self.usage: dict[str, int] = {}
        self._told_usage: dict[str, int] = {}

    def at(self, namespace: str) -> _Owed:
        """The same, without rows of another namespace: they are of no interest after a reset."""
        if namespace != self.namespace:
            self.namespace = namespace
            self.committed, self.gone = [], []
        return self

    def take_report(self) -> KeeperReport | None:
        """The next report; None if there is nothing to say."""
        counts = {name: amount for name, amount in self.counts.items() if amount}
        has_rows = self.settled or self.committed or self.gone
        if not (has_rows or counts or self.usage != self._told_usage):
            return None
        gone, self.gone = self.gone[:_ROWS_AT_ONCE], self.gone[_ROWS_AT_ONCE:]
        report = KeeperReport(
            self.namespace, self.settled.copy(), self.committed, gone, counts, dict(self.usage)
        )
        self.settled.clear()  # the committer adds to this very list
        self.committed, self._told_usage = [], self.usage
        self.counts.clear()
        return report


class KeeperLoop:
    """What the keeper's thread owns: the shelf, the budget, and the rows on their way.

    Args:
        inbox, outbox: of :class:`Keeper`.
        lookups: the inbox of the look-ups.
        catalogue: of the rows that are there; the committer's, too.
        shelf: opens the shelf, on the thread.
        budget: the byte budget; None for a store that is only read.
        committer: makes the committer, given ``settled``, which is called for each row.
        describe: keeps the layout beside the rows of a namespace, for those who verify them.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        inbox: Box[KeeperCommand],
        outbox: Box[KeeperReport | ThreadDied],
        lookups: Box[Any],
        *,
        catalogue: Catalogue,
        shelf: Callable[[], Shelf],
        budget: Budget | None,
        committer: Callable[..., Committer],
        clock: Callable[[], float],
        describe: Callable[[str], None] = lambda namespace: None,
    ) -> None:
        self._inbox, self._outbox, self._lookups = inbox, outbox, lookups
        self._catalogue, self._budget = catalogue, budget
        self._open_shelf, self._clock, self._describe = shelf, clock, describe
        self._owed = _Owed(catalogue.namespace)
        self._committer = committer(settled=self._owed.settled.append)
        self._touched: dict[RowName, float] = {}
        self._kept: deque[KeeperCommand] = deque()

    def run(self) -> None:
        """Do what is asked for, and a step now and then, until the inbox is closed."""
        shelf: Shelf | None = None
        is_over = False
        while not is_over:
            try:
                shelf = shelf or self._begin()
                is_over = self._take_commands(shelf)
                self._step(shelf)
            except StoreError as error:
                log.warning("pdconn: store: %s; next try in %.0f s", error, _FAULT_S)
                is_over = is_over or self._pause(_FAULT_S)
            except Exception:  # the thread goes on, or nothing would be committed or evicted
                log.exception("pdconn: store: the background thread failed")
                is_over = is_over or self._pause(_FAULT_S)
        if self._budget is not None:
            self._budget.close()
        if shelf is not None:
            shelf.close()

    def _begin(self) -> Shelf:
        shelf = self._open_shelf()
        listing = None
        if self._budget is not None:
            self._budget.open(shelf)
            # Taken now: rows that are committed before the first step are not in it.
            listing = self._budget.take_listing()
        rows = shelf.rows(self._catalogue.namespace) if listing is None else listing
        self._list_anew(rows)
        return shelf

    def _take_commands(self, shelf: Shelf) -> bool:
        """Do what was asked for; whether the thread is to end."""
        wait_s = _BUSY_S if len(self._committer) else _IDLE_S
        if not self._kept and (first := self._inbox.take_one(wait_s)) is not None:
            self._kept.append(first)
        is_over = self._inbox.is_closed
        self._kept.extend(self._inbox.take())
        while self._kept:
            self._do(shelf, self._kept.popleft())
        return is_over

    def _do(self, shelf: Shelf, command: KeeperCommand) -> None:
        if isinstance(command, SaveBatch):
            self._committer.add(command)
        elif isinstance(command, PartNotSaved):
            self._committer.not_saved(command.part)
        elif isinstance(command, RowsUsed):
            self._touch(shelf, command.rows)
        else:
            self._catalogue.learn(command, self._clock())
            if isinstance(command, RowsFailed):
                self._remove(shelf, command)

    def _pause(self, seconds: float) -> bool:
        """Wait; whether the thread is to end.  What was asked for meanwhile is kept, uses not."""
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            command = self._inbox.take_one(left)
            if command is not None and not isinstance(command, RowsUsed):
                self._kept.append(command)
            elif command is None and self._inbox.is_closed:
                return True
        return False

    def _namespace_now(self) -> str:
        """Where rows are saved to, as the engine's thread has it at this moment."""
        for command in self._inbox.take():
            if isinstance(command, NamespaceChanged):
                self._catalogue.learn(command, self._clock())
            else:
                self._kept.append(command)
        return self._catalogue.namespace

    def _step(self, shelf: Shelf) -> None:
        if len(self._committer):
            self._describe(self._catalogue.namespace)
        done = self._committer.step(shelf, self._namespace_now, self._clock())
        namespace = self._catalogue.namespace
        owed = self._owed.at(namespace)
        owed.counts["store_save_failures"] += self._committer.take_failures()
        owed.counts["store_rows_committed"] += sum(row.is_new for row in done)
        committed = [row.name for row in done if row.namespace == namespace]
        if committed:
            # Before the engine hears of it: its next look-up is to find them.
            self._lookups.put(RowsStored(namespace, committed, are_new=True))
            owed.committed += committed
        self._report()  # whatever becomes of the budget
        if self._budget is not None:
            evicted = self._budget.step(shelf, namespace)
            listing = self._budget.take_listing()
            if listing is not None:
                owed.gone += self._list_anew(listing)
            if evicted:
                owed.gone += evicted
                self._learn_too(RowsGone(namespace, evicted))
            rows, nbytes = self._budget.take_evicted()
            owed.counts["store_rows_evicted"] += rows
            owed.counts["store_evicted_bytes"] += nbytes
            owed.usage = self._budget.usage()
        self._report()

    def _list_anew(self, listing: Iterable[StoredRow]) -> list[RowName]:
        """The rows of all namespaces were listed; those of ours that were known and are gone."""
        namespace = self._catalogue.namespace
        here = [row.name for row in listing if row.namespace == namespace]
        return self._learn_too(RowsListed(namespace, here))

    def _learn_too(self, learnt: Learnt) -> list[RowName]:
        """Learn it, and let the look-ups, too."""
        self._lookups.put(learnt)
        return self._catalogue.learn(learnt, self._clock())

    def _report(self) -> None:
        """Report what the engine does not know, as far as it has taken what was reported."""
        while len(self._outbox.items) < _REPORTS_AT_ONCE:
            report = self._owed.take_report()
            if report is None:
                return
            self._outbox.put_quietly(report)

    def _touch(self, shelf: Shelf, rows: Sequence[RowName]) -> None:
        now = self._clock()
        due = [row for row in rows if now - self._touched.get(row, -_TOUCH_S) >= _TOUCH_S]
        if len(self._touched) > 1 << 17:
            self._touched.clear()
        self._touched.update(dict.fromkeys(due, now))
        try:
            shelf.touch(self._catalogue.namespace, due)
        except StoreError as error:  # such as a root that we may only read
            log.debug("pdconn: store: use not noted: %s", error)

    def _remove(self, shelf: Shelf, failed: RowsFailed) -> None:
        if self._budget is not None:
            for row in failed.damaged:
                self._budget.remove(shelf, failed.namespace, row)
                log.warning("pdconn: store: damaged row removed: row=%s", row.file_name)
        if failed.namespace == self._catalogue.namespace:
            owed = self._owed.at(failed.namespace)
            owed.gone += [*failed.missing, *failed.damaged]
