"""What one engine notes of the rows that it keeps: nothing is left when sessions come and go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import pytest

from pdconn.lifecycle.promises import BreakReason, PromiseLimits
from pdconn.protocol.keep import SessionKey
from pdconn.store.engine.lookups import Catalogue, RowsStored
from pdconn.store.engine.row_uses import (
    RowsUsed,
    RowUse,
    RowUses,
    SessionReleased,
    TurnEnded,
    _Mark,
    _Marks,
)
from pdconn.store.format.footer import row_sizes
from pdconn.store.format.prompt_rows import Chain, pieces
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.store_errors import ShelfFailure
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.tools.cli.stored_rows import BLOCK, LAYOUT

SIZES = row_sizes(LAYOUT)
BLOCKS = 3
FIRST, SECOND, THIRD = (SessionKey("t", name) for name in "123")


class SlowShelf(MemoryShelf):
    """A shelf whose next notes of uses fail, and that takes its time to look at a row."""

    failures = 0
    look_s = 0.0

    def __init__(self, made: Uses) -> None:
        super().__init__(MemoryRows(lambda: made.now))
        self._made = made
        self.looked: list[RowName] = []

    def used_at(self, namespace: str, name: RowName) -> float | None:
        self._made.now += self.look_s
        self.looked.append(name)
        return super().used_at(namespace, name)

    def touch(self, namespace: str, names: Sequence[RowName], at: float | None = None) -> None:
        if self.failures:
            self.failures -= 1
            raise ShelfFailure("touch: expected a device that works, got EIO")
        super().touch(namespace, names, at)


class Uses:
    """The uses of one engine, which keeps the rows of two prompts at most."""

    def __init__(self) -> None:
        self.now = 1e6
        self.shelf = SlowShelf(self)
        self.uses = RowUses(LAYOUT, SIZES, self, lambda: self.now, lambda: self.now)
        self._numbers = count()

    def keep_limits(self) -> PromiseLimits:
        most = 2 * sum(SIZES[row.kind] for row in self.rows_of(0))
        return PromiseLimits(most, most, 1000.0)

    def tokens_of(self, prompt: int) -> list[int]:
        return [prompt] * (BLOCKS * BLOCK)

    def rows_of(self, prompt: int) -> list[RowName]:
        chain = Chain(BLOCK).extended(self.tokens_of(prompt))
        windows = pieces(LAYOUT.wa, BLOCKS * BLOCK)
        rows = [chain.name(RowKind.FA, index) for index in range(BLOCKS)]
        return rows + [chain.name(RowKind.WA, index) for index in windows]

    def save(self, prompt: int) -> None:
        for row in self.rows_of(prompt):
            part = str(next(self._numbers))
            self.shelf.begin("w", part, SIZES[row.kind])
            self.shelf.commit("w", part, "ns", row)

    def note(self, use: RowUse) -> None:
        there = Catalogue("ns")
        there.learn_rows(RowsStored("ns", [row.name for row in self.shelf.rows()]), 0.0)
        self.uses.note_use(self.shelf, use, there, ())

    def keep(self, key: SessionKey, prompt: int) -> None:
        tokens = [*self.tokens_of(prompt), 7]
        self.note(TurnEnded(key, 900.0, "ns", Chain(BLOCK), tokens, lambda: (), BLOCKS * BLOCK))

    def is_kept(self, prompt: int) -> bool:
        return all((self.shelf.used_at("ns", row) or 0) > self.now for row in self.rows_of(prompt))


@pytest.fixture
def made() -> Uses:
    made = Uses()
    for prompt in range(3):
        made.save(prompt)
    made.now += 1.0
    return made


def test_a_session_that_is_kept_and_released_again_and_again_leaves_nothing(made: Uses) -> None:
    for _ in range(100):
        made.keep(FIRST, 0)
        assert made.is_kept(0)
        made.note(SessionReleased(FIRST))
        assert not made.is_kept(0)
    assert len(made.uses._marks) == 0


def test_the_marks_of_what_is_given_up_for_a_promise_end_though_it_cannot_be_noted(
    made: Uses,
) -> None:
    made.keep(FIRST, 0)
    made.keep(SECOND, 1)
    made.shelf.failures = 1
    made.keep(THIRD, 2)  # and the first one loses its share
    assert made.uses.take_broken() == [(FIRST, BreakReason.SHARE)]
    assert [made.is_kept(prompt) for prompt in range(3)] == [False, True, False]
    made.shelf.failures = 1
    made.keep(SECOND, 0)
    assert [made.is_kept(prompt) for prompt in range(3)] == [False, False, False]
    assert len(made.uses._marks) == 0


@pytest.mark.parametrize("is_loaded", [True, False])
def test_rows_that_are_loaded_while_they_are_kept_count_as_used_then(
    is_loaded: bool, made: Uses
) -> None:
    ended, loaded = made.now, made.now + 600.0
    made.keep(FIRST, 0)
    made.now = loaded
    if is_loaded:
        made.note(RowsUsed(made.rows_of(0)))
    assert made.is_kept(0)
    made.now = ended + 1000.0
    made.uses.follow(made.shelf, "ns")
    used = {made.shelf.used_at("ns", row) for row in made.rows_of(0)}
    assert used == {loaded if is_loaded else ended}


def test_a_slow_shelf_is_looked_at_a_little_at_a_time_and_every_row_in_turn(made: Uses) -> None:
    made.keep(FIRST, 0)
    made.keep(SECOND, 1)
    rows = {row for prompt in (0, 1) for row in made.rows_of(prompt)}
    made.shelf.look_s = 0.03
    made.shelf.looked.clear()
    for _ in range(len(rows)):
        made.now += 1.0
        began = made.now
        made.uses.renew_marks(made.shelf, ())
        assert made.now - began < 0.1, "commits wait"
    assert set(made.shelf.looked) == rows
    assert len(made.shelf.looked) == 2 * len(rows), "two a time, each once"


def test_rows_that_many_sessions_share_take_no_longer_than_others() -> None:
    """Of a reset, which ends all promises; one by one the others were looked at for each row."""

    def ends_s(shared: int) -> float:
        marks = _Marks()
        for number in range(600):
            first = 0 if number < shared else 100 * number
            rows = [
                RowName(RowKind.FA, (first + at).to_bytes(16), bytes(16), at) for at in range(100)
            ]
            marks.add_mark(number, _Mark(tuple(rows), 1e6 + number, 0.0))
        began = time.perf_counter()
        for number in range(600):
            marks.end_mark(number)
        assert len(marks) == 0
        return time.perf_counter() - began

    assert min(ends_s(600) for _ in range(3)) < 8 * min(ends_s(1) for _ in range(3))
