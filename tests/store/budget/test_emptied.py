"""Accounts that are removed under their writers: made anew, and never granted twice."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdconn.store.budget import locks
from pdconn.store.budget.accounts import Accounts, HeldWriter, read_account
from pdconn.store.budget.root_budget import Allowance, Evictor
from pdconn.store.shelf.interface import StoredPart
from pdconn.store.store_errors import ShelfFailure
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.budget.roots import SIZES, stored

CAPACITY = 1000
ROW = stored((0,), 1.0)


def emptied(root: Path) -> None:
    for path in root.iterdir():
        shutil.rmtree(path)


def replaced(root: Path) -> None:
    root.rename(root.with_name("before"))
    root.mkdir()


def without_budget(root: Path) -> None:
    shutil.rmtree(root / "budget", ignore_errors=True)


def without_lock_and_accounts(root: Path) -> None:
    (root / "budget" / "lock").unlink(missing_ok=True)
    for path in root.glob("budget/writers/*"):
        path.unlink()


LOSSES = [emptied, replaced, without_budget, without_lock_and_accounts]
Loss = Callable[[Path], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def shelf() -> MemoryShelf:
    return MemoryShelf(MemoryRows(lambda: 5.0))


class Writer:
    """A writer's accounts, what it has reserved, and what it was said to have lost."""

    def __init__(self, root: Path, name: str, shelf: MemoryShelf) -> None:
        self.lost = 0
        self.accounts = Accounts(root, name, CAPACITY, wait_s=0.0, lost=self._note)
        self.shelf = shelf
        self.accounts.recount(shelf)

    def _note(self, nbytes: int) -> None:
        self.lost += nbytes


@pytest.fixture
def writers(root: Path, shelf: MemoryShelf) -> Iterator[list[Writer]]:
    made = [Writer(root, name, shelf) for name in ("ours", "theirs")]
    yield made
    for writer in made:
        writer.accounts.close()


def granted(root: Path) -> int:
    """The sum of what the accounts of the root say."""
    found = [read_account(path) for path in root.glob("budget/writers/*")]
    return sum(account.reserved for account in found if account is not None)


