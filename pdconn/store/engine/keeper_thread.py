"""The keeper's thread in the scheduler's process: commits, budget, eviction.

::

    engine's thread   Keeper ── SaveBatch, RowsUsed, RowsFailed, … ──► KeeperLoop ──► shelf,
                        ◄── KeeperReport: settled, committed, gone ──      │      ledger, evictor
                        takes from AmountBox ◄── bytes that may be written ┘
    look-ups          ◄── RowsListed, RowsStored, RowsGone ────────────────┘

The engine's thread makes no system call for it: rows to save are admitted by an allowance that the
keeper keeps topped up.

Every rank writes a note beside a part.  When the notes of all ranks are there, their checksums go
into the footer, and the part gets the row's name.  Readers rely on the order: FA rows before WA
rows, since a WA row says that its boundary can be resumed.

A row is given up at once if a rank reports that it cannot save its share, and after a minute if
notes are missing, as those of a rank that died or hangs.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import structs

from pdconn.lifecycle.promises import BreakReason
from pdconn.protocol.keep import SessionKey
from pdconn.sidechannel.quiet_log import QuietLog
from pdconn.store.engine.lookups import (
    Catalogue,
    Learnt,
    NamespaceChanged,
    RowsFailed,
    RowsGone,
    RowsListed,
    RowsStored,
)
from pdconn.store.engine.row_uses import KeepBudget, RowUse, RowUses
from pdconn.store.format.footer import Footer, encode_footer, largest_row_sizes
from pdconn.store.format.row import RowKind, RowName, StoreLayout
from pdconn.store.rank_commands import SaveRow
from pdconn.store.settings import REPEAT_S
from pdconn.store.shelf.interface import Shelf, StoredPart, StoredRow
from pdconn.store.store_errors import RowDamaged, StoreError
from pdconn.threads import AmountBox, Box, ThreadDied

log = logging.getLogger(__name__)

NOTES_S = 60.0
"""How long ranks may take to write a row after another was committed."""

_AGAIN_S = 30.0
_LATEST_S = 3600.0
_MOST_GIVEN_UP = 1024
"""How often, for how long, and how many parts that were given up are discarded again."""

_AHEAD = 4
"""So many rows of a tenant without all notes end a look for its notes: ranks write rows in order,
and tenants in turn."""
_MOST_AHEAD = 64
"""Of all tenants."""


class CommitBudget(Protocol):
    """The byte budget as commits use it: taken bytes become a row's, or are returned."""

    def commit_row(self, shelf: Shelf, part: StoredPart, namespace: str, name: RowName) -> bool:
        """Commit a part of taken bytes; False if the row was there."""

    def release_bytes(self, nbytes: int) -> None:
        """Return taken bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class SaveBatch:
    """Rows of one SaveRows."""

    namespace: str
    rows: Sequence[SaveRow]


@dataclass(frozen=True, slots=True)
class Committed:
    """A row that is there now; ``is_new`` unless another engine had committed it."""

    namespace: str
    name: RowName
    nbytes: int
    is_new: bool


@dataclass(slots=True, eq=False)
class _Unnoted:
    """A row whose notes are not all there; ``since`` is when a step first looked for them."""

    batch: SaveBatch
    row: SaveRow
    since: float = 0.0


class PendingRows:
    """Rows that wait for their notes.

    Attributes:
        rows: by name, in the order in which ranks write them.
    """

    def __init__(self) -> None:
        self.rows: dict[RowName, _Unnoted] = {}
        self._added: list[_Unnoted] = []
        self._not_saved: set[str] = set()
        self._last_note = float("-inf")

    def add_batch(self, batch: SaveBatch) -> None:
        """Add rows that the ranks write."""
        for row in batch.rows:
            waiting = self.rows[row.name] = _Unnoted(batch, row)
            self._added.append(waiting)

    def drop_row(self, row: SaveRow) -> None:
        """Drop a row that is committed or given up."""
        del self.rows[row.name]
        self._not_saved.discard(row.part)

    def part_not_saved(self, part: str) -> None:
        """Note that a rank can neither save its share of the row nor write a note."""
        if any(each.row.part == part for each in self.rows.values()):
            self._not_saved.add(part)

    def begin_step(self, now: float) -> None:
        """Let rows that were added since the last step wait from now on."""
        for each in self._added:
            each.since = now
        self._added.clear()

    def note_written(self, now: float) -> None:
        """Note that the notes of a row are all there."""
        self._last_note = now

    def may_come(self, waiting: _Unnoted, now: float) -> bool:
        """Whether notes that a row lacks may still be written."""
        if waiting.row.part in self._not_saved:
            return False
        # It is late if neither the row was added nor any row was written within the time.
        return now - max(self._last_note, waiting.since) <= NOTES_S


class GivenUpParts:
    """Parts of rows that were given up.

    They are discarded again for an hour: a late rank may make one anew, with bytes that are
    reserved no more.
    """

    def __init__(self, writer: str, warnings: QuietLog) -> None:
        self._writer, self._warnings = writer, warnings
        self._parts: dict[str, float] = {}
        self._discarded_at = float("-inf")

    def give_up(self, shelf: Shelf, part: str, now: float) -> bool:
        """Discard a part.  Returns whether it is gone: else its bytes stay reserved."""
        self._parts[part] = now
        if len(self._parts) > _MOST_GIVEN_UP:
            del self._parts[next(iter(self._parts))]
        return self._discard(shelf, part)

    def discard_again(self, shelf: Shelf, now: float) -> None:
        """Discard them again, every half minute."""
        if not self._parts or now - self._discarded_at < _AGAIN_S:
            return
        self._discarded_at = now
        for part, since in list(self._parts.items()):
            if now - since > _LATEST_S:
                del self._parts[part]
            else:
                self._discard(shelf, part)

    def _discard(self, shelf: Shelf, part: str) -> bool:
        try:
            shelf.discard(self._writer, part)
        except StoreError as error:
            self._warnings.warning("pdconn: store: part not removed: part=%s: %s", part, error)
            return False
        return True


class Committer:
    """Commits parts once their notes are there.

    Args:
        writer: our name in the names of parts.
        num_ranks: notes that every part gets.
        settled: called with each row that is not being saved any more, committed or not.

    Attributes:
        pending: the rows that are being saved.
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
        self._nbytes = largest_row_sizes(layout)
        self.pending = PendingRows()
        self._failures = 0
        self._warnings = QuietLog(log, pause_s=REPEAT_S)
        self._given_up = GivenUpParts(writer, self._warnings)

    def take_failures(self) -> int:
        """Rows that could not be committed since the last call."""
        failures, self._failures = self._failures, 0
        return failures

    def commit_written(
        self, shelf: Shelf, namespace: Callable[[], str], now: float
    ) -> list[Committed]:
        """Commit the rows that all ranks have written.

        Rows of another namespace than the engine's present one are dropped: the prefix cache
        was reset while they were being saved.
        """
        done, pending, unwritten = [], self.pending, Counter[bytes]()
        pending.begin_step(now)
        for each in list(pending.rows.values()):
            batch, row = each.batch, each.row
            if unwritten.total() >= _MOST_AHEAD:
                break
            if unwritten[row.name.tenant] >= _AHEAD:
                continue
            # 1. A WA row waits while its FA row does.
            if (
                row.name.kind is RowKind.WA
                and structs.replace(row.name, kind=RowKind.FA) in pending.rows
            ):
                continue
            # 2. A row waits for its notes as long as they may come.
            notes = shelf.notes(self._writer, row.part)
            if len(notes) == self._num_ranks:
                pending.note_written(now)
            elif pending.may_come(each, now):
                unwritten[row.name.tenant] += 1
                continue
            # 3. It is committed, or given up.
            pending.drop_row(row)
            made = None
            try:
                # After the notes: a reset frees blocks, and a row that was gathered after it may
                # hold other requests' bytes.
                if batch.namespace == namespace():
                    made = self._commit(shelf, batch, row, [notes[rank] for rank in notes])
            except StoreError as error:
                self._failures += 1
                self._warnings.warning(
                    "pdconn: store: not saved: row=%s: %s", row.name.file_name, error
                )
            if made is not None:
                done.append(made)
            elif self._given_up.give_up(shelf, row.part, now) and self._budget is not None:
                self._budget.release_bytes(self._nbytes[row.name.kind])
            self._settled(row.name)
        self._given_up.discard_again(shelf, now)
        return done

    def _commit(
        self, shelf: Shelf, batch: SaveBatch, row: SaveRow, notes: Sequence[bytes]
    ) -> Committed | None:
        # A WA row says that its boundary can be resumed, which takes its FA row.
        if row.name.kind is RowKind.WA and not self._has_full(shelf, batch.namespace, row.name):
            return None
        layout = self._layout.for_kind(row.name.kind)
        if len(notes) < self._num_ranks:
            raise RowDamaged(f"notes: expected {self._num_ranks}, got {len(notes)}")
        footer = Footer.from_notes(batch.namespace, row.name, layout, notes)
        data = memoryview(bytearray(encode_footer(footer)))
        ranges = [(at, memoryview(bytes(size))) for at, size in footer.unwritten_ranges(layout)]
        shelf.write(self._writer, row.part, [*ranges, (footer.data_nbytes, data)])
        nbytes, taken = footer.nbytes, self._nbytes[row.name.kind]
        if self._budget is None:
            is_new = shelf.commit(self._writer, row.part, batch.namespace, row.name)
        else:
            part = StoredPart(self._writer, row.part, nbytes)
            is_new = self._budget.commit_row(shelf, part, batch.namespace, row.name)
        made = Committed(batch.namespace, row.name, nbytes, is_new)
        self._catalogue.learn_rows(RowsStored(batch.namespace, (row.name,), are_new=True), 0.0)
        if self._budget is not None:
            # Of a packed row more was taken than it has now.
            self._budget.release_bytes(taken - nbytes if is_new else taken)
        return made

    def _has_full(self, shelf: Shelf, namespace: str, name: RowName) -> bool:
        """Whether the FA row is there, which another engine may have saved."""
        known = self._catalogue.has_key(RowKind.FA, name.key)
        return known or shelf.has(namespace, structs.replace(name, kind=RowKind.FA))


