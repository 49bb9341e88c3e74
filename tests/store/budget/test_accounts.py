"""Accounts of a root: what each step leaves when it fails, and what a recount puts right."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdconn.store.budget import accounts as module
from pdconn.store.budget import locks
from pdconn.store.budget.accounts import (
    Accounts,
    HeldWriter,
    Usage,
    news_line,
    parse_news,
    recorded_usage,
)
from pdconn.store.format.row import RowKind
from pdconn.store.shelf.interface import StoredPart, StoredRow
from pdconn.store.store_errors import ShelfFailure
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.budget.roots import SIZES, stored

CAPACITY = 1000
ROW, CHILD, WINDOW = stored((0,), 1.0), stored((0, 1), 2.0), stored((0,), 3.0, RowKind.WA)
SIZE = SIZES[RowKind.FA]


@pytest.fixture
def shelf() -> MemoryShelf:
    return MemoryShelf(MemoryRows(lambda: 5.0))


@pytest.fixture
def ours(tmp_path: Path, shelf: MemoryShelf) -> Iterator[Accounts]:
    accounts = Accounts(tmp_path, "ours", CAPACITY, wait_s=0.0)
    accounts.recount(shelf)
    yield accounts
    accounts.close()


@pytest.fixture
def theirs(tmp_path: Path, ours: Accounts) -> Iterator[Accounts]:
    accounts = Accounts(tmp_path, "theirs", 2 * CAPACITY, wait_s=0.0)
    yield accounts
    accounts.close()


def saved(accounts: Accounts, shelf: MemoryShelf, row: StoredRow, writer: str = "ours") -> bool:
    """Save a row as an engine does."""
    assert accounts.reserve(row.nbytes) == row.nbytes
    shelf.begin(writer, "p", row.nbytes)
    return accounts.commit_row(shelf, StoredPart(writer, "p", row.nbytes), row)


def test_no_more_is_reserved_than_is_free(ours: Accounts, theirs: Accounts) -> None:
    assert ours.reserve(600) == 600
    assert theirs.reserve(600) == 400
    assert theirs.usage() == Usage(CAPACITY, 0, 0, 1000, 200, 2)
    ours.release_reserved(100)
    assert theirs.reserve(600) == 100


def test_the_smallest_capacity_of_live_writers_counts(
    tmp_path: Path, theirs: Accounts, ours: Accounts, shelf: MemoryShelf
) -> None:
    assert theirs.usage().capacity == CAPACITY
    ours.close()
    assert theirs.is_stale()
    assert theirs.recount(shelf).forgotten == ["ours"]
    assert theirs.usage().capacity == 2 * CAPACITY


def test_a_committed_row_is_counted_and_no_longer_reserved(
    ours: Accounts, shelf: MemoryShelf
) -> None:
    assert saved(ours, shelf, ROW)
    assert saved(ours, shelf, WINDOW)
    usage = ours.usage()
    assert (usage.committed, usage.wa, usage.reserved) == (96, 32, 0)
    assert ours.remove_row(shelf, "ns-1", WINDOW.name) == 32
    assert (ours.usage().committed, ours.usage().wa) == (64, 0)


def test_a_row_that_was_there_stays_reserved_and_is_counted_once(
    ours: Accounts, theirs: Accounts, shelf: MemoryShelf
) -> None:
    assert saved(ours, shelf, ROW)
    assert not saved(theirs, shelf, ROW, "theirs")
    assert (ours.usage().committed, ours.usage().reserved) == (SIZE, SIZE)


@pytest.mark.parametrize("fails", ["write_count", "write_account"])
def test_a_row_that_cannot_be_counted_stays_reserved(
    ours: Accounts, shelf: MemoryShelf, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ours.reserve(SIZE) == SIZE
    shelf.begin("ours", "p", SIZE)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(module, fails, fail)
        assert ours.commit_row(shelf, StoredPart("ours", "p", SIZE), ROW)
    assert shelf.has("ns-1", ROW.name)
    assert ours.usage().reserved == SIZE


@pytest.mark.parametrize("torn", [b"", b"pdconnL1", b"x" * 32, None])
def test_nothing_is_free_until_a_lost_count_is_made_again(
    tmp_path: Path, ours: Accounts, shelf: MemoryShelf, torn: bytes | None
) -> None:
    assert saved(ours, shelf, ROW)
    ledger = tmp_path / "budget" / "ledger"
    ledger.unlink()
    if torn is not None:
        ledger.write_bytes(torn)
    assert ours.is_stale()
    assert not ours.usage().is_known
    assert recorded_usage(tmp_path) is None
    assert ours.reserve(1) == 0
    ours.remove_row(shelf, "ns-1", ROW.name)  # does not make a count of nothing
    assert not ours.usage().is_known
    ours.recount(shelf)
    assert ours.usage().free == CAPACITY
    assert not ours.is_stale()


def test_a_dead_writer_leaves_nothing(ours: Accounts, theirs: Accounts, shelf: MemoryShelf) -> None:
    assert theirs.reserve(300) == 300
    shelf.begin("theirs", "p", 300)
    assert ours.recount(shelf).forgotten == []
    assert list(shelf.parts()) == [StoredPart("theirs", "p", 300)]
    theirs.close()
    assert ours.is_stale()
    assert ours.recount(shelf).forgotten == ["theirs"]
    assert not list(shelf.parts())
    assert ours.usage() == Usage(CAPACITY, 0, 0, 0, 0, 1)


def test_a_writer_lives_while_any_of_its_processes_does(
    tmp_path: Path, ours: Accounts, theirs: Accounts, shelf: MemoryShelf
) -> None:
    rank = HeldWriter(tmp_path, "theirs")
    theirs.reserve(300)
    theirs.close()
    assert not ours.is_stale()
    assert ours.recount(shelf).forgotten == []
    assert ours.usage().reserved == 300
    rank.close()
    assert ours.recount(shelf).forgotten == ["theirs"]


def test_a_rank_that_begins_while_it_is_taken_for_dead_is_held_alive(
    tmp_path: Path, ours: Accounts, shelf: MemoryShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens the file, which a recount removes before the rank has its lock."""
    waits, first = locks.wait_lock, threading.Event()

    def forgotten_first(fd: int, kind: int, wait_s: float = 0.0) -> None:
        if kind == fcntl.LOCK_SH and not first.is_set():
            first.set()
            assert ours.recount(shelf).forgotten == ["late"]
        waits(fd, kind, wait_s)

    monkeypatch.setattr(locks, "wait_lock", forgotten_first)
    rank = HeldWriter(tmp_path, "late")
    assert ours.recount(shelf).forgotten == []
    rank.close()
    assert ours.recount(shelf).forgotten == ["late"]


