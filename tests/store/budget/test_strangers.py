"""Foreign files below ``ROOT/budget`` are not followed, and not waited for."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pdconn.store.budget.accounts import Accounts, recorded_usage
from pdconn.store.shelf.interface import StoredPart
from pdconn.store.store_errors import ShelfFailure
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.budget.roots import stored

STRANGERS: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to(path.parent.parent.parent / "elsewhere"),
}


@pytest.fixture
def shelf() -> MemoryShelf:
    return MemoryShelf(MemoryRows(lambda: 5.0))


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_among_the_writers_is_none(
    stranger: str, tmp_path: Path, shelf: MemoryShelf
) -> None:
    """A folder ended every step with an error, and a pipe hung it with the lock held."""
    accounts = Accounts(tmp_path, "ours", 1000, wait_s=0.0)
    STRANGERS[stranger](tmp_path / "budget" / "writers" / "lost+found")
    accounts.recount(shelf)
    assert not accounts.is_stale()
    assert accounts.reserve(100) == 100
    used = recorded_usage(tmp_path)
    assert used is not None
    assert (used.num_writers, used.reserved) == (1, 100)
    accounts.close()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("name", ["ledger", "commits", "lock", "evictor", "writers/ours"])
def test_a_stranger_in_a_files_place_is_an_error_that_names_it(
    stranger: str, name: str, tmp_path: Path, shelf: MemoryShelf
) -> None:
    (tmp_path / "budget" / "writers").mkdir(parents=True)
    STRANGERS[stranger](tmp_path / "budget" / name)

    row = stored((0,), 1.0)
    shelf.begin("ours", "p", row.nbytes)

    def use() -> None:
        accounts = Accounts(tmp_path, "ours", 1 << 20, wait_s=0.0)
        try:
            accounts.recount(shelf)
            accounts.reserve(row.nbytes)
            accounts.commit_row(shelf, StoredPart("ours", "p", row.nbytes), row)
            os.close(accounts.try_evictor() or -1)
        finally:
            accounts.close()

    with pytest.raises(ShelfFailure, match=f"no file of ours: '.*/{os.path.basename(name)}'"):
        use()
    assert not (tmp_path / "elsewhere").exists()


def test_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Those above the last one had the mode of the umask."""
    before = os.umask(0o022)
    try:
        Accounts(tmp_path / "root", "ours", 1000, wait_s=0.0).close()
    finally:
        os.umask(before)
    for name in ("", "budget", "budget/writers"):
        assert stat.S_IMODE((tmp_path / "root" / name).stat().st_mode) == 0o700, name