_BUSY_S = 0.02
"""Between looks for notes while rows are being saved."""
_IDLE_S = 0.5
_FAULT_S = 5.0
"""From a failure of the shelf to the next try."""
_ROWS_AT_ONCE = 512
REPORTS_AT_ONCE = 16
"""The most rows gone in one report, and the most reports that wait for the engine: one without
work takes no step for hours, while others evict."""


class Budget(CommitBudget, KeepBudget, Protocol):
    """The byte budget, as the keeper uses it."""

    @property
    def room(self) -> AmountBox:
        """Bytes that may be written, kept topped up by :meth:`make_room`."""

    def open_accounts(self, shelf: Shelf) -> None:
        """Open the accounts; called before all others."""

    def make_room(self, shelf: Shelf, namespace: str) -> list[RowName]:
        """Top up and evict.  Returns the evicted rows of ``namespace``."""

    def remove_damaged(self, shelf: Shelf, namespace: str, name: RowName) -> int:
        """Remove a damaged row.  Returns its bytes."""

    def usage_gauges(self) -> dict[str, int]:
        """Gauges for metrics."""

    def take_listing(self) -> list[StoredRow] | None:
        """All rows that are there, if they were listed anew since the last call."""

    def take_evicted(self) -> tuple[int, int]:
        """Rows of any namespace, and their bytes, evicted since the last call."""

    def close(self) -> None:
        """Give back what was not used."""


