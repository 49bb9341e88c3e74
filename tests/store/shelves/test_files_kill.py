"""A process that is killed at any step of a save leaves no row that does not verify."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.store_errors import StoreError
from tests.store.shelves.plain_rows import row_name
from tests.store.shelves.real_rows import ROW_NBYTES, discard_all, save_row, verify_all
from tests.store.shelves.system import System, in_child, in_small_process, killed_at

BEFORE, NAME = row_name(1), row_name(2)


def killed_save(root: Path, number: int, *, is_torn: bool = False, is_early: bool = False) -> int:
    """The status of a process that is killed before call ``number`` of opening and saving.

    Args:
        is_torn: the last write or note that it made is cut in half.
        is_early: the mutant of :func:`save_row`.
    """

    def run() -> None:
        system = System(killed_at(number)).install(pytest.MonkeyPatch())

        def half_written(fd: int, buffers: Any, at: int) -> int:
            if len(system.made) == number:
                return os.pwritev(fd, [buffers[0][: len(buffers[0]) // 2]], at)
            return os.pwritev(fd, buffers, at)

        def half_noted(fd: int, data: Any) -> int:
            return os.write(fd, data[: len(data) // 2] if len(system.made) == number else data)

        if is_torn:
            system.instead = {"pwritev": half_written, "write": half_noted}
        save_row(FilesShelf(root), NAME, is_early=is_early)

    return in_child(run)


def killed_opening(root: Path, number: int) -> None:
    """Make a root, and be killed before call ``number``."""
    System(killed_at(number)).install(pytest.MonkeyPatch())
    FilesShelf(root)


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def leaves_whole_rows_only(folder: Path, *, is_torn: bool = False) -> None:
    """Kill a save before each of its calls, and look at what it leaves."""
    seen = set()
    for number in range(1000):
        root = folder / str(number)
        save_row(FilesShelf(root), BEFORE, writer="other")
        status = killed_save(root, number, is_torn=is_torn)
        shelf = FilesShelf(root)
        left = verify_all(shelf)
        assert left in ({BEFORE}, {BEFORE, NAME})
        discard_all(shelf)
        assert list(shelf.parts()) == []
        assert verify_all(shelf) == left
        assert len(files_below(root)) == 1 + len(left), "the format and whole rows"
        assert save_row(shelf, NAME) == (NAME not in left), "a later save goes on"
        assert verify_all(shelf) == {BEFORE, NAME}
        seen.add(len(left))
        if not status:
            break
        assert status == -signal.SIGKILL
    assert not status
    assert number > 40
    assert seen == {1, 2}


def leaves_whole_rows_only_if_torn(folder: Path) -> None:
    leaves_whole_rows_only(folder, is_torn=True)


@pytest.mark.parametrize(
    "law",
    [
        leaves_whole_rows_only,
        pytest.param(leaves_whole_rows_only_if_torn, marks=pytest.mark.matrix),
    ],
    ids=lambda law: law.__name__,
)
def test_a_save_that_is_killed_before_any_call(law: Callable[[Path], None], tmp_path: Path) -> None:
    in_small_process(law, tmp_path)


def makes_what_was_killed(folder: Path) -> None:
    """Kill the making of a root before each of its calls; the next one makes it."""
    for number in range(100):
        root = folder / str(number)
        status = in_child(lambda root=root, number=number: killed_opening(root, number))
        save_row(FilesShelf(root), BEFORE)
        assert BEFORE in verify_all(FilesShelf(root))
        if not status:
            break
    assert not status


def test_a_root_whose_making_is_killed_is_made_by_the_next(tmp_path: Path) -> None:
    in_small_process(makes_what_was_killed, tmp_path)


def catches_an_early_commit(folder: Path) -> None:
    """Kill a save that commits before its footer."""
    caught = 0
    for number in range(30, 1000):
        root = folder / str(number)
        status = killed_save(root, number, is_early=True)
        shelf = FilesShelf(root)
        for row in shelf.rows():
            assert row.nbytes == ROW_NBYTES
            try:
                verify_all(shelf)
            except StoreError:
                caught += 1
        if not status:
            break
    assert caught


def test_committing_before_the_footer_is_caught(tmp_path: Path) -> None:
    """Negative control: the kill finds a shelf that shows rows too early."""
    in_small_process(catches_an_early_commit, tmp_path)


def test_a_law_that_fails_in_a_small_process_is_noticed(tmp_path: Path) -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match="AssertionError"):
        in_small_process(fails, tmp_path)


def fails(folder: Path) -> None:
    assert not folder.is_dir()
