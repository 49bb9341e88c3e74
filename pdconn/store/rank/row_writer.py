"""One thread's saves: rows out of KV blocks, into parts and notes.

::

    KV blocks ──gather──► buffer (pack, encrypt) ──checksums──► Shelf.write, Shelf.put_note
                 └ after the last row: SaveResult, the blocks may be freed

Of each row only the slabs that this rank saves are written; where there are none, the note is
empty.  A row that cannot be saved gets a note of failure, and the scheduler's process discards its
part.

Requests do not wait for saves, so a save lets all other transfers go first, which share cores,
memory and a disk with it.  It asks before each chunk that it copies or writes: one that begins is
delayed by one chunk of a save.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdconn.lifecycle.turns import TurnKey, Urgency
from pdconn.planning.planning_errors import PlanningError
from pdconn.store.budget.locks import HeldWriter
from pdconn.store.format.footer import checksum, encode_note, failed_note, row_nbytes
from pdconn.store.format.row import RowName
from pdconn.store.format.seals import TAG_NBYTES, RowKeys
from pdconn.store.rank.copies import Copies, HostArea
from pdconn.store.rank.packed_shares import pack_share
from pdconn.store.rank.sealed_shares import seal_slabs
from pdconn.store.rank.shares import OpenedRank, OwnSlab, RowShare, joined_runs, ranges_of
from pdconn.store.rank.tasks import Answer, TaskReports
from pdconn.store.rank_commands import SaveFailed, SaveResult, SaveRow, SaveRows
from pdconn.store.shelf.interface import Shelf
from pdconn.store.store_errors import StoreError
from pdconn.threads import RightOfWay
from transport.streams import StreamPoint

CHUNK_NBYTES = 4 << 20
"""A save copies or writes at most so much before it asks again whether others move."""


@dataclass(slots=True, eq=False)
class SaveUnderWay:
    """A save: ``noted`` rows have their note, ``is_read`` once the blocks may be freed.

    It begins when the GPU has reached ``after``, the end of the pass that wrote the blocks.  Its
    rows have ``nbytes``, all ranks' shares together.
    """

    save: SaveRows
    after: StreamPoint | None
    namespace: str
    nbytes: int
    noted: int = 0
    is_read: bool = False


def turn_of_save(task: SaveUnderWay) -> TurnKey:
    """What a save is served by; its rows are of one prompt, and so of one tenant."""
    rows = task.save.rows
    return TurnKey(Urgency.SAVE, rows[0].name.tenant if rows else b"", task.nbytes)


class RowWriter:
    """One thread's saves.

    Args:
        open_shelf: opens the thread's own shelf, at the first row and again after a failure.
        copies: the thread's own, from KV memory.
        held: the lock of the writer's account; None for a store without accounts.
        right_of_way: of pulls and loads, before each chunk.
        keys: rows are encrypted with; None where they are saved as they are.
    """

    def __init__(
        self,
        opened: OpenedRank,
        buffer: HostArea,
        reports: TaskReports,
        open_shelf: Callable[[], Shelf],
        copies: Copies,
        *,
        held: HeldWriter | None,
        right_of_way: RightOfWay,
        keys: RowKeys | None = None,
    ) -> None:
        self._opened, self._buffer, self._reports = opened, buffer, reports
        self._open_shelf, self._copies, self._held = open_shelf, copies, held
        self._right_of_way = right_of_way
        self._keys = keys
        # What is written: the buffer itself, or what it holds, packed, encrypted, in another one.
        stored = opened.most_stored_nbytes
        self._packed = HostArea(stored) if opened.is_packed else buffer
        self._written = self._packed if keys is None else HostArea(stored + TAG_NBYTES)
        self._shelf: Shelf | None = None

    def close(self) -> None:
        """Close the shelf, unlock the account and unpin the buffer."""
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None
        if self._held is not None:
            self._held.close()
        self._buffer.unpin_pages()

    def do_save(self, task: SaveUnderWay) -> None:
        """Save all rows of a task; report as soon as its blocks have been read."""
        if task.after is not None:
            task.after.synchronize()
        for place, row in enumerate(task.save.rows):
            is_last = place + 1 == len(task.save.rows)
            note = self._saved(task, row, is_last)
            self._put_note(row, note)
            task.noted = place + 1
        answer_save(task, self._reports)

    def _saved(self, task: SaveUnderWay, row: SaveRow, is_last: bool) -> bytes:
        """Gather and write one row.  Returns its note."""
        index = row.name.index
        try:
            share = self._opened.kinds[row.name.kind].share
            slabs: Sequence[OwnSlab] = share.written(index)
            if slabs:
                self._gather(task.save, row, share)
            if is_last:
                answer_save(task, self._reports)
            if share.heads:
                slabs = self._pack(index, share)
            seals = self._seal(task.namespace, row.name, share, slabs)
            sums = {
                slab.number: checksum(self._written.bytes_at(slab.offset, slab.nbytes))
                for slab in slabs
            }
            if self._held is not None:
                self._held.renew_account()
            has_spilled = any(slab.spilled is not None for slab in slabs)
            layout = share.whole.most if has_spilled else share.whole
            self._own_shelf().begin(self._opened.writer, row.part, row_nbytes(layout))
            if slabs:
                self._write(row, slabs)
        except (StoreError, PlanningError) as error:
            self._reports.warn("a row was not saved: row=%s: %s", row.name.file_name, error)
            return self._failure(row, str(error))
        return encode_note(sums, seals)

    def _gather(self, save: SaveRows, row: SaveRow, share: RowShare) -> None:
        """Fill the buffer with our share of a row: KV, and zeros where there is none."""
        pairing = self._opened.kinds[row.name.kind].pairing
        parts = pairing.spans_to_save(row.name.index, save.blocks, self._buffer.address)
        if sum(spans.total_bytes for spans in parts) < share.nbytes:
            ctypes.memset(self._buffer.address, 0, share.nbytes)
        for spans in parts:
            for chunk in spans.chunks(CHUNK_NBYTES):
                self._give_way()
                self._copies.copy_out(chunk)

    def _pack(self, index: int, share: RowShare) -> Sequence[OwnSlab]:
        """Pack the heads that were gathered.  Returns what is to be written."""
        data = self._buffer.bytes_at(0, share.nbytes)
        packed = pack_share(share, index, data, self._packed.bytes_at(0, share.stored_nbytes))
        spilled = sum(slab.spilled is not None for slab in packed)
        self._reports.add_counts(heads_spilled=spilled)
        return packed

    def _seal(
        self, namespace: str, name: RowName, share: RowShare, slabs: Sequence[OwnSlab]
    ) -> dict[int, bytes] | None:
        """Encrypt slabs that were gathered.  Returns their seals; None where rows have none."""
        if self._keys is None:
            return None
        # A new one each time, also for a row that could not be written just before: no nonce is
        # used again.
        sealer = self._keys.new_sealer(namespace, name)
        data = self._packed.bytes_at(0, share.stored_nbytes)
        into = self._written.bytes_at(0, share.stored_nbytes + TAG_NBYTES)
        return seal_slabs(slabs, data, sealer, into)

    def _write(self, row: SaveRow, slabs: Sequence[OwnSlab]) -> None:
        runs, shelf = joined_runs(slabs), self._own_shelf()
        written = self._written.bytes_at(0, self._written.nbytes)
        for chunk in _chunks(runs) if shelf.cuts_writes else [runs]:
            self._give_way()
            shelf.write(self._opened.writer, row.part, ranges_of(chunk, written))
        nbytes = sum(nbytes for _, _, nbytes in runs)
        self._reports.add_counts(rows_written=1, bytes_written=nbytes)

    def _give_way(self) -> None:
        if not self._right_of_way.give_way(Urgency.SAVE):
            self._reports.add_counts(turns_overdue=1)

    def _put_note(self, row: SaveRow, note: bytes) -> None:
        try:
            self._own_shelf().put_note(self._opened.writer, row.part, self._opened.rank, note)
        except StoreError as error:
            self._reports.add_counts(write_failures=1)
            self._reports.warn("a note was not left: row=%s: %s", row.name.file_name, error)
            self._reports.answer(SaveFailed(row.part))

    def _failure(self, row: SaveRow, why: str) -> bytes:
        self._reports.add_counts(write_failures=1)
        return failed_note(why)

    def _own_shelf(self) -> Shelf:
        if self._shelf is None:
            self._shelf = self._open_shelf()
        return self._shelf


def _chunks(runs: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Runs (offset in the row, offset in the buffer, bytes), cut and grouped into chunks."""
    chunk: list[tuple[int, int, int]] = []
    left = CHUNK_NBYTES
    for at, start, nbytes in runs:
        done = 0
        while done < nbytes:
            part = min(left, nbytes - done)
            chunk.append((at + done, start + done, part))
            done, left = done + part, left - part
            if not left:
                yield chunk
                chunk, left = [], CHUNK_NBYTES
    if chunk:
        yield chunk


def answer_save(task: SaveUnderWay, reports: TaskReports) -> None:
    """Report that the blocks may be freed, once."""
    if not task.is_read:
        task.is_read = True
        reports.answer(SaveResult(task.save.number))


def refuse_save(
    task: SaveUnderWay,
    writer: str,
    rank: int,
    open_shelf: Callable[[], Shelf],
    reports: TaskReports,
) -> None:
    """Answer a save that cannot go on, and write notes of failure for its other rows."""
    answer_save(task, reports)
    rows = task.save.rows[task.noted :]
    reports.add_counts(write_failures=len(rows))
    try:
        with open_shelf() as shelf:
            for row in rows:
                shelf.put_note(writer, row.part, rank, failed_note("the rank's store failed"))
    except StoreError as error:
        reports.warn("notes were not left: rows=%d: %s", len(rows), error)
        for row in rows:
            reports.answer(SaveFailed(row.part))


def unsaved(task: SaveUnderWay) -> list[Answer]:
    """The answers to a save that no thread has begun: none of its rows gets a note."""
    return [SaveResult(task.save.number), *(SaveFailed(row.part) for row in task.save.rows)]
