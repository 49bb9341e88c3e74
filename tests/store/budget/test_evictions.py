"""The evictor: who it is, what it removes, and how much."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdconn.store.budget import root_budget
from pdconn.store.budget.accounts import Accounts
from pdconn.store.budget.root_budget import LISTING_S, Evictor
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.interface import StoredPart, StoredRow
from pdconn.store.store_errors import ShelfFailure
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.budget.forest import row_of
from tests.store.budget.roots import SIZES

SIZE = SIZES[RowKind.FA]
CAPACITY = 16 * SIZE


class Root:
    """A root of 16 FA rows, and the engine that evicts."""

    def __init__(self, path: Path) -> None:
        self.now = 0.0
        self.rows = MemoryRows(lambda: self.now)
        self.shelf: MemoryShelf = MemoryShelf(self.rows)
        self.accounts = Accounts(path, "ours", CAPACITY)
        self.theirs = Accounts(path, "theirs", CAPACITY)
        self.accounts.recount(self.shelf)
        self.evictor = self.evictor_of(self.accounts)

    def evictor_of(self, accounts: Accounts, wa_share: float | None = None) -> Evictor:
        return Evictor(accounts, wa_share, lambda: self.now, lambda: self.now)

    def save(
        self, *path: int, kind: RowKind = RowKind.FA, namespace: str = "ns", theirs: bool = False
    ) -> RowName:
        self.now += 1.0
        accounts, writer = (self.theirs, "theirs") if theirs else (self.accounts, "ours")
        name = row_of(path, kind)
        assert accounts.reserve(SIZES[kind]) == SIZES[kind]
        self.shelf.begin(writer, "p", SIZES[kind])
        part = StoredPart(writer, "p", SIZES[kind])
        row = StoredRow(namespace, name, SIZES[kind], self.now)
        assert accounts.commit_row(self.shelf, part, row)
        return name

    def step(self) -> list[RowName]:
        return [name for _, name in self.evictor.evict_rows(self.shelf)]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    root = Root(tmp_path)
    yield root
    root.evictor.close()
    root.accounts.close()
    root.theirs.close()


def test_nothing_goes_while_there_is_headroom(root: Root) -> None:
    for number in range(15):
        root.save(number)
    assert root.step() == []


def test_the_row_used_longest_ago_goes_and_no_more_than_needed(root: Root) -> None:
    names = [root.save(number) for number in range(16)]
    assert root.step() == names[:1]
    assert root.step() == []
    assert (root.evictor.num_evicted, root.evictor.evicted_nbytes) == (1, SIZE)


def test_what_writers_wait_for_is_freed(root: Root) -> None:
    names = [root.save(number) for number in range(16)]
    assert root.theirs.reserve(3 * SIZE) == 0
    assert root.step() == names[:3]
    assert root.theirs.reserve(3 * SIZE) == 3 * SIZE


def test_leaves_go_from_the_end_and_windows_before_their_rows(root: Root) -> None:
    chain = [root.save(*(0,) * depth) for depth in range(1, 15)]
    window = root.save(*(0,) * 14, kind=RowKind.WA)
    root.theirs.reserve(3 * SIZE)
    assert root.step() == [window, chain[-1]]


def test_use_noted_by_others_since_the_listing_saves_a_row(root: Root) -> None:
    names = [root.save(number) for number in range(16)]
    assert root.step() == names[:1]
    root.now += 1
    root.shelf.touch("ns", names[1:3])
    root.save(99)
    assert root.step() == names[3:4]


def test_a_use_too_far_ahead_keeps_nothing(root: Root) -> None:
    names = [root.save(number) for number in range(16)]
    root.rows.rows["ns", names[9]].used_at = root.now + 1e8
    assert root.step() == [names[9]]
    kept = root.now + 3600.0
    root.shelf.touch("ns", names[:2], kept)
    root.rows.rows["ns", names[3]].used_at = root.now + 1e8
    root.save(99)
    assert root.step() == [names[2]], "its use was known before it was damaged"
    root.now += LISTING_S
    root.save(100)
    assert root.step() == [names[3]], "of a listing"


def test_a_use_far_ahead_that_is_believed_would(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(root_budget, "believed_use", lambda used_at, now: used_at)
    names = [root.save(number) for number in range(16)]
    root.rows.rows["ns", names[0]].used_at = root.now + 1e8
    assert root.step() == [names[1]]


@pytest.mark.parametrize("quota", [None, 6 * SIZE])
def test_kept_rows_give_way_when_nothing_else_can_go_the_first_promise_first(
    root: Root, quota: int | None
) -> None:
    names = [root.save(number) for number in range(16)]
    for number, name in enumerate(names):
        if number != 5:
            root.shelf.touch("ns", [name], root.now + 1000.0 - number)
    root.theirs.reserve(3 * SIZE)
    root.evictor = Evictor(root.accounts, None, lambda: root.now, lambda: root.now, quota)
    assert root.step() == [names[5], names[15], names[14]]


def all_kept_and_one_released(root: Root) -> tuple[list[RowName], list[RowName]]:
    """All rows, and what goes of them six seconds after the tenth was released by another."""
    names = [root.save(number) for number in range(16)]
    for number, name in enumerate(names):
        root.shelf.touch("ns", [name], 2000.0 + number)
    assert root.step() == names[:1]
    root.shelf.move_use("ns", names[9:10], 2009.0, 1.0)
    root.shelf.touch("ns", [root.save(99)], 3000.0)
    root.now += 6.0
    return names, root.step() + root.step()


def test_a_kept_row_goes_only_by_a_listing_that_knows_what_was_released(root: Root) -> None:
    names, gone = all_kept_and_one_released(root)
    assert gone == [names[9]]


def test_by_an_older_listing_another_one_would(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Evictor, "_may_go", lambda self, tree, place: True)
    names, gone = all_kept_and_one_released(root)
    assert gone == [names[1]]


class SlowRows(MemoryShelf):
    """A shelf whose listing takes longer than a listing counts as fresh."""

    def __init__(self, root: Root, seconds: float) -> None:
        super().__init__(root.rows)
        self._root, self._seconds = root, seconds
        self.num_listed = 0

    def rows(self, namespace: str | None = None) -> Iterator[StoredRow]:
        self.num_listed += 1
        self._root.now += self._seconds
        return super().rows(namespace)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_kept_rows_give_way_however_long_a_listing_takes(root: Root, seconds: float) -> None:
    names = [root.save(number) for number in range(16)]
    for number, name in enumerate(names):
        root.shelf.touch("ns", [name], root.now + 10_000.0 - number)
    root.shelf = SlowRows(root, seconds)
    assert [row for _ in range(3) for row in root.step()] == names[-1:]


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 11), (10.0, 3)])
def test_a_root_of_kept_rows_is_not_listed_most_of_the_time(
    root: Root, seconds: float, most: int
) -> None:
    """Others cannot save anything while it is."""
    names = [root.save(number) for number in range(16)]
    for number, name in enumerate(names):
        root.shelf.touch("ns", [name], root.now + 10_000.0 - number)
    root.shelf = shelf = SlowRows(root, seconds)
    until = root.now + 60.0
    while root.now < until:
        root.now += 1.0
        for _ in root.step():
            name = root.save(int(root.now))
            root.shelf.touch("ns", [name], root.now + 20_000.0)
    assert 1 < shelf.num_listed <= most


def test_rows_of_others_are_known_at_once(root: Root) -> None:
    """They commit a row after one that is the oldest leaf of our listing."""
    names = [root.save(number) for number in range(16)]
    assert root.step() == names[:1]
    child = root.save(1, 5, theirs=True)
    assert root.step() == names[2:3]
    assert root.shelf.has("ns", names[1])
    assert root.shelf.has("ns", child)


def test_rows_of_all_namespaces_go_alike(root: Root) -> None:
    names = [root.save(number, namespace=f"ns-{number % 2}") for number in range(16)]
    root.theirs.reserve(2 * SIZE)
    assert root.step() == names[:2]


def test_windows_above_their_share_go_first(root: Root) -> None:
    full = [root.save(number) for number in range(6)]
    windows = [root.save(number, kind=RowKind.WA) for number in range(6)]
    root.evictor = root.evictor_of(root.accounts, wa_share=2 / 16)
    assert root.step() == windows[:2]
    assert all(root.shelf.has("ns", name) for name in full)


def test_one_evicts_and_another_follows(root: Root) -> None:
    for number in range(16):
        root.save(number)
    assert len(root.step()) == 1
    root.save(99)
    second = root.evictor_of(root.theirs)
    assert second.evict_rows(root.shelf) == []
    assert not second.is_ours
    root.evictor.close()
    assert len(second.evict_rows(root.shelf)) == 1
    second.close()


def test_a_row_that_cannot_be_removed_is_passed_over_and_logged_once(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    names = [root.save(number) for number in range(16)]

    class Sticky(MemoryShelf):
        def remove_row(self, namespace: str, name: RowName) -> int:
            if name in names[:3]:
                raise ShelfFailure("no permission")
            return super().remove_row(namespace, name)

    root.shelf = Sticky(root.rows)
    with caplog.at_level(logging.WARNING):
        assert root.step() == names[3:4]
    assert len(caplog.records) == 1
    root.shelf = MemoryShelf(root.rows)
    root.now += LISTING_S
    root.save(99)
    assert root.step() == names[:1]


def test_nothing_goes_while_the_count_is_unknown(root: Root, tmp_path: Path) -> None:
    for number in range(16):
        root.save(number)
    (tmp_path / "budget" / "ledger").write_bytes(b"torn")
    assert root.step() == []
    root.accounts.recount(root.shelf)
    assert len(root.step()) == 1


def test_rows_that_are_gone_already_are_told_and_free_nothing(root: Root) -> None:
    names = [root.save(number) for number in range(16)]
    assert root.step() == names[:1]
    root.shelf.remove_row("ns", names[1])
    root.save(99)
    assert root.step() == names[1:3]
    assert root.evictor.evicted_nbytes == 2 * SIZE


def test_a_full_root_without_rows_is_not_listed_again_and_again(root: Root) -> None:
    assert root.theirs.reserve(CAPACITY) == CAPACITY
    listings = []

    class Listed(MemoryShelf):
        def rows(self, namespace: str | None = None) -> Iterator[StoredRow]:
            listings.append(root.now)
            return super().rows(namespace)

    root.shelf = Listed(root.rows)
    for _ in range(20):
        root.step()
    assert len(listings) == 1


def test_a_step_ends_after_a_while(root: Root) -> None:
    for number in range(16):
        root.save(number)
    root.theirs.reserve(8 * SIZE)

    class Slow(MemoryShelf):
        def remove_row(self, namespace: str, name: RowName) -> int:
            root.now += 0.15
            return super().remove_row(namespace, name)

    root.shelf = Slow(root.rows)
    assert len(root.step()) == 2
    assert len(root.step()) == 2
