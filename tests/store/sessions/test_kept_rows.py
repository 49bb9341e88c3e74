"""Rows kept for sessions, by two engines of one root: saves, turns, floods, crashes in any order.

No kept row goes while one that is not kept could go; what is kept is within its bounds; a session
whose rows are gone is told; and when every time is up nothing is kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from pdconn.lifecycle.promises import KeepShares, PromiseLimits, Promises, PromiseState
from pdconn.protocol.keep import SessionKey
from pdconn.store.budget.accounts import Accounts
from pdconn.store.budget.root_budget import Evictor
from pdconn.store.engine.lookups import Catalogue, RowsStored
from pdconn.store.engine.row_uses import RowUses, SessionReleased, TurnCame, TurnEnded
from pdconn.store.format.footer import row_sizes
from pdconn.store.format.prompt_rows import Chain, pieces
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.interface import StoredPart, StoredRow
from pdconn.store.store_errors import ShelfFailure
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.property.scale import LawMachine, holds, notices
from tests.store.budget.forest import needs
from tests.tools.cli.stored_rows import BLOCK, LAYOUT

SIZES = row_sizes(LAYOUT)
CAPACITY = 14 * sum(SIZES.values())
SHARES = KeepShares(share=0.9, tenant_share=0.6, seconds=500.0)
LISTING_AGE_S = 5.0
"""How long the evictor may not know that a promise has ended."""
SESSIONS = [SessionKey(tenant, name) for tenant in "ab" for name in "12"]


def tokens_of(prompt: int, blocks: int) -> list[int]:
    """Two prompts each begin with the same two blocks."""
    tokens = [1000 + prompt // 2] * (2 * BLOCK) + [prompt] * (blocks * BLOCK)
    return tokens[: blocks * BLOCK]


class Engine:
    """What one engine's keeper has: its uses of rows, and the rows that it is still saving."""

    def __init__(self, root: KeptRowsMachine) -> None:
        self.root, self.saving = root, dict[RowName, None]()
        self.uses = RowUses(LAYOUT, SIZES, self, root.clock, root.clock)
        self.told: set[SessionKey] = set()

    def step(self) -> None:
        """A step of the keeper."""
        self.uses.follow(self.root.shelf, "ns")
        self.uses.renew_marks(self.root.shelf, self.saving)
        self.told |= {key for key, _ in self.uses.take_broken()}

    def keep_limits(self) -> PromiseLimits:
        return SHARES.limits_of(CAPACITY // 2)

    @property
    def promises(self) -> Promises[SessionKey, RowName]:
        return self.uses._promises

    def catalogue(self) -> Catalogue:
        found = Catalogue("ns")
        found.learn_rows(RowsStored("ns", [row.name for row in self.root.shelf.rows()]), 0.0)
        return found

    def note(self, use: Any) -> None:
        self.uses.note_use(self.root.shelf, use, self.catalogue(), self.saving)
        self.told |= {key for key, _ in self.uses.take_broken()}


class WatchedShelf(MemoryShelf):
    """Asks the machine before a row goes."""

    def __init__(self, rows: MemoryRows, machine: KeptRowsMachine) -> None:
        super().__init__(rows)
        self._machine = machine

    def remove_row(self, namespace: str, name: RowName) -> int:
        self._machine.check_victim(name)
        return super().remove_row(namespace, name)


class KeptRowsMachine(LawMachine):
    """One root, two engines, and the clients of each."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1e6
        self.folder = tempfile.TemporaryDirectory()
        self.shelf: MemoryShelf = WatchedShelf(MemoryRows(self.clock), self)
        self.accounts = Accounts(Path(self.folder.name), "w", CAPACITY)
        self.accounts.recount(self.shelf)
        self.evictor = Evictor(self.accounts, None, self.clock, self.clock)
        self.engines = [Engine(self), Engine(self)]
        self.crashed: list[tuple[frozenset[RowName], float]] = []
        self.ended: dict[RowName, float] = {}
        self.seen: set[RowName] = set()
        self.num_kept_gone = 0

    def clock(self) -> float:
        return self.now

    # What is so

    def kept(self, engine: Engine) -> set[RowName]:
        return {
            row
            for _, one in engine.promises
            if one.state is PromiseState.KEPT and one.until > self.now
            for row in one.items
        }

    def all_kept(self) -> set[RowName]:
        of_crashed = [rows for rows, until in self.crashed if until > self.now]
        return set().union(*of_crashed, *map(self.kept, self.engines))

    def go_on(self, seconds: float = 1.0) -> None:
        """Time goes on, and the keepers take steps: one may renew what another has ended."""
        for _ in range(2):
            self.now += seconds / 2
            for engine in self.engines:
                engine.step()
        self.observe()

    def observe(self) -> None:
        """Note which rows are kept no more, and since when."""
        kept = self.all_kept()
        self.ended.update(dict.fromkeys(self.seen - kept, self.now))
        self.seen = kept

    def check_victim(self, name: RowName) -> None:
        self.observe()
        # Nobody renews what was kept by an engine that has crashed.
        if not any(name in self.kept(engine) for engine in self.engines):
            return
        self.num_kept_gone += 1
        rows = [row.name for row in self.shelf.rows()]
        spare = [
            row
            for row in rows
            if row not in self.seen
            and self.ended.get(row, 0.0) <= self.now - LISTING_AGE_S
            and not any(needs(row, other) for other in rows)
        ]
        assert not spare, f"{name} is kept, and goes before {spare}"

    # What happens

    def save(self, name: RowName) -> None:
        nbytes = SIZES[name.kind]
        if self.shelf.has("ns", name):
            return
        self.reserve(nbytes)
        self.shelf.begin("w", "p", nbytes)
        row = StoredRow("ns", name, nbytes, self.now)
        assert self.accounts.commit_row(self.shelf, StoredPart("w", "p", nbytes), row)

    def reserve(self, nbytes: int) -> None:
        granted = 0
        for _ in range(50):
            granted += self.accounts.reserve(nbytes - granted)
            if granted == nbytes:
                return
            gone = [name for _, name in self.evictor.evict_rows(self.shelf)]
            self.engines[0].uses.note_gone(self.shelf, gone)
        raise AssertionError("kept rows keep new ones out")

    def rows_of(self, prompt: int, blocks: int) -> list[RowName]:
        chain = Chain(BLOCK).extended(tokens_of(prompt, blocks))
        rows = [chain.name(RowKind.FA, index) for index in range(blocks)]
        windows = pieces(LAYOUT.wa, blocks * BLOCK)
        return rows + [chain.name(RowKind.WA, index) for index in windows]

    @rule(
        engine=st.integers(0, 1),
        key=st.sampled_from(SESSIONS),
        prompt=st.integers(0, 5),
        blocks=st.integers(1, 5),
        seconds=st.sampled_from([20.0, 200.0, 5000.0]),
        late=st.integers(0, 3),
    )
    def turn(  # noqa: PLR0917
        self, engine: int, key: SessionKey, prompt: int, blocks: int, seconds: float, late: int
    ) -> None:
        """A prompt is computed and saved, the last rows a little later, and its session kept."""
        made, rows = self.engines[engine], self.rows_of(prompt, blocks)
        soon = len(rows) - late if late < len(rows) else len(rows)
        for name in rows[:soon]:
            self.save(name)
        made.saving |= {row: None for row in rows[soon:] if not self.shelf.has("ns", row)}
        self.observe()
        tokens = [*tokens_of(prompt, blocks), 7]
        made.note(TurnCame(key))
        made.note(TurnEnded(key, seconds, "ns", Chain(BLOCK), tokens, lambda: (), blocks * BLOCK))
        self.go_on()
        for name in list(made.saving):
            self.save(name)
            made.uses.note_committed(self.shelf, [name])
        made.saving.clear()
        self.observe()
        self.marks_say_what_is_kept()
        self.go_on()

    @rule(first=st.integers(10, 10_000), count=st.integers(1, 12))
    def flood(self, first: int, count: int) -> None:
        """Other prompts come."""
        for number in range(count):
            self.go_on()
            for name in self.rows_of(2 * (first + number), 2):
                self.save(name)

    @rule(engine=st.integers(0, 1), key=st.sampled_from(SESSIONS))
    def release(self, engine: int, key: SessionKey) -> None:
        self.engines[engine].note(SessionReleased(key))
        assert not self.engines[engine].promises.items_of(key)
        self.go_on()

    @rule(engine=st.integers(0, 1), key=st.sampled_from(SESSIONS))
    def come(self, engine: int, key: SessionKey) -> None:
        """A session whose rows are gone is told when it comes again, and another is not."""
        made = self.engines[engine]
        made.uses.follow(self.shelf, "ns")
        rows = made.promises.items_of(key)
        owed = any(not self.shelf.has("ns", row) for row in rows) or key in made.told
        made.note(TurnCame(key))
        assert (key in made.told) == owed
        made.told.discard(key)
        self.go_on()

    @rule(seconds=st.sampled_from([1.0, 30.0, 300.0]))
    def wait(self, seconds: float) -> None:
        self.go_on(seconds)

    @rule(number=st.integers(0, 30))
    def use(self, number: int) -> None:
        """A row is loaded by a prompt of any session."""
        rows = sorted(row.name for row in self.shelf.rows())
        if number < len(rows):
            self.shelf.touch("ns", [rows[number]])

    @rule(number=st.integers(0, 30))
    def damage(self, number: int) -> None:
        """A row that nobody keeps has a use in a far future."""
        rows = sorted(row.name for row in self.shelf.rows())
        if number < len(rows) and rows[number] not in self.all_kept():
            self.shelf._shared.rows["ns", rows[number]].used_at = self.now + 1e9

    @rule(key=st.sampled_from(SESSIONS), engine=st.integers(0, 1))
    def drop(self, key: SessionKey, engine: int) -> None:
        """Somebody removes the last row of what is kept for a session, which hears of it soon."""
        made = self.engines[engine]
        made.uses.follow(self.shelf, "ns")
        rows = made.promises.items_of(key)
        if rows and self.shelf.has("ns", rows[-1]):
            self.accounts.remove_row(MemoryShelf(self.shelf._shared), "ns", rows[-1])
            until = next(one.until for each, one in made.promises if each == key)
            self.go_on()
            assert key in made.told or until <= self.now

    @rule(engine=st.integers(0, 1))
    def crash(self, engine: int) -> None:
        """An engine is killed: its marks stay until their time is up."""
        for _, one in self.engines[engine].promises:
            if one.state is PromiseState.KEPT:
                self.crashed.append((frozenset(one.items), one.until))
        self.engines[engine] = Engine(self)

    @invariant()
    def what_is_kept_is_within_the_bounds(self) -> None:
        for engine in self.engines:
            promises = engine.promises
            assert promises.size <= SHARES.share * CAPACITY / 2
            for tenant in "ab":
                his = {r for key, one in promises if key.tenant == tenant for r in one.items}
                assert sum(SIZES[row.kind] for row in his) <= SHARES.tenant_share * CAPACITY / 2

    @invariant()
    def marks_say_what_is_kept(self) -> None:
        """Those of live engines; marks of one that has crashed may be there until they end."""
        used = {row.name: row.used_at for row in self.shelf.rows()}
        for engine in self.engines:
            for _, one in engine.promises:
                for row in one.items if one.until > self.now else ():
                    assert used.get(row, 1e12) >= one.until - 0.01, "it could be evicted"
        for row in used.keys() - self.all_kept():
            assert used[row] <= self.now or used[row] > 1e9, "nobody keeps it any more"

    def check_end(self) -> None:
        self.go_on(10_000.0)
        self.go_on()
        for engine in self.engines:
            assert (len(engine.promises), len(engine.uses._marks)) == (0, 0)
        self.now += 2 * LISTING_AGE_S
        assert not self.all_kept()
        assert all(row.used_at <= self.now or row.used_at > 1e9 for row in self.shelf.rows())
        before = self.num_kept_gone
        self.reserve(CAPACITY - sum(row.nbytes for row in self.shelf.rows()))
        self.accounts.release_reserved(CAPACITY)
        assert self.num_kept_gone == before

    def close(self) -> None:
        self.evictor.close()
        self.accounts.close()
        self.folder.cleanup()


@pytest.mark.hypothesis
def test_kept_rows_go_last_and_no_longer_than_promised() -> None:
    holds(KeptRowsMachine, examples=120, steps=25)


def ends_late(self: RowUses, shelf: Any, pin: Any) -> bool:
    return _pin(self, shelf, type(pin)(pin.number, pin.items, pin.until + 1e5))


def moves_nothing(
    self: MemoryShelf, namespace: str, names: Sequence[RowName], old: float, new: float
) -> None: ...


def marks_nothing(
    self: MemoryShelf, namespace: str, names: Sequence[RowName], at: float | None = None
) -> None:
    _touch(self, namespace, names, None)


def uses_shorten(
    self: MemoryShelf, namespace: str, names: Sequence[RowName], at: float | None = None
) -> None:
    for name in names:
        row = self._shared.rows.get((namespace, name))
        if row is not None:
            row.used_at = self._shared.clock() if at is None else at


_pin, _touch = RowUses._pin, MemoryShelf.touch

BROKEN = {
    "a keep does not end": (RowUses, "_pin", ends_late),
    "what is released stays": (MemoryShelf, "move_use", moves_nothing),
    "eviction does not know of it": (MemoryShelf, "touch", marks_nothing),
    "a use by others ends it": (MemoryShelf, "touch", uses_shorten),
    "no bound": (Promises, "_within_limits", lambda self, new: []),
    "times are not up": (Promises, "expire", lambda self, now: []),
    "rows that come later are not": (RowUses, "note_committed", lambda self, shelf, rows: None),
    "marks are not renewed": (RowUses, "renew_marks", lambda self, shelf, saving: None),
    "nobody is told": (RowUses, "note_gone", lambda self, shelf, rows: None),
}


@pytest.mark.parametrize("what", BROKEN)
def test_that_law_notices(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    monkeypatch.setattr(*BROKEN[what])
    notices(KeptRowsMachine, examples=200, steps=25)


class RefusesMarks(MemoryShelf):
    """A file system that has become read-only."""

    refuses = False

    def touch(self, namespace: str, names: Sequence[RowName], at: float | None = None) -> None:
        if self.refuses:
            raise ShelfFailure("cannot touch: EROFS")
        super().touch(namespace, names, at)


@pytest.mark.parametrize("has_earlier", [False, True])
def test_nothing_is_promised_that_cannot_be_marked(has_earlier: bool) -> None:
    machine = KeptRowsMachine()
    try:
        shelf = machine.shelf = RefusesMarks(machine.shelf._shared)
        engine, key = machine.engines[0], SESSIONS[0]
        if has_earlier:
            machine.turn(0, key, 0, 2, 200.0, 0)
            assert engine.promises.items_of(key)
        shelf.refuses = True
        engine.uses.counts.clear()
        machine.turn(0, key, 0, 3, 200.0, 0)
        assert (len(engine.promises), len(engine.uses._marks)) == (0, 0)
        assert engine.uses.counts["store_promises_refused"] == 1
        assert engine.uses.counts["store_promises_made"] == 0
        shelf.refuses = False
        machine.turn(0, key, 0, 3, 200.0, 0)
        assert engine.promises.items_of(key), "the control"
    finally:
        machine.close()
