"""``pdconn store drop`` removes the selected rows, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pdconn.store.budget.accounts import Accounts
from pdconn.store.format.row import RowName
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.store_errors import ShelfFailure
from tests.tools.cli.store_command import CHAIN, FA_NBYTES, WA_NBYTES, Run, asked, files, flip
from tests.tools.cli.stored_rows import BLOCK, NAMESPACE, file_of, full, save, windows

DAY_S = 86400.0


def test_removed_rows_are_free_for_engines_at_once(root: Path, run: Run) -> None:
    accounts = Accounts(root, "boot-1", 1 << 30)
    with FilesShelf(root) as shelf:
        accounts.recount(shelf)
    flip(file_of(root, full(CHAIN, [4])[0]), 5)
    assert run("verify", root, "--drop-bad")[0] == 1
    assert accounts.usage().committed == 5 * FA_NBYTES + 2 * WA_NBYTES
    assert run("drop", root, "--all", "--yes")[0] == 0
    usage = accounts.usage()
    assert (usage.committed, usage.wa, usage.num_writers) == (0, 0, 1)
    accounts.close()


def test_without_yes_nothing_is_removed(root: Path, run: Run) -> None:
    before = files(root)
    for words in (["--all"], ["--namespace", NAMESPACE], ["--older", "0s"]):
        code, out, err = run("drop", root, *words)
        assert (code, out.split(",")[0]) == (2, "would remove 8 rows")
        assert "add --yes" in err
    assert files(root) == before


def test_a_namespace_is_removed_and_the_other_stays(root: Path, run: Run) -> None:
    kept = save(root, full(CHAIN, range(2)), namespace="other")
    code, out, _ = run("drop", root, "--namespace", NAMESPACE, "--yes")
    assert (code, out.split(",")[0]) == (0, "removed 8 of 8 rows")
    assert [one["namespace"] for one in asked(run, "ls", root)] == ["other"]
    assert all(path.is_file() for path in kept)


def test_nothing_but_rows_is_removed(root: Path, run: Run) -> None:
    folder = file_of(root, full(CHAIN, [0])[0]).parent
    for path in (folder / "notes.txt", root / "mine", root / "rows/x", root / "rows" / NAMESPACE):
        (path / "mine" if path.is_dir() else path).write_text("keep me", encoding="utf-8")
    (folder / "link").symlink_to(root / "mine")
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("keep me", encoding="utf-8")
    (root / "rows" / "linked").symlink_to(outside)
    with FilesShelf(root) as shelf:
        shelf.begin("boot-1", "7-0", FA_NBYTES)
        rows = {file_of(root, row.name) for row in shelf.rows()}
    before = files(root)
    assert run("drop", root, "--all", "--yes")[0] == 0
    assert files(root) == before - rows
    assert (outside / "file").read_text(encoding="utf-8") == "keep me"
    assert (folder / "link").is_symlink()


def test_old_rows_are_removed_unless_a_younger_one_depends_on_them(root: Path, run: Run) -> None:
    """The beginning of a prompt is as young as its end, though only the end was read."""
    now = time.time()
    for index in range(5):
        age = 9 * DAY_S if index != 3 else DAY_S / 2
        os.utime(file_of(root, full(CHAIN, [index])[0]), (now - age, now - age))
    for name in windows(CHAIN, (3, 4)):
        os.utime(file_of(root, name), (now - 9 * DAY_S,) * 2)
    found = asked(run, "drop", root, "--older", "7d", "--yes")
    left = asked(run, "ls", root, "--rows")
    assert [(row["kind"], row["index"]) for row in left] == [
        ("fa", 0), ("fa", 1), ("fa", 2), ("fa", 2), ("fa", 3),
    ]  # fmt: skip
    assert found["removed"]["rows"] == 3


def test_a_full_row_is_as_young_as_its_window(root: Path, run: Run) -> None:
    old = time.time() - 9 * DAY_S
    for name in [*full(CHAIN, range(5)), *windows(CHAIN, [3])]:
        os.utime(file_of(root, name), (old, old))
    assert asked(run, "drop", root, "--older", "36h", "--yes")["removed"]["rows"] == 1
    (one,) = asked(run, "ls", root)
    assert (one["longest_prefix_tokens"], one["wa"]["rows"]) == (5 * BLOCK, 1)


@pytest.mark.parametrize(("ahead_s", "removed"), [(1e8, 1), (3600.0, 0)])
def test_a_use_in_a_far_future_keeps_no_row_and_one_for_a_session_does(
    ahead_s: float, removed: int, root: Path, run: Run
) -> None:
    os.utime(file_of(root, windows(CHAIN, [4])[0]), (time.time() + ahead_s,) * 2)
    assert asked(run, "drop", root, "--older", "7d", "--yes")["removed"]["rows"] == removed


def test_older_and_namespace_are_both_obeyed(root: Path, run: Run) -> None:
    old = time.time() - 9 * DAY_S
    save(root, full(CHAIN, range(2)), namespace="other", used_at=old)
    words = ["--older", "7d", "--yes", "--namespace"]
    assert asked(run, "drop", root, *words, NAMESPACE)["removed"]["rows"] == 0
    assert asked(run, "drop", root, *words, "other")["removed"]["rows"] == 2


def test_a_device_that_fails_ends_with_one(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: FilesShelf, namespace: str, name: RowName) -> int:
        raise ShelfFailure("cannot remove it: EROFS")

    monkeypatch.setattr(FilesShelf, "remove_row", failing)
    code, _, err = run("drop", root, "--all", "--yes")
    assert code == 1
    assert err == "pdconn store drop: cannot remove it: EROFS\n"
