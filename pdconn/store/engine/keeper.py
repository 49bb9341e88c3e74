"""The keeper's thread in the scheduler's process: commits, budget, eviction.

::

    engine's thread   Keeper ── SaveBatch, RowsUsed, RowsFailed, … ──► KeeperLoop ──► shelf,
                        ◄── KeeperReport: settled, committed, gone ──      │      ledger, evictor
                        takes from AmountBox ◄── bytes that may be written ┘
    look-ups          ◄── RowsListed, RowsStored, RowsGone ────────────────┘

The engine's thread asks it for nothing that takes a system call: rows to save are admitted by
an allowance that the keeper keeps topped up.

Rows that all ranks have written become visible in an order that readers rely on.  Every rank leaves
a note beside a part.  When the notes of all ranks are there, their checksums go into the footer,
and the part gets the row's name.  Within a batch FA rows come first and WA rows last, and a WA row
is committed only if its FA row is there: it tells readers that the boundary can be resumed.

A row of which a rank says that it cannot save its share is given up at once, and one whose notes
do not come, of a rank that died or hangs, after a minute.  A rank that was late may make the part
anew, of bytes that nobody reserved any more: parts that were given up are discarded again.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pdconn.sidechannel.quiet_log import QuietLog
from pdconn.store.commands import SaveRow
from pdconn.store.engine.lookups import (
    Catalogue,
    Learnt,
    NamespaceChanged,
    RowsFailed,
    RowsGone,
    RowsListed,
    RowsStored,
)
from pdconn.store.errors import RowDamaged, StoreError
from pdconn.store.format.row import (
    Footer,
    RowKind,
    RowName,
    StoreLayout,
    decode_note,
    encode_footer,
    joined,
    row_nbytes,
)
from pdconn.store.settings import REPEAT_S
from pdconn.store.shelf.base import Shelf, StoredPart, StoredRow
from pdconn.threads import AmountBox, Box, ThreadDied

log = logging.getLogger(__name__)

NOTES_S = 60.0
"""How long ranks may take to write a row after another was committed."""

_AGAIN_S = 30.0
_LATEST_S = 3600.0
_MOST_GIVEN_UP = 1024
"""How often, for how long, and how many parts that were given up are discarded again."""

_AHEAD = 4
"""Rows without their notes, after which no more are looked at: ranks write them in order."""


def row_sizes(layout: StoreLayout) -> dict[RowKind, int]:
    """Bytes of a row of each kind with its footer."""
    sizes = {RowKind.FA: row_nbytes(layout.fa)}
    if layout.wa is not None:
        sizes[RowKind.WA] = row_nbytes(layout.wa)
    return sizes


class CommitBudget(Protocol):
    """What commits ask of the byte budget: reserved bytes become a row's, or are free again."""

    def commit(self, shelf: Shelf, part: StoredPart, namespace: str, name: RowName) -> bool:
        """Commit a part of taken bytes, to be evicted one day; False if the row was there."""

    def release(self, nbytes: int) -> None:
        """Taken bytes are free again."""


@dataclass(frozen=True, slots=True, eq=False)
class SaveBatch:
    """Rows of one SaveRows."""

    namespace: str
    rows: Sequence[SaveRow]


@dataclass(frozen=True, slots=True)
class Committed:
    """A row that is there now; ``is_new`` unless somebody else had committed it before."""

    namespace: str
    name: RowName
    nbytes: int
    is_new: bool


@dataclass(slots=True, eq=False)
class _Unnoted:
    """A row whose notes are not all there; ``since`` the step that first saw it."""

    batch: SaveBatch
    row: SaveRow
    since: float | None = None