def test_parts_that_nobody_reserved_are_counted(
    ours: Accounts, theirs: Accounts, shelf: MemoryShelf
) -> None:
    theirs.reserve(10)
    shelf.begin("theirs", "late", 50)
    ours.recount(shelf)
    assert ours.usage().committed == 40


def test_a_lock_that_is_never_free_is_an_error_and_changes_nothing(
    tmp_path: Path, ours: Accounts, shelf: MemoryShelf
) -> None:
    ours.reserve(SIZE)
    shelf.begin("ours", "p", SIZE)
    fd = os.open(tmp_path / "budget" / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(ShelfFailure, match="stopped"):
        ours.commit_row(shelf, StoredPart("ours", "p", SIZE), ROW)
    with pytest.raises(ShelfFailure, match="stopped"):
        ours.release_reserved(SIZE)
    os.close(fd)
    assert not shelf.has("ns-1", ROW.name)
    assert ours.usage().reserved == SIZE


def test_new_rows_are_told_once_and_stop_evictions_until_then(
    ours: Accounts, theirs: Accounts, shelf: MemoryShelf
) -> None:
    assert saved(theirs, shelf, ROW, "theirs")
    assert ours.evict_row(shelf, "ns-1", ROW.name) is None
    assert ours.take_news() == [ROW]
    assert ours.take_news() == []
    assert saved(theirs, shelf, CHILD, "theirs")
    assert ours.list_rows(shelf) == list(shelf.rows())
    assert ours.take_news() == []
    assert ours.evict_row(shelf, "ns-1", CHILD.name) == SIZE


def test_a_torn_line_of_news_spoils_no_other() -> None:
    whole = [ROW, CHILD, WINDOW]
    lines = [news_line(row) for row in whole]
    for cut in range(len(lines[1])):
        found = parse_news(lines[0] + lines[1][:cut] + lines[2])
        assert {ROW, WINDOW} <= set(found)
    assert parse_news(b"".join(lines)) == whole


def test_leaving_forgets_the_account(tmp_path: Path, ours: Accounts) -> None:
    guest = Accounts(tmp_path, "guest", 10)
    guest.leave_root()
    guest.close()
    assert not ours.is_stale()
    assert ours.usage().num_writers == 1


def test_a_root_without_accounts_says_nothing(tmp_path: Path) -> None:
    assert recorded_usage(tmp_path) is None


def test_accounts_that_cannot_be_made_are_an_error_and_nothing_stays_open(tmp_path: Path) -> None:
    (tmp_path / "budget").mkdir()
    (tmp_path / "budget" / "writers").write_bytes(b"")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ShelfFailure):
        Accounts(tmp_path, "ours", 10)
    assert set(os.listdir("/proc/self/fd")) == before