@pytest.mark.parametrize("loss", LOSSES)
def test_two_writers_never_get_more_than_the_capacity(
    root: Path, writers: list[Writer], shelf: MemoryShelf, loss: Loss
) -> None:
    """Each held 900 of 1000: the second was granted what the first held."""
    ours, theirs = writers
    assert ours.accounts.reserve(900) == 900
    loss(root)
    theirs.accounts.recount(shelf)
    held = theirs.accounts.reserve(900)
    assert held == 900
    ours.accounts.recount(shelf)
    assert ours.lost == 800
    assert granted(root) == 1000
    assert ours.accounts.usage().reserved == 1000
    assert ours.accounts.reserve(1) == 0
    theirs.accounts.release_reserved(500)
    assert ours.accounts.reserve(1000) == 500


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lock_without_its_path_is_caught(
    root: Path,
    writers: list[Writer],
    shelf: MemoryShelf,
    loss: Loss,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: a descriptor is taken for what its path is, as it was before."""
    monkeypatch.setattr(locks, "is_at", lambda fd, path: True)
    with pytest.raises((AssertionError, ShelfFailure)):
        test_two_writers_never_get_more_than_the_capacity(root, writers, shelf, loss)


def test_a_lock_is_that_of_the_file_that_is_there_now(root: Path, writers: list[Writer]) -> None:
    """The lock of a removed file excluded no process that came later."""
    lock = root / "budget" / "lock"
    lock.unlink()
    writers[0].accounts.usage()
    fd = os.open(lock, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    for writer in writers:
        with pytest.raises(ShelfFailure, match="stopped"):
            writer.accounts.usage()
    os.close(fd)


def test_a_lock_that_is_removed_while_it_is_waited_for_is_not_taken(
    root: Path, writers: list[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, lock = locks.wait_lock, root / "budget" / "lock"
    before = lock.stat()

    def removed_meanwhile(fd: int, kind: int, wait_s: float = 0.0) -> None:
        waits(fd, kind, wait_s)
        if kind == fcntl.LOCK_EX and os.path.samestat(os.fstat(fd), before):
            lock.unlink()

    monkeypatch.setattr(locks, "wait_lock", removed_meanwhile)
    assert writers[0].accounts.reserve(10) == 10
    assert lock.exists()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_row_whose_bytes_are_not_reserved_any_more_is_not_committed(
    root: Path, writers: list[Writer], shelf: MemoryShelf, loss: Loss
) -> None:
    ours, theirs = writers
    size = ROW.nbytes
    assert ours.accounts.reserve(size) == size
    shelf.begin("ours", "p", size)
    loss(root)
    theirs.accounts.recount(shelf)
    theirs.accounts.reserve(CAPACITY)
    with pytest.raises(ShelfFailure, match="reserved bytes, got"):
        ours.accounts.commit_row(shelf, StoredPart("ours", "p", size), ROW)
    assert not shelf.has("ns-1", ROW.name)
    shelf.discard("ours", "p")


def test_what_was_taken_and_lost_is_made_good_before_more_is_given(
    root: Path, shelf: MemoryShelf
) -> None:
    """Bytes taken stay taken; none are ready until they are reserved anew."""
    allowance = Allowance(SIZES[ROW.name.kind])
    accounts = Accounts(root, "ours", CAPACITY, lost=allowance.lose)
    accounts.recount(shelf)
    allowance.top_up(accounts)
    taken = allowance.ready
    assert allowance.room.take_amount(taken)
    emptied(root)
    accounts.usage()
    assert allowance.ready == -taken
    assert not allowance.room.take_amount(1)
    accounts.recount(shelf)
    allowance.top_up(accounts)
    assert accounts.usage().reserved == allowance.ready + taken
    accounts.close()


@pytest.mark.parametrize("loss", LOSSES)
def test_there_is_one_evictor(
    root: Path, writers: list[Writer], shelf: MemoryShelf, loss: Loss
) -> None:
    """Who had locked the removed file went on, beside who locked the new one."""
    ours, theirs = (Evictor(writer.accounts, None, lambda: 0.0, lambda: 0.0) for writer in writers)
    ours.evict_rows(shelf)
    assert ours.is_ours
    loss(root)
    if loss is without_lock_and_accounts:
        (root / "budget" / "evictor").unlink()
    writers[1].accounts.recount(shelf)
    theirs.evict_rows(shelf)
    assert theirs.is_ours
    ours.evict_rows(shelf)
    assert not ours.is_ours
    for evictor in (ours, theirs):
        evictor.close()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_rank_shows_anew_that_its_writer_lives(
    root: Path, writers: list[Writer], shelf: MemoryShelf, loss: Loss
) -> None:
    """Of a removed file its lock said nothing, and the writer was taken for dead."""
    ours, theirs = writers
    rank = HeldWriter(root, "theirs")
    loss(root)
    assert rank.renew_account()
    assert not rank.renew_account()
    theirs.accounts.usage()
    theirs.accounts.close()
    assert ours.accounts.recount(shelf).forgotten == []
    rank.close()
    assert ours.accounts.recount(shelf).forgotten == ["theirs"]


@pytest.mark.parametrize("seed", range(8))
def test_any_history_with_losses_grants_no_byte_twice(
    root: Path, shelf: MemoryShelf, seed: int
) -> None:
    rng = random.Random(seed)
    writers = [Writer(root, f"w{number}", shelf) for number in range(3)]
    for number in range(150):
        ours = rng.choice(writers).accounts
        what = rng.choice(["reserve", "reserve", "release", "recount", "lose", "save"])
        if what == "reserve":
            ours.reserve(rng.randrange(CAPACITY))
        elif what == "release":
            ours.release_reserved(rng.randrange(CAPACITY // 2))
        elif what == "recount":
            ours.recount(shelf)
        elif what == "lose":
            rng.choice([emptied, without_budget, without_lock_and_accounts])(root)
        else:
            row = stored((number,), 1.0)
            shelf.begin("w0", "p", row.nbytes)
            try:
                ours.commit_row(shelf, StoredPart("w0", "p", row.nbytes), row)
            except ShelfFailure:
                shelf.discard("w0", "p")
        committed = sum(found.nbytes for found in shelf.rows())
        assert committed + granted(root) <= CAPACITY
    for writer in writers:
        writer.accounts.close()