class Committer:
    """Parts that wait for their notes.

    Args:
        writer: our name in the names of parts.
        num_ranks: notes that every part gets.
        settled: called with each row that is not being saved any more, committed or not.
    """

    def __init__(
        self,
        layout: StoreLayout,
        *,
        writer: str,
        num_ranks: int,
        catalogue: Catalogue,
        budget: CommitBudget | None,
        settled: Callable[[RowName], None],
    ) -> None:
        self._layout, self._writer, self._num_ranks = layout, writer, num_ranks
        self._catalogue, self._budget, self._settled = catalogue, budget, settled
        self._nbytes = row_sizes(layout)
        self._waiting: dict[RowName, _Unnoted] = {}
        self._added: list[_Unnoted] = []
        self._last_note: float | None = None
        self._failures = 0
        self._warnings = QuietLog(log, pause_s=REPEAT_S)
        self._not_saved: set[str] = set()
        self._given_up: dict[str, float] = {}
        self._discarded_at = float("-inf")

    def __len__(self) -> int:
        return len(self._waiting)

    def take_failures(self) -> int:
        """Rows that could not be committed since the last call."""
        failures, self._failures = self._failures, 0
        return failures

    def add(self, batch: SaveBatch) -> None:
        """Rows are on their way."""
        for row in batch.rows:
            waiting = self._waiting[row.name] = _Unnoted(batch, row)
            self._added.append(waiting)

    def not_saved(self, part: str) -> None:
        """A rank cannot save its share of the row, and has left no note."""
        if any(each.row.part == part for each in self._waiting.values()):
            self._not_saved.add(part)

    def step(self, shelf: Shelf, namespace: Callable[[], str], now: float) -> list[Committed]:
        """Commit what is written.

        Rows of another namespace than the engine's present one are dropped: the prefix cache
        was reset while they were being saved.
        """
        done = []
        if not self._waiting:
            self._last_note = None
        added, self._added = self._added, []
        for each in added:
            each.since = now
        unwritten = 0
        for each in list(self._waiting.values()):
            batch, row = each.batch, each.row
            if unwritten == _AHEAD:
                break
            if row.name.kind is RowKind.WA and replace(row.name, kind=RowKind.FA) in self._waiting:
                continue
            notes = shelf.notes(self._writer, row.part)
            if len(notes) == self._num_ranks:
                self._last_note = now
            elif row.part not in self._not_saved and not self._is_late(each, now):
                unwritten += 1
                continue
            del self._waiting[row.name]
            self._not_saved.discard(row.part)
            made = None
            try:
                # Asked after the notes were read: a reset frees blocks, and a row that was
                # gathered after it may be of others' bytes.
                if batch.namespace == namespace():
                    made = self._commit(shelf, batch, row, [notes[rank] for rank in notes])
            except StoreError as error:
                self._failures += 1
                self._warnings.warning(
                    "pdconn: store: not saved: row=%s: %s", row.name.file_name, error
                )
            if made is None:
                self._give_up(shelf, row, now)
            else:
                done.append(made)
            self._settled(row.name)
        if self._given_up and now - self._discarded_at >= _AGAIN_S:
            self._discard_again(shelf, now)
        return done

    def _is_late(self, waiting: _Unnoted, now: float) -> bool:
        """Whether neither the row was added nor any row was written within the time."""
        times = [at for at in (self._last_note, waiting.since) if at is not None]
        return bool(times) and now - max(times) > NOTES_S

    def _commit(
        self, shelf: Shelf, batch: SaveBatch, row: SaveRow, notes: Sequence[bytes]
    ) -> Committed | None:
        if row.name.kind is RowKind.WA and not self._has_full(shelf, batch.namespace, row.name):
            return None
        layout = self._layout.of(row.name.kind)
        sums = joined([decode_note(note) for note in notes], len(layout.slabs))
        if sums is None or len(notes) < self._num_ranks:
            raise RowDamaged(f"notes: expected {self._num_ranks} with every slab, got {len(notes)}")
        first = row.name.index * layout.block_tokens
        tokens = range(first, first + layout.block_tokens)
        footer = Footer(batch.namespace, row.name, tokens, layout.data_nbytes, sums)
        data = memoryview(bytearray(encode_footer(footer)))
        shelf.write(self._writer, row.part, [(layout.data_nbytes, data)])
        nbytes = self._nbytes[row.name.kind]
        if self._budget is None:
            is_new = shelf.commit(self._writer, row.part, batch.namespace, row.name)
        else:
            part = StoredPart(self._writer, row.part, nbytes)
            is_new = self._budget.commit(shelf, part, batch.namespace, row.name)
        made = Committed(batch.namespace, row.name, nbytes, is_new)
        self._catalogue.learn(RowsStored(batch.namespace, (row.name,), are_new=True), 0.0)
        if self._budget is not None and not is_new:
            self._budget.release(nbytes)
        return made

    def _has_full(self, shelf: Shelf, namespace: str, name: RowName) -> bool:
        """Whether the FA row is there, which another engine may have saved."""
        known = self._catalogue.has(RowKind.FA, name.key)
        return known or shelf.has(namespace, replace(name, kind=RowKind.FA))

    def _discard_again(self, shelf: Shelf, now: float) -> None:
        self._discarded_at = now
        for part, since in list(self._given_up.items()):
            if now - since > _LATEST_S:
                del self._given_up[part]
                continue
            try:
                shelf.discard(self._writer, part)
            except StoreError as error:
                self._warnings.warning("pdconn: store: part not removed: part=%s: %s", part, error)

    def _give_up(self, shelf: Shelf, row: SaveRow, now: float) -> None:
        self._given_up[row.part] = now
        if len(self._given_up) > _MOST_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        try:
            shelf.discard(self._writer, row.part)
        except StoreError as error:
            self._warnings.warning("pdconn: store: part not removed: part=%s: %s", row.part, error)
            return  # its bytes are there, and stay reserved
        if self._budget is not None:
            self._budget.release(self._nbytes[row.name.kind])


_BUSY_S = 0.02
"""How often notes are looked for while rows are being saved."""
_IDLE_S = 0.5
_TOUCH_S = 60.0
"""A row's last use is noted that often at most."""
_FAULT_S = 5.0
"""After the shelf failed, the next try."""
_ROWS_AT_ONCE = 512
REPORTS_AT_ONCE = 16
"""Rows that one report says are gone, and reports that wait for the engine's next step at once: an
engine without work takes no step for hours, while others evict."""


class Budget(CommitBudget, Protocol):
    """The byte budget, as the keeper uses it."""

    @property
    def room(self) -> AmountBox:
        """Bytes that may be written, kept topped up by :meth:`step`."""

    def open(self, shelf: Shelf) -> None:
        """Called first."""

    def step(self, shelf: Shelf, namespace: str) -> list[RowName]:
        """Top up, evict; rows of ``namespace`` that were evicted."""

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
        self._kept.extend(self._inbox.take_all())
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
        for command in self._inbox.take_all():
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
        while len(self._outbox.items) < REPORTS_AT_ONCE:
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
