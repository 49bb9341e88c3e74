"""Uses of rows, which the keeper's thread notes in the shelf: loaded now, or kept for a session.

A row that is kept has a use that lies ahead, at the time until which it is kept::

    used long ago          loaded now              until
    ────▲─────────────────────▲──────────────────────▲─────►
        evicted first                                evicted last

So all processes of a root go by one order, whichever of them evicts.  What is kept outlives the
engine that has promised it, ends by itself, and gives way when there is nothing else to evict: the
promise first whose time is up first.  The table of promises (:mod:`pdconn.lifecycle.promises`) is
each engine's own: it bounds them, by a share of the capacity over the number of engines, and knows
whom to tell when a row is gone all the same.

Two engines may keep one row.  Each ends only the mark that it has made itself, and renews those of
its other promises, so a mark that one has ended is there again within seconds, if another one's
promise needs it; in the same way an engine learns of rows that others have removed.

Kept for a session are the rows that its next turn would load: full attention from the beginning to
the last boundary that is there or being saved, and the windows and states of that boundary.  A row
that is still being saved is marked when it is committed.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdconn.lifecycle.promises import (
    BreakReason,
    KeepRefused,
    Pin,
    PromiseBroken,
    PromiseEffect,
    PromiseLimits,
    Promises,
    Unpin,
)
from pdconn.protocol.keep import SessionKey
from pdconn.store.budget.row_tree import TouchedRows
from pdconn.store.engine.lookups import Catalogue, Extras
from pdconn.store.format.prompt_rows import Chain, find_boundary, rows_needed
from pdconn.store.format.row import RowKind, RowName, StoreLayout
from pdconn.store.shelf.interface import SAME_USE_S, Shelf
from pdconn.store.store_errors import StoreError

log = logging.getLogger(__name__)

_RENEW_S = 0.5
_RENEWED_AT_ONCE = 256
_RENEW_FOR_S = 0.05
"""How often kept rows are looked at, how many of them at a time, in turns, and for how long: each
look is a round trip to the server of a network's file system, and commits wait meanwhile."""


class RowUse:
    """What is noted of rows; none of it is owed to anyone while the keeper is far behind."""


@dataclass(frozen=True, slots=True)
class RowsUsed(RowUse):
    """Rows were loaded."""

    rows: Sequence[RowName]


@dataclass(frozen=True, slots=True)
class TurnCame(RowUse):
    """A later turn of a session has come."""

    key: SessionKey


@dataclass(frozen=True, slots=True)
class TurnEnded(RowUse):
    """A turn has ended whose rows are to be kept for ``seconds``.

    The first ``num_tokens`` of ``tokens`` are computed, and do not change any more.  ``chain`` has
    the keys that are known, ``extras`` gives what else they depend on.
    """

    key: SessionKey
    seconds: float
    namespace: str
    chain: Chain
    tokens: Sequence[int]
    extras: Extras
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SessionReleased(RowUse):
    """Nothing is to be kept for a session any more."""

    key: SessionKey


class KeepBudget(Protocol):
    """The byte budget, as far as it bounds what is kept."""

    def keep_limits(self) -> PromiseLimits | None:
        """The bounds of this engine's promises, in bytes; None if it keeps nothing."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A promise's rows in the shelf; times are of the day.

    ``until`` is the use that was noted, ``before`` the one that counts when the promise is over.
    """

    rows: tuple[RowName, ...]
    until: float
    before: float


@dataclass(slots=True)
class _MarkedRow:
    """The promises that keep a row, and the time until which the longest of them does."""

    numbers: set[int]
    until: float


