"""The engine's half of saving: which rows of running requests are saved, and the way to the keeper.

A pass of the engine computes tokens ``[before, after)`` of a request.  Rows are saved in the
step in which their last token is computed: all window blocks of the pass exist until the next
step is scheduled, and some are freed then::

    pass            before ...................... after
    FA rows                 [ 4 ][ 5 ][ 6 ][ 7 ]          every row that is not there yet
    WA boundaries                     ^        ^          by spacing, the last one, the junction

A boundary may need WA rows before its own.  When it ends in the next pass, they are saved in
this one: the next frees blocks of which they are made.

Rows that are there already, or are being saved, are left out, so a prefix that was found in the
engine's own cache is saved once if the store lacks it.

No row is saved behind one that is missing, since no prompt could reach it.  Where there was no room
for a row of full attention, the next pass that completes a row begins with it again: its blocks are
still there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdconn.lifecycle.promises import BreakReason
from pdconn.planning.plan import window_start
from pdconn.protocol.keep import SessionKey
from pdconn.protocol.ticket import BlockList
from pdconn.store.budget.fair_room import FairRoom
from pdconn.store.engine.keeper_thread import (
    REPORTS_AT_ONCE,
    KeeperCommand,
    KeeperReport,
    PartNotSaved,
    SaveBatch,
)
from pdconn.store.engine.lookups import (
    LookupAnswer,
    NamespaceChanged,
    RowsFailed,
    ShareSizes,
)
from pdconn.store.engine.row_uses import RowsUsed, RowUse
from pdconn.store.format.prompt_rows import Chain, Spacing, can_resume, pieces
from pdconn.store.format.row import RowKind, RowName, StoreLayout, row_kind
from pdconn.store.rank_commands import SaveFailed, SaveResult, SaveRow, SaveRows, StoreCommand
from pdconn.threads import AmountBox, Box, ThreadDied, Worker
from registration.references import AttentionKind, KVCacheGroupReference

MAX_STORED = 1 << 17
"""Keys of each kind that the engine's thread remembers."""
MAX_WAITING = 4096
"""Uses of rows are dropped while more commands wait for the keeper, which may hang in its shelf."""
MAX_TOLD = 1024
"""Sessions that are to be told of rows that are gone; those that never come again are forgotten."""


NoteRows = Callable[[Sequence[RowName], Sequence[RowName]], None]
"""Called with rows committed and rows gone, on the engine's thread."""


