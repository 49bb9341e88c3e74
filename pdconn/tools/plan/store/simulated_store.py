"""A store without files: the rules of :mod:`pdconn.store`, applied to names of rows.

What decides is the store's own code, so the simulation cannot drift from it::

    look-up    Fitting.largest: the boundary of which all rows are there, within staging
    saving     rows_to_save, Spacing: which rows of a pass are written
    budget     Allowance: what may be written now; Evictor and RowTree: what goes, and when
    ledger     RowCount, WriterAccount, sum_usage

Here are only the dictionaries that stand for the folder (:class:`SimulatedRoot`), and which windows
and states an engine still holds when it saves.  Requests run one after another, and what a pass has
saved is there when the next begins: a real keeper commits within milliseconds.

Eviction depends on the order of uses alone, so each commit and each hit is one tick of a counter;
the trace's own times say only which uses a keeper notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from pdconn.store.budget.accounts import Accounts, RowCount, Usage, WriterAccount, sum_usage
from pdconn.store.budget.root_budget import LEAST_ROWS, Allowance, Evictor
from pdconn.store.budget.row_tree import TouchedRows
from pdconn.store.engine.lookups import Fitting, ShareSizes
from pdconn.store.engine.saves import Saving, reachable, rows_to_save
from pdconn.store.format.footer import row_sizes
from pdconn.store.format.prompt_rows import Chain, Spacing, reach, rows_at_end
from pdconn.store.format.row import RowKind, RowName, StoreLayout
from pdconn.store.shelf.interface import Shelf, StoredRow
from registration.references import AttentionKind

_NAMESPACE = ""


@dataclass(frozen=True, slots=True)
class NamedChain(Chain):
    """A chain whose row names are made once, for every store that is simulated."""

    full: tuple[RowName, ...] = ()
    windows: tuple[RowName, ...] = ()

    def name(self, kind: RowKind, index: int) -> RowName:
        """The row of block ``index``."""
        return self.full[index] if kind is RowKind.FA else self.windows[index]


class SimulatedRoot:
    """The rows, the accounts and the clock of a root: what a folder is to a real store.

    Args:
        capacity: bytes.

    Attributes:
        rows: names by kind and key.
        most_nbytes: the most bytes of rows that were there at once.
    """

    def __init__(self, capacity: int) -> None:
        self.rows: dict[RowKind, dict[bytes, RowName]] = {kind: {} for kind in RowKind}
        self.most_nbytes = 0
        self._count = RowCount(0, 0)
        self._own = WriterAccount(0, 0, capacity)
        self._used_at: dict[RowName, tuple[int, int]] = {}
        self._news: list[StoredRow] = []
        self._touched = TouchedRows()
        self._tick = 0

    def add_rows(self, names: Sequence[RowName], nbytes: int) -> None:
        """Commit rows of one kind, of ``nbytes`` each, which are reserved."""
        if not names:
            return
        there = self.rows[names[0].kind]
        for at, name in enumerate(names, self._tick + 1):
            there[name.key] = name
            self._used_at[name] = nbytes, at
            self._news.append(StoredRow(_NAMESPACE, name, nbytes, at))
        self._tick += len(names)
        total = nbytes * len(names)
        self._count = self._count.plus(total, names[0].kind)
        self._own.reserved -= total
        self.most_nbytes = max(self.most_nbytes, self._count.committed)

    def note_uses(self, names: Sequence[RowName], at_s: float) -> None:
        """Note that rows were loaded together."""
        self._tick += 1
        for name in self._touched.take_due(names, at_s):
            self._used_at[name] = self._used_at[name][0], self._tick

    @property
    def now(self) -> float:
        """The time as uses of rows have it."""
        return self._tick

    # As accounts, of one writer

    def usage(self) -> Usage:
        """The usage now."""
        return sum_usage(self._count, [self._own])

    def reserve(self, nbytes: int) -> int:
        """Reserve up to ``nbytes``.  Returns those granted."""
        granted = min(nbytes, self.usage().free)
        self._own.reserved += granted
        self._own.wanted = nbytes - granted
        return granted

    def release_reserved(self, nbytes: int) -> None:
        """Give back reserved bytes."""
        self._own.reserved -= nbytes

    def take_news(self) -> list[StoredRow]:
        """Rows that were committed since the last call."""
        news, self._news = self._news, []
        return news

    def list_rows(self, shelf: object) -> list[StoredRow]:
        """The rows that are there."""
        del shelf
        self._news = []
        return [StoredRow(_NAMESPACE, name, *known) for name, known in self._used_at.items()]

    def evict_row(self, shelf: object, namespace: str, name: RowName) -> int:
        """Remove a row.  Returns its bytes."""
        del shelf, namespace
        nbytes, _ = self._used_at.pop(name)
        del self.rows[name.kind][name.key]
        self._count = self._count.plus(-nbytes, name.kind)
        return nbytes

    def try_evictor(self) -> int:
        """There is one process: it is the evictor."""
        return 0

    def is_evictor(self, fd: int) -> bool:
        """As :meth:`try_evictor`."""
        return fd == 0

    # As a shelf

    def used_at(self, namespace: str, name: RowName) -> float | None:
        """When the row was last used; None if there is no such row."""
        del namespace
        known = self._used_at.get(name)
        return None if known is None else known[1]


@dataclass(frozen=True, slots=True)
class SimulatedSettings:
    """What rows an engine saves and loads; as in the store's settings.

    Attributes:
        sizes: bytes of a row in staging.
        pass_tokens: the most tokens that the engine computes in a pass.
    """

    layout: StoreLayout
    spacing: Spacing
    sizes: ShareSizes
    staging: int
    min_tokens: int
    pass_tokens: int
    saves_answers: bool = False
    wa_share: float | None = None

    @property
    def has_states(self) -> bool:
        """Whether rows hold states, which are there only where a pass ended."""
        wa = self.layout.wa
        return wa is not None and any(one.kind is AttentionKind.STATE for one in wa.sections)


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A request as a store sees it.

    Attributes:
        chain: keys of its prompt's whole blocks, and of its answer's.
        num_tokens: tokens of the prompt.
        answer_tokens: tokens of the answer.
        at_s: seconds; only differences count.
    """

    chain: NamedChain
    num_tokens: int
    answer_tokens: int = 0
    at_s: float = 0.0