@dataclass(frozen=True, slots=True)
class PartNotSaved:
    """A rank cannot save its share of a row."""

    part: str


@dataclass(frozen=True, slots=True)
class KeeperReport:
    """What has changed since the last report.

    Attributes:
        namespace: of rows committed and gone.
        settled: rows that are not being saved any more, committed or given up.
        committed: rows that are there now.
        gone: rows that are not there any more.
        usage: gauges of the budget, and of what is kept.
        broken: sessions of which rows that were kept are gone, and why.
    """

    namespace: str
    settled: Sequence[RowName]
    committed: Sequence[RowName]
    gone: Sequence[RowName]
    counts: Mapping[str, int]
    usage: dict[str, int]
    broken: Sequence[tuple[SessionKey, BreakReason]] = ()


KeeperCommand = SaveBatch | PartNotSaved | RowUse | Learnt


class _Owed:
    """What the next reports say."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.settled: list[RowName] = []
        self.committed: list[RowName] = []
        self.gone: list[RowName] = []
        self.counts: Counter[str] = Counter()
        self.usage: dict[str, int] = {}
        self.broken: list[tuple[SessionKey, BreakReason]] = []
        self._reported_usage: dict[str, int] = {}

    def in_namespace(self, namespace: str) -> _Owed:
        """This, without rows of another namespace: after a reset they do not count."""
        if namespace != self.namespace:
            self.namespace = namespace
            self.committed, self.gone = [], []
        return self

    def take_report(self) -> KeeperReport | None:
        """The next report; None if nothing has changed."""
        counts = {name: amount for name, amount in self.counts.items() if amount}
        has_rows = self.settled or self.committed or self.gone or self.broken
        if not (has_rows or counts or self.usage != self._reported_usage):
            return None
        gone, self.gone = self.gone[:_ROWS_AT_ONCE], self.gone[_ROWS_AT_ONCE:]
        report = KeeperReport(
            self.namespace, self.settled.copy(), self.committed, gone, counts, dict(self.usage),
            self.broken,
        )  # fmt: skip
        self.settled.clear()  # the committer adds to this very list
        self.committed, self.broken, self._reported_usage = [], [], self.usage
        self.counts.clear()
        return report


class KeeperLoop:
    """What the keeper's thread owns: the shelf, the budget, and the rows that are being saved.

    Args:
        inbox, outbox: of :class:`Keeper`.
        lookups: the inbox of the look-ups.
        catalogue: of the rows that are there; the committer's, too.
        shelf: opens the shelf, on the thread.
        budget: the byte budget; None for a store that is only read.
        uses: notes uses of rows, and keeps them for sessions.
        committer: makes the committer, given ``settled``, which is called for each row.
        describe: writes the layout beside the rows of a namespace, to verify them with.
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
        uses: RowUses,
        committer: Callable[..., Committer],
        clock: Callable[[], float],
        describe: Callable[[str], None] = lambda namespace: None,
    ) -> None:
        self._inbox, self._outbox, self._lookups = inbox, outbox, lookups
        self._catalogue, self._budget = catalogue, budget
        self._open_shelf, self._clock, self._describe = shelf, clock, describe
        self._owed = _Owed(catalogue.namespace)
        self._committer = committer(settled=self._owed.settled.append)
        self._uses = uses
        self._kept: deque[KeeperCommand] = deque()

    def run_keeper(self) -> None:
        """Run commands, and a step at least every half second, until the inbox is closed."""
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
            self._budget.open_accounts(shelf)
            # Taken now: rows that are committed before the first step are not in it.
            listing = self._budget.take_listing()
        rows = shelf.rows(self._catalogue.namespace) if listing is None else listing
        self._list_anew(rows)
        return shelf

    def _take_commands(self, shelf: Shelf) -> bool:
        """Run the commands that have come.  Returns whether the thread ends."""
        wait_s = _BUSY_S if self._committer.pending.rows else _IDLE_S
        if not self._kept and (first := self._inbox.take_one(wait_s)) is not None:
            self._kept.append(first)
        is_over = self._inbox.is_closed
        self._kept.extend(self._inbox.take_all())
        while self._kept:
            self._do(shelf, self._kept.popleft())
        return is_over

    def _do(self, shelf: Shelf, command: KeeperCommand) -> None:
        if isinstance(command, SaveBatch):
            self._committer.pending.add_batch(command)
        elif isinstance(command, PartNotSaved):
            self._committer.pending.part_not_saved(command.part)
        elif isinstance(command, RowUse):
            self._uses.note_use(shelf, command, self._catalogue, self._committer.pending.rows)
        else:
            self._catalogue.learn_rows(command, self._clock())
            if isinstance(command, RowsFailed):
                self._remove(shelf, command)

    def _pause(self, seconds: float) -> bool:
        """Wait, and keep commands but those that note uses.  Returns whether the thread ends."""
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            command = self._inbox.take_one(left)
            if command is not None and not isinstance(command, RowUse):
                self._kept.append(command)
            elif command is None and self._inbox.is_closed:
                return True
        return False

    def _namespace_now(self) -> str:
        """The engine's present namespace, also if its change still waits in the inbox."""
        for command in self._inbox.take_all():
            if isinstance(command, NamespaceChanged):
                self._catalogue.learn_rows(command, self._clock())
            else:
                self._kept.append(command)
        return self._catalogue.namespace

    def _step(self, shelf: Shelf) -> None:
        if self._committer.pending.rows:
            self._describe(self._catalogue.namespace)
        done = self._committer.commit_written(shelf, self._namespace_now, self._clock())
        namespace = self._catalogue.namespace
        owed = self._owed.in_namespace(namespace)
        owed.counts["store_save_failures"] += self._committer.take_failures()
        owed.counts["store_rows_committed"] += sum(row.is_new for row in done)
        committed = [row.name for row in done if row.namespace == namespace]
        self._uses.follow(shelf, namespace)
        self._uses.renew_marks(shelf, self._committer.pending.rows)
        if committed:
            self._uses.note_committed(shelf, committed)
            # Before the report, so that the engine's next look-up finds them.
            self._lookups.put(RowsStored(namespace, committed, are_new=True))
            owed.committed += committed
        self._report()  # before the budget, which may fail
        if self._budget is not None:
            evicted = self._budget.make_room(shelf, namespace)
            listing = self._budget.take_listing()
            gone = [] if listing is None else self._list_anew(listing)
            if evicted:
                gone += evicted
                self._update_catalogues(RowsGone(namespace, evicted))
            self._uses.note_gone(shelf, gone)
            owed.gone += gone
            rows, nbytes = self._budget.take_evicted()
            owed.counts["store_rows_evicted"] += rows
            owed.counts["store_evicted_bytes"] += nbytes
            owed.usage = self._budget.usage_gauges() | self._uses.gauges
        owed.counts.update(self._uses.counts)
        self._uses.counts.clear()
        owed.broken += self._uses.take_broken()
        self._report()

    def _list_anew(self, listing: Iterable[StoredRow]) -> list[RowName]:
        """Learn a listing of all namespaces.  Returns known rows of ours that are gone."""
        namespace = self._catalogue.namespace
        here = [row.name for row in listing if row.namespace == namespace]
        return self._update_catalogues(RowsListed(namespace, here))

    def _update_catalogues(self, learnt: Learnt) -> list[RowName]:
        """Update the catalogues of this thread and of the look-ups."""
        self._lookups.put(learnt)
        return self._catalogue.learn_rows(learnt, self._clock())

    def _report(self) -> None:
        """Report what has changed, while the engine has few reports to take."""
        while len(self._outbox.items) < REPORTS_AT_ONCE:
            report = self._owed.take_report()
            if report is None:
                return
            self._outbox.put_quietly(report)

    def _remove(self, shelf: Shelf, failed: RowsFailed) -> None:
        if self._budget is not None:
            for row in failed.damaged:
                self._budget.remove_damaged(shelf, failed.namespace, row)
                log.warning("pdconn: store: damaged row removed: row=%s", row.file_name)
        if failed.namespace == self._catalogue.namespace:
            gone = [*failed.missing, *failed.damaged]
            self._owed.in_namespace(failed.namespace).gone += gone
            self._uses.note_gone(shelf, gone)