class StoredKeys:
    """Keys of rows that are there, those of the latest requests, by kind.

    Bounded: when the young ones are half of the most, the old ones are forgotten.
    """

    def __init__(self) -> None:
        self._young: dict[RowKind, dict[bytes, None]] = {kind: {} for kind in RowKind}
        self._old: dict[RowKind, dict[bytes, None]] = {kind: {} for kind in RowKind}

    def has_row(self, name: RowName) -> bool:
        """Whether the row is known to be there."""
        return name.key in self._young[name.kind] or name.key in self._old[name.kind]

    def add_keys(self, kind: RowKind, keys: Sequence[bytes]) -> None:
        """Add keys of rows that are there."""
        young = self._young[kind]
        young.update(dict.fromkeys(keys))
        if len(young) > MAX_STORED // 2:
            self._old[kind], self._young[kind] = young, {}

    def remove_rows(self, names: Iterable[RowName]) -> None:
        """Drop the keys of rows that are gone."""
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
        namespace: where the engine's rows are, until :meth:`change_namespace`.
        note_rows: called with rows committed and gone.
        clock: seconds that never go back.
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
        clock: Callable[[], float],
        note_rows: NoteRows | None = None,
    ) -> None:
        self.sizes = sizes
        self._clock, self._shares = clock, FairRoom()
        self._worker, self._lookups = worker, lookups
        self._row_nbytes, self._room = row_nbytes, room
        self._namespace = namespace
        self._note_rows = note_rows or (lambda new, gone: None)
        self._saving: set[RowName] = set()
        self._stored = StoredKeys()
        self._counts: Counter[str] = Counter()
        self._usage: dict[str, int] = {}
        self._broken: dict[SessionKey, BreakReason] = {}
        self._unreported: dict[SessionKey, BreakReason] = {}
        worker.start_thread()

    def is_wanted(self, name: RowName) -> bool:
        """Whether the row is neither being saved nor known to be there."""
        return name not in self._saving and not self._stored.has_row(name)

    def note_lookup(self, answer: LookupAnswer) -> None:
        """Add the keys of rows that a look-up has found."""
        if answer.namespace == self._namespace:
            for kind, keys in answer.there:
                self._stored.add_keys(kind, keys)

    def admit_rows(self, names: Sequence[RowName]) -> list[RowName]:
        """Those of ``names``, from the first on, that the budget has room for now."""
        taken: list[RowName] = []
        for name in names:
            if self._room is not None and not self._admits(self._room, name):
                self._counts["store_saves_skipped"] += len(names) - len(taken)
                break
            taken.append(name)
        self._saving.update(taken)
        return taken

    def _admits(self, room: AmountBox, name: RowName) -> bool:
        """Take a row's bytes from the room, as far as those that are left are not others'."""
        nbytes = self._row_nbytes[name.kind]
        if self._shares.admits(name.tenant, nbytes, room.amount, self._clock()):
            return room.take_amount(nbytes)
        room.note_missed()
        return False

    def add_batch(self, batch: SaveBatch) -> None:
        """Have rows committed once all ranks have written them."""
        self._worker.inbox.put(batch)

    def part_not_saved(self, part: str) -> None:
        """Report that a rank cannot save its share of the row."""
        self._worker.inbox.put(PartNotSaved(part))

    def rows_used(self, rows: Sequence[RowName]) -> None:
        """Note that rows were loaded."""
        self.note_use(RowsUsed(rows))

    def note_use(self, use: RowUse) -> bool:
        """Note a use of rows; returns whether it is, and is not dropped: the keeper hangs."""
        is_noted = len(self._worker.inbox.items) < MAX_WAITING
        if is_noted:
            self._worker.inbox.put(use)
        return is_noted

    def take_broken(self, key: SessionKey) -> BreakReason | None:
        """Why rows that were kept for a session are gone; None if none are, or it was told."""
        self.take_reports()
        self._unreported.pop(key, None)
        return self._broken.pop(key, None)

    def take_unreported(self, most: int) -> list[tuple[SessionKey, BreakReason]]:
        """Sessions that lost rows which were kept, as neither reported nor told yet; each once."""
        taken = list(itertools.islice(self._unreported.items(), most))
        for key, _ in taken:
            del self._unreported[key]
        return taken

    def rows_failed(self, missing: Iterable[RowName], damaged: Iterable[RowName]) -> None:
        """Report rows that could not be read, and damaged ones, which are removed."""
        failed = RowsFailed(self._namespace, tuple(missing), tuple(damaged))
        self._stored.remove_rows((*failed.missing, *failed.damaged))
        self._lookups.put(failed)
        self._worker.inbox.put(failed)

    def change_namespace(self, namespace: str) -> None:
        """Save and look up rows in ``namespace`` from now on."""
        self._namespace = namespace
        self._stored = StoredKeys()
        changed = NamespaceChanged(namespace)
        self._lookups.put(changed)
        self._worker.inbox.put(changed)

    def is_saving(self) -> bool:
        """Whether a row is being saved."""
        self.take_reports()
        return bool(self._saving)

    def take_keeper_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        self.take_reports()
        if not self._counts:
            return {}
        counts, self._counts = self._counts, Counter()
        return {name: amount for name, amount in counts.items() if amount}

    def budget_gauges(self) -> dict[str, int]:
        """Gauges: bytes of the budget, as last seen."""
        self.take_reports()
        return self._usage

    def take_reports(self) -> None:
        """Apply some of the keeper's reports; called in each step."""
        reports = self._worker.outbox.items
        for _ in range(min(len(reports), REPORTS_AT_ONCE)):
            report = reports.popleft()
            if isinstance(report, ThreadDied):
                # Rows that are being saved are not committed, and no others are admitted.
                self._saving.clear()
                self._room = AmountBox()
            else:
                self._take_report(report)

    def close(self) -> None:
        """End the thread; rows whose notes are all there are committed first."""
        self._worker.end_thread(20.0)

    def _take_report(self, report: KeeperReport) -> None:
        self._saving.difference_update(report.settled)
        self._counts.update(report.counts)
        self._usage = report.usage
        for table in (self._broken, self._unreported):
            table.update(report.broken)
            while len(table) > MAX_TOLD:
                del table[next(iter(table))]
        if report.namespace != self._namespace:  # from before a reset
            return
        for name in report.committed:
            self._stored.add_keys(name.kind, (name.key,))
        self._stored.remove_rows(report.gone)
        if report.committed or report.gone:
            self._note_rows(report.committed, report.gone)