class _Marks:
    """The marks of promises, by the promises' numbers, and by their rows."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}
        # The row that was looked at longest ago is the first.
        self._rows: OrderedDict[RowName, _MarkedRow] = OrderedDict()
        self._renewed_at = float("-inf")

    def __len__(self) -> int:
        return len(self._marks) + len(self._rows)

    def add_mark(self, number: int, mark: _Mark) -> None:
        self._marks[number] = mark
        for row in mark.rows:
            kept = self._rows.setdefault(row, _MarkedRow(set(), mark.until))
            kept.numbers.add(number)
            kept.until = max(kept.until, mark.until)

    def until(self, row: RowName) -> float | None:
        """Until when a row is kept; None if it is not."""
        kept = self._rows.get(row)
        return None if kept is None else kept.until

    def end_mark(self, number: int) -> tuple[float, list[tuple[RowName, float]]]:
        """The use that was noted for a promise, and its rows with those that count now."""
        mark = self._marks.pop(number)
        uses: list[tuple[RowName, float]] = []
        for row in mark.rows:
            kept = self._rows[row]
            kept.numbers.discard(number)
            if not kept.numbers:
                del self._rows[row]
                uses.append((row, mark.before))
                continue
            # Only then: a thousand sessions may share the rows of a system prompt.
            if mark.until == kept.until:
                kept.until = max(self._marks[one].until for one in kept.numbers)
            uses.append((row, kept.until))
        return mark.until, uses

    def take_due(self, clock: Callable[[], float]) -> Iterator[tuple[RowName, float]]:
        """Some of the rows, in turns, and until when they are kept."""
        began = clock()
        if began - self._renewed_at < _RENEW_S:
            return
        self._renewed_at = began
        for _ in range(min(_RENEWED_AT_ONCE, len(self._rows))):
            row = next(iter(self._rows))
            self._rows.move_to_end(row)
            yield row, self._rows[row].until
            if clock() - began >= _RENEW_FOR_S:
                return


class RowUses:
    """Notes uses of rows, on the keeper's thread.  A shelf that refuses costs no more than that.

    Args:
        layout: of whole rows.
        row_nbytes: bytes of a row of each kind, as the budget counts them.
        budget: bounds what is kept; None for a store that is only read.
        clock: seconds that never go back; ``now`` gives the time of day, as uses of rows do.

    Attributes:
        counts: for metrics; the owner takes them.
    """

    def __init__(
        self,
        layout: StoreLayout,
        row_nbytes: Mapping[RowKind, int],
        budget: KeepBudget | None,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._layout, self._budget = layout, budget
        self._clock, self._now = clock, now
        self._touched = TouchedRows()
        self._promises: Promises[SessionKey, RowName] = Promises(
            PromiseLimits(0, 0, 1.0), lambda row: row_nbytes[row.kind]
        )
        self._namespace = ""
        self._marks = _Marks()
        self.counts: Counter[str] = Counter()
        self._has_broken = False
        self._refused: list[SessionKey] = []

    def __contains__(self, row: RowName) -> bool:
        """Whether a use of the row was noted lately."""
        return row in self._touched

    @property
    def gauges(self) -> dict[str, int]:
        """Gauges for metrics; none for a store that is only read."""
        if self._budget is None:
            return {}
        kept = self._promises
        return {"store_kept_bytes": kept.size, "store_kept_sessions": kept.num_kept}

    # What the engine reports

    def note_use(
        self, shelf: Shelf, use: RowUse, catalogue: Catalogue, saving: Collection[RowName]
    ) -> None:
        """Note a use.

        Args:
            catalogue: of the rows that are there.
            saving: rows that are being saved.
        """
        self.follow(shelf, catalogue.namespace)
        match use:
            case RowsUsed(rows):
                self._touch(shelf, self._touched.take_due(rows, self._clock()))
            case TurnCame(key):
                self._note_turn(shelf, key, saving)
            case TurnEnded():
                self._keep_turn(shelf, use, catalogue, saving)
            case SessionReleased(key):
                self._perform(shelf, self._promises.release(key))

    def _note_turn(self, shelf: Shelf, key: SessionKey, saving: Collection[RowName]) -> None:
        """Count a turn that has come back to its rows, if all of them are there."""
        # Another process may have evicted some, of which this one learns late.
        rows = (row for row in self._promises.items_of(key) if row not in saving)
        try:
            gone = [row for row in rows if shelf.used_at(self._namespace, row) is None]
        except StoreError as error:
            log.debug("pdconn: store: kept rows not looked at: %s", error)
            return
        self.note_gone(shelf, gone)
        self.counts["store_promises_used"] += self._promises.use(key)

    def _keep_turn(
        self, shelf: Shelf, turn: TurnEnded, catalogue: Catalogue, saving: Collection[RowName]
    ) -> None:
        limits = None if self._budget is None else self._budget.keep_limits()
        # Rows of before a reset are of no use to a next turn.
        if limits is None or turn.namespace != self._namespace:
            return
        rows = self._rows_of_turn(turn, catalogue, saving)
        self._promises.limits = limits
        effects = self._promises.keep(turn.key, rows, turn.seconds, self._clock())
        if any(isinstance(effect, KeepRefused) for effect in effects):
            # The answer, which has not waited for this thread, says that they are kept.
            self._refused.append(turn.key)
            self._has_broken = True
        if not self._perform(shelf, effects):  # nothing is promised that eviction does not know of
            self._perform(shelf, self._promises.release(turn.key))
            rows = []
        self.counts["store_promises_refused"] += not rows

    def _rows_of_turn(
        self, turn: TurnEnded, catalogue: Catalogue, saving: Collection[RowName]
    ) -> list[RowName]:
        """The rows that a next turn would load, which goes on behind what is computed now."""
        extras = turn.extras()
        if extras is None:
            return []
        chain = turn.chain.extended(turn.tokens, turn.num_tokens, extras)
        limit = min(turn.num_tokens, len(chain.keys) * chain.block_tokens)

        def is_there(kind: RowKind, index: int) -> bool:
            return catalogue.has_key(kind, chain.keys[index]) or chain.name(kind, index) in saving

        boundary = find_boundary(self._layout, limit, is_there)
        return [chain.name(kind, at) for kind, at in rows_needed(self._layout, 0, boundary)]

    # What happens to rows

    def follow(self, shelf: Shelf, namespace: str) -> None:
        """End promises whose time is up, and all of another namespace: the cache was reset."""
        self._perform(shelf, self._promises.expire(self._clock()))
        if namespace != self._namespace:
            self._perform(shelf, self._promises.drop_all())
            self._namespace = namespace

    def renew_marks(self, shelf: Shelf, saving: Collection[RowName]) -> None:
        """Mark some of the kept rows anew, in turns, and break promises whose rows are gone."""
        gone = []
        try:
            for row, until in self._marks.take_due(self._clock):
                seen = shelf.used_at(self._namespace, row)
                if seen is None:
                    if row not in saving:
                        gone.append(row)
                elif abs(seen - until) >= SAME_USE_S:
                    shelf.touch(self._namespace, [row], until)
        except StoreError as error:
            log.debug("pdconn: store: kept rows not looked at: %s", error)
        self.note_gone(shelf, gone)

    def note_committed(self, shelf: Shelf, rows: Iterable[RowName]) -> None:
        """Mark rows that were promised while they were being saved."""
        for row in rows:
            if (until := self._marks.until(row)) is not None:
                self._touch(shelf, [row], until)

    def note_gone(self, shelf: Shelf, rows: Iterable[RowName]) -> None:
        """Break the promises that need rows which are gone."""
        self._perform(shelf, self._promises.note_gone(rows))

    def take_broken(self) -> list[tuple[SessionKey, BreakReason]]:
        """Sessions to tell of promises broken since the last call, or refused, and why."""
        if not self._has_broken:
            return []
        self._has_broken = False
        found = ((key, self._promises.tell(key)) for key in [key for key, _ in self._promises])
        refused, self._refused = self._refused, []
        return [
            *((key, why) for key, why in found if why is not None),
            *((key, BreakReason.SHARE) for key in refused),
        ]

    # Marks

    def _perform(self, shelf: Shelf, effects: Iterable[PromiseEffect[RowName]]) -> bool:
        """Perform what promises ask for, all of it; returns whether all rows could be marked."""
        is_marked = True
        for effect in effects:
            match effect:
                case Pin():
                    is_marked = self._pin(shelf, effect) and is_marked
                    self.counts["store_promises_made"] += is_marked
                case Unpin(number):
                    self._unpin(shelf, number)
                case PromiseBroken(why):
                    self.counts[f"store_promises_broken_{why}"] += 1
                    self._has_broken = True
                case KeepRefused():
                    self.counts["store_promises_refused"] += 1
        return is_marked

    def _pin(self, shelf: Shelf, pin: Pin[RowName]) -> bool:
        before = self._now()
        # A whole second, which every file system notes exactly: `release` knows its mark by it.
        until = float(math.ceil(before + pin.until - self._clock()))
        self._marks.add_mark(pin.number, _Mark(pin.items, until, before))
        return self._touch(shelf, pin.items, until)

    def _unpin(self, shelf: Shelf, number: int) -> None:
        """Rows are kept no longer than for other promises of ours; a mark of others stays."""
        until, uses = self._marks.end_mark(number)
        time_of_day = self._now() - self._clock()
        for row, used_at in uses:
            # Loads since the promise was made: the mark was later than they are.
            at = max(used_at, self._touched.last_use(row) + time_of_day)
            try:
                shelf.move_use(self._namespace, [row], until, at)
            except StoreError as error:
                log.debug("pdconn: store: use not noted: %s", error)

    def _touch(self, shelf: Shelf, rows: Sequence[RowName], at: float | None = None) -> bool:
        """Note a use of rows; returns whether the shelf has."""
        try:
            shelf.touch(self._namespace, rows, at)
        except StoreError as error:  # such as a root that we may only read
            log.debug("pdconn: store: use not noted: %s", error)
            return False
        return True
