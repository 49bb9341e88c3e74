"""Commits: rows that all ranks have written become visible, in an order that readers rely on.

Every rank leaves a note beside a part.  When the notes of all ranks are there, their checksums
go into the footer, and the part gets the row's name.  Within a batch FA rows come first and WA
rows last, and a WA row is committed only if its FA row is there: it tells readers that the
boundary can be resumed.

A row of which a rank says that it cannot save its share is given up at once, and one whose notes
do not come, of a rank that died or hangs, after a minute.  A rank that was late may make the part
anew, of bytes that nobody reserved any more: parts that were given up are discarded again.

Runs on the keeper's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pdconn.sidechannel.quiet_log import QuietLog
from pdconn.store.commands import SaveRow
from pdconn.store.engine.catalogue import Catalogue, RowsStored
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
from pdconn.store.shelf.base import Shelf, StoredPart

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

    def commit(self, shelf: Shelf, part: StoredPart, namespace: str, name: RowName) -> bool: ...

    def release(self, nbytes: int) -> None: ...


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