@dataclass(slots=True)
class _Asked:
    """Says whether rows of a prompt are there; ``full`` counts leading FA rows that are."""

    keys: Sequence[bytes]
    rows: dict[RowKind, dict[bytes, RowName]]
    full: int = 0

    def __call__(self, kind: RowKind, index: int) -> bool:
        is_there = self.keys[index] in self.rows[kind]
        if is_there and kind is RowKind.FA and index >= self.full:
            self.full = index + 1
        return is_there


@dataclass(slots=True)
class StoreCounts:
    """What a simulated store has done."""

    hits: int = 0
    hit_tokens: int = 0
    loaded: dict[RowKind, int] = field(default_factory=lambda: dict.fromkeys(RowKind, 0))
    saved: int = 0
    skipped: int = 0
    evicted: int = 0


class SimulatedStore:
    """A store of one capacity.

    Attributes:
        counts: what it has done.
        root: its rows.
    """

    def __init__(self, settings: SimulatedSettings, capacity: int) -> None:
        self.counts = StoreCounts()
        self.root = SimulatedRoot(capacity)
        self._settings, self._has_states = settings, settings.has_states
        self._row_nbytes = row_sizes(settings.layout)
        self._allowance = Allowance(LEAST_ROWS * sum(self._row_nbytes.values()))
        # Its accounts and its shelf are those of a root as the evictor and the allowance use them.
        self._accounts = cast("Accounts", self.root)
        # Time stands still for it: it lists the rows once, and knows all that come after.
        self._evictor = Evictor(
            self._accounts, settings.wa_share, lambda: 0.0, lambda: self.root.now
        )
        self._make_room()

    def serve(self, prompt: TracedPrompt, held: int) -> int:
        """Load what can be loaded of a prompt, and save what the engine computes.

        Args:
            held: tokens that the engine's own cache holds.

        Returns:
            tokens after ``held`` that are loaded.
        """
        layout, keys = self._settings.layout, prompt.chain.keys
        saving = Saving(prompt.chain, prompt.num_tokens)
        limit = min(prompt.num_tokens - 1, len(keys) * layout.block_tokens)
        loaded, least = 0, max(self._settings.min_tokens, 1)
        if prompt.num_tokens - 1 - held >= least:
            asked = _Asked(keys, self.root.rows)
            tokens = range(held, max(limit, held))
            sizes, staging = self._settings.sizes, self._settings.staging
            found = Fitting.largest(layout, sizes, staging, tokens, asked)
            saving.junction = asked.full - 1 if asked.full else None
            if found.boundary - held >= least:
                loaded = found.boundary - held
                self._note_load(prompt, found, loaded)
        self._save(prompt, saving, held + loaded)
        return loaded

    def _note_load(self, prompt: TracedPrompt, found: Fitting, loaded: int) -> None:
        name, there = prompt.chain.name, self.root.rows
        used = [name(kind, index) for kind, index in found.rows]
        for kind, index in rows_at_end(self._settings.layout, found.boundary, prompt.num_tokens):
            if prompt.chain.keys[index] in there[kind]:
                used.append(name(kind, index))
        self.root.note_uses(used, prompt.at_s)
        self.counts.hits += 1
        self.counts.hit_tokens += loaded
        num_windows = sum(kind is RowKind.WA for kind, _ in found.rows)
        self.counts.loaded[RowKind.WA] += num_windows
        self.counts.loaded[RowKind.FA] += len(found.rows) - num_windows

    def _save(self, prompt: TracedPrompt, saving: Saving, start: int) -> None:
        layout, spacing = self._settings.layout, self._settings.spacing
        for passed in self._passes(prompt, saving, start):
            names = rows_to_save(saving, layout, spacing, passed.stop, self._is_wanted)
            if names:
                held = reachable(names, partial(self._is_held, passed=passed))
                saving.note_admitted(names, held[: self._write(held)])
                self._make_room()

    def _is_wanted(self, name: RowName) -> bool:
        return name.key not in self.root.rows[name.kind]

    def _write(self, names: Sequence[RowName]) -> int:
        """Commit rows as far as there is room for them now, as a keeper admits them.

        Returns:
            How many of them, from the first on, were admitted.
        """
        full, admitted = self.root.rows[RowKind.FA], 0
        for kind, nbytes in self._row_nbytes.items():
            new = []
            for name in names:
                if name.kind is not kind:
                    continue
                if not self._allowance.room.take_amount(nbytes):
                    self.counts.skipped += len(names) - admitted
                    names = ()
                    break
                admitted += 1
                if kind is RowKind.WA and name.key not in full:
                    self._allowance.give_back(nbytes)  # its boundary could not be resumed
                else:
                    new.append(name)
            self.root.add_rows(new, nbytes)
            self.counts.saved += len(new)
        return admitted

    def _make_room(self) -> None:
        """A keeper's steps until the next pass: evict, and top up what may be written."""
        # Two are enough: the second frees what the first has reserved, or found no room for.
        for _ in range(2):
            self.counts.evicted += len(self._evictor.evict_rows(cast("Shelf", self.root)))
            self._allowance.top_up(self._accounts)

    # What the engine computes, and still holds

    def _passes(self, prompt: TracedPrompt, saving: Saving, start: int) -> Iterator[range]:
        """Tokens of each pass that may complete a row, from ``start`` on."""
        num_tokens, size = prompt.num_tokens, self._settings.layout.block_tokens
        before = start
        while before < num_tokens:
            after = self._end_of_pass(before, num_tokens, saving.junction)
            yield range(before, after)
            before = after
        if self._settings.saves_answers:
            # The last token of an answer is not computed.
            until = (num_tokens + prompt.answer_tokens - 1) // size * size
            for end in range(num_tokens // size * size + size, until + 1, size):
                yield range(end - 1, end)

    def _end_of_pass(self, before: int, num_tokens: int, junction: int | None) -> int:
        after = min(before + self._settings.pass_tokens, num_tokens)
        if not self._has_states:
            return after
        # As vLLM aligns passes of models with states: to ends of blocks, of which the prompt's last
        # one is the end of a pass, and so is the place where two prompts part.
        size = self._settings.layout.block_tokens
        last = num_tokens // size * size
        for end in (0 if junction is None else (junction + 1) * size, last):
            if before < end < after:
                return end
        return after if before >= last else max(before + size, after // size * size)

    def _is_held(self, name: RowName, passed: range) -> bool:
        """Whether the engine holds what a row is made of: windows from the pass's beginning on."""
        if name.kind is RowKind.FA or (not passed.start and not self._has_states):
            return True
        wa, size = self._settings.layout.wa, self._settings.layout.block_tokens
        assert wa is not None
        end = (name.index + 1) * size
        for section in wa.windows:
            if section.kind is AttentionKind.STATE:
                if end not in (passed.start, passed.stop):
                    return False
            elif max(end - size, reach(section, end)) < reach(section, passed.start):
                return False
        return True