IsWanted = Callable[[RowName], bool]
"""Whether a row is neither there nor being saved."""
IsHeld = Callable[[RowName], bool]
"""Whether the engine holds all blocks of which a row is made."""


@dataclass(slots=True, eq=False)
class Saving:
    """What is saved of one request: rows before block ``next_block`` were decided on.

    ``hole`` is the first of these blocks whose FA row there was no room for, or None; ``junction``
    the block at whose end this prompt parts from those saved before, or None.
    """

    chain: Chain
    num_prompt_tokens: int
    next_block: int = 0
    hole: int | None = None
    junction: int | None = None

    def note_admitted(self, wanted: Sequence[RowName], admitted: Sequence[RowName]) -> None:
        """Note which of the rows that were to be saved are."""
        saved = set(admitted)
        missing = (n.index for n in wanted if n.kind is RowKind.FA and n not in saved)
        self.hole = next(missing, None)

    def always(self) -> frozenset[int]:
        """Blocks whose ends are saved whatever the spacing: the last of the prompt, the junction.

        A prompt of whole blocks has two last ones: the next turn resumes at its end, the same
        prompt a block before, since its last token is computed.
        """
        size = self.chain.block_tokens
        last = {self.num_prompt_tokens // size - 1, (self.num_prompt_tokens - 1) // size - 1}
        return frozenset(last if self.junction is None else last | {self.junction})


def rows_to_save(
    saving: Saving, layout: StoreLayout, spacing: Spacing, after: int, is_wanted: IsWanted
) -> list[RowName]:
    """Rows whose tokens end at or before ``after``, FA in order and then WA in order."""
    until = min(after // layout.block_tokens, len(saving.chain.keys))
    if until <= saving.next_block:
        return []
    first = saving.next_block if saving.hole is None else saving.hole
    saving.next_block, saving.hole = until, None
    chain = saving.chain
    names = [chain.name(RowKind.FA, index) for index in range(first, until)]
    if layout.wa is not None:
        chosen: dict[int, None] = {}
        for block in spacing.boundaries(first, until + 1, saving.always()):
            boundary = (block + 1) * layout.block_tokens
            if can_resume(layout, boundary):
                chosen |= dict.fromkeys(pieces(layout.wa, boundary))
        names += [chain.name(RowKind.WA, index) for index in sorted(chosen) if index < until]
    return [name for name in names if is_wanted(name)]


def reachable(names: Sequence[RowName], is_held: IsHeld) -> list[RowName]:
    """Those of ``names`` that the engine holds, and whose prompt can be loaded up to them."""
    held = {name for name in names if is_held(name)}
    lacking = (n.index for n in names if n.kind is RowKind.FA and n not in held)
    hole = min(lacking, default=None)
    return [n for n in names if n in held and (hole is None or n.index < hole)]


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Which blocks of each KV cache group of the engine a row is made of.

    ``groups`` are as rows keep them, see :func:`~pdconn.store.format.row.as_kept`.
    """

    block_tokens: int
    groups: tuple[KVCacheGroupReference, ...]

    def positions(self, name: RowName) -> list[range]:
        """Logical positions of blocks by group; empty where the row needs none.

        Of windowed groups, what the row's own end attends to, which is all that a later
        boundary can need of it; of states the block that holds it after the row's last token.
        """
        start, end = name.index * self.block_tokens, (name.index + 1) * self.block_tokens
        found = []
        for group in self.groups:
            if row_kind(group.kind) is not name.kind or not group.data:
                found.append(range(0))
            elif group.kind is AttentionKind.STATE:
                found.append(range(end // group.block_tokens - 1, end // group.block_tokens))
            else:
                first = max(start, window_start(group, end))
                found.append(range(first // group.block_tokens, -(-end // group.block_tokens)))
        return found

    def has_all(self, name: RowName, ids: tuple[list[int], ...]) -> bool:
        """Whether the row's blocks are all there: none is freed or not allocated yet."""
        for blocks, positions in zip(ids, self.positions(name), strict=True):
            if positions.stop > len(blocks) or not all(blocks[positions.start : positions.stop]):
                return False
        return True


def block_lists(
    rows: RowBlocks, names: list[RowName], ids: tuple[list[int], ...]
) -> tuple[BlockList, ...]:
    """The blocks of all ``names``, one list per group from the first needed to the last."""
    lists = []
    per_name = [rows.positions(name) for name in names]
    for number in range(len(rows.groups)):
        wanted = [positions[number] for positions in per_name if positions[number]]
        first = min((positions.start for positions in wanted), default=0)
        stop = max((positions.stop for positions in wanted), default=0)
        lists.append(BlockList(first, tuple(ids[number][first:stop])))
    return tuple(lists)


@dataclass(frozen=True, slots=True)
class Save:
    """Rows that are being saved, and blocks that are pinned until the ranks have read them."""

    number: int
    blocks: tuple[BlockList, ...]
    rows: tuple[RowName, ...]


class Saves:
    """Saves of one engine.

    Args:
        layout: of whole rows.
        spacing, blocks: where windows are saved, and which blocks rows are made of.
        num_ranks: that read blocks.
        keeper: commits rows.
        commands: for the ranks; those of saves are added.
    """

    def __init__(
        self,
        layout: StoreLayout,
        spacing: Spacing,
        blocks: RowBlocks,
        *,
        num_ranks: int,
        keeper: Keeper,
        commands: list[StoreCommand],
    ) -> None:
        self._layout, self._spacing, self._blocks = layout, spacing, blocks
        self._num_ranks, self._keeper, self._commands = num_ranks, keeper, commands
        self._reading: dict[int, int] = {}
        self._number = 0

    def __len__(self) -> int:
        """Saves whose blocks some rank has not read yet."""
        return len(self._reading)

    def save_rows(
        self,
        saving: Saving,
        after: int,
        ids: Callable[[], tuple[list[int], ...]],
        namespace: str,
    ) -> Save | None:
        """Save what ends at or before ``after``, as far as its blocks and room for it are there.

        Args:
            ids: gives the request's blocks by group, holes and all.
            namespace: where rows are now.
        """
        wanted = self._keeper.is_wanted
        names = rows_to_save(saving, self._layout, self._spacing, after, wanted)
        if not names:
            return None
        by_group = ids()
        held = reachable(names, lambda name: self._blocks.has_all(name, by_group))
        admitted = self._keeper.admit_rows(held)
        saving.note_admitted(names, admitted)
        if not admitted:
            return None
        names = admitted
        self._number += 1
        rows = tuple(SaveRow(name, f"{self._number}-{at}") for at, name in enumerate(names))
        blocks = block_lists(self._blocks, names, by_group)
        self._reading[self._number] = self._num_ranks
        self._commands.append(SaveRows(self._number, blocks, rows))
        self._keeper.add_batch(SaveBatch(namespace, rows))
        return Save(self._number, blocks, tuple(names))

    def note_save(self, result: SaveResult | SaveFailed) -> int | None:
        """Apply a rank's result.  Returns the number of a save whose blocks all ranks have read."""
        if isinstance(result, SaveFailed):
            self._keeper.part_not_saved(result.part)
        elif (left := self._reading.get(result.number, 0) - 1) > 0:
            self._reading[result.number] = left
        elif self._reading.pop(result.number, None) is not None:
            return result.number
        return None
