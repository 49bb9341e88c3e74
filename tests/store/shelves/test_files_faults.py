"""Whatever call fails, the shelf of files raises what a shelf may, and leaves whole rows only."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pdconn.store.shelf import files_shelf as files
from pdconn.store.shelf import folders
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.folders import open_root
from pdconn.store.store_errors import RowDamaged, RowMissing, ShelfFailure
from tests.store.shelves.plain_rows import MIB, PAGE, load, pages, payload, row_name, save
from tests.store.shelves.real_rows import discard_all, save_row, verify, verify_all
from tests.store.shelves.system import System, failing_at, mounted, open_files

ROW, OTHER, NEW = row_name(1), row_name(2), row_name(3)
CODES = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS)

Action = Callable[[FilesShelf], object]
ACTIONS: dict[str, Action] = {
    "has": lambda shelf: shelf.has("ns", ROW),
    "read": lambda shelf: verify(shelf, ROW),
    "rows": lambda shelf: list(shelf.rows()),
    "touch": lambda shelf: shelf.touch("ns", [ROW, OTHER]),
    "remove": lambda shelf: shelf.remove_row("ns", OTHER),
    "begin": lambda shelf: shelf.begin("writer", "p", 4 * PAGE),
    "begin first": lambda shelf: shelf.begin("another", "p", 4 * PAGE),
    "write": lambda shelf: shelf.write("writer", "begun", [(PAGE, pages(payload(1, PAGE)))]),
    "put_note": lambda shelf: shelf.put_note("writer", "begun", 1, b"note" * 100),
    "notes": lambda shelf: shelf.notes("writer", "begun"),
    "parts": lambda shelf: list(shelf.parts()),
    "discard": lambda shelf: shelf.discard("writer", "begun"),
    "save": lambda shelf: save_row(shelf, NEW),
    "save again": lambda shelf: save_row(shelf, ROW),
    "open": lambda shelf: FilesShelf(shelf._folders.root),
}


def prepared(root: Path, direct_io: bool = False) -> FilesShelf:
    """Two rows, and a part with a note."""
    shelf = FilesShelf(root, direct_io)
    save_row(shelf, ROW)
    save_row(shelf, OTHER)
    shelf.begin("writer", "begun", 4 * PAGE)
    shelf.put_note("writer", "begun", 0, b"whole")
    return shelf


def with_fault(action: Action, shelf: FilesShelf, number: int, code: int) -> str | None:
    """Run with one call failing: the call, or None if fewer were made."""
    with pytest.MonkeyPatch.context() as patch:
        system = System(failing_at(number, code)).install(patch)
        try:
            action(shelf)
        except (ShelfFailure, RowMissing):
            assert number < len(system.made), "no call failed"
    return system.made[number] if number < len(system.made) else None


@pytest.mark.parametrize(
    ("action", "direct_io"), [*((name, False) for name in ACTIONS), ("read", True), ("write", True)]
)
def test_a_call_that_fails_is_a_failure_of_the_shelf_and_nothing_more(
    tmp_path: Path, action: str, direct_io: bool
) -> None:
    failed = []
    before = open_files()
    for code in CODES[:1] if action.startswith("save") else CODES:
        for number in range(1000):
            root = tmp_path / f"{code}-{number}"
            shelf = prepared(root, direct_io)
            call = with_fault(ACTIONS[action], shelf, number, code)
            if call is None:
                break
            failed.append(call)
            assert open_files() == before, f"{call} left a descriptor"
            notes = dict(shelf.notes("writer", "begun"))
            assert set(notes.items()) <= {(0, b"whole"), (1, b"note" * 100)}
            assert call == "unlink" or not list(root.rglob("*.new"))
            assert ROW in verify_all(shelf)
            discard_all(shelf)
            discard_all(shelf, "another")
            assert list(shelf.parts()) == []
            save_row(shelf, NEW)
            assert {ROW, NEW} <= verify_all(shelf)
    assert failed


@pytest.mark.parametrize(
    ("action", "call"),
    [
        ("read", "preadv"),
        ("has", "lstat"),
        ("rows", "scandir"),
        ("touch", "utime"),
        ("remove", "unlink"),
        ("begin", "fallocate"),
        ("begin", "open"),
        ("write", "pwritev"),
        ("put_note", "write"),
        ("put_note", "rename"),
        ("notes", "read"),
        ("discard", "unlink"),
        ("save", "link"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, action: str, call: str) -> None:
    shelf = prepared(tmp_path)

    def before(number: int, name: str) -> None:
        if name == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        System(before).install(patch)
        with pytest.raises(ShelfFailure, match="EIO: Input/output error"):
            ACTIONS[action](shelf)
    assert ROW in verify_all(shelf)


def test_a_part_takes_no_more_than_its_room(tmp_path: Path) -> None:
    shelf = FilesShelf(tmp_path)
    shelf.begin("writer", "p", 4 * PAGE)
    with pytest.raises(ShelfFailure, match="within 16384 bytes"):
        shelf.write("writer", "p", [(3 * PAGE, pages(2 * PAGE))])
    (part,) = shelf.parts()
    assert part.nbytes == 4 * PAGE


@pytest.mark.parametrize("call", ["fallocate", "ftruncate", "close"])
def test_a_part_without_room_is_not_left_behind(tmp_path: Path, call: str) -> None:
    shelf = FilesShelf(tmp_path)

    def before(number: int, name: str) -> None:
        if name == "fallocate" and call == "ftruncate":
            raise OSError(errno.EOPNOTSUPP, "not here")
        if name == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        System(before).install(patch)
        with pytest.raises(ShelfFailure, match="ENOSPC"):
            shelf.begin("writer", "p", PAGE)
    assert list(shelf.parts()) == []
    shelf.begin("writer", "p", PAGE)


@pytest.mark.parametrize("call", ["fallocate", "ftruncate", "close", "fstat"])
def test_a_part_that_another_rank_made_is_not_removed(tmp_path: Path, call: str) -> None:
    """It was: the rank that was first wrote to a file without a name."""
    theirs, ours = FilesShelf(tmp_path), FilesShelf(tmp_path)
    theirs.begin("writer", "p", 4 * PAGE)

    def before(number: int, name: str) -> None:
        if name == "fallocate" and call == "ftruncate":
            raise OSError(errno.EOPNOTSUPP, "not here")
        if name == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        System(before).install(patch)
        with pytest.raises(ShelfFailure, match="EIO"):
            ours.begin("writer", "p", 5 * PAGE)
    theirs.write("writer", "p", [(0, pages(payload(1)))])
    theirs.commit("writer", "p", "ns", ROW)
    assert load(ours, ROW, 4 * PAGE) == payload(1)


@pytest.mark.parametrize("module", [files, folders])
def test_leaving_something_behind_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    """Negative control."""
    monkeypatch.setattr(module, "unlink_quietly", lambda path: None)
    with pytest.raises(AssertionError):
        test_a_call_that_fails_is_a_failure_of_the_shelf_and_nothing_more(
            tmp_path, "put_note", False
        )


def test_a_file_system_that_cannot_reserve_gets_a_file_of_the_size(tmp_path: Path) -> None:
    shelf = FilesShelf(tmp_path)

    def before(number: int, name: str) -> None:
        if name == "fallocate":
            raise OSError(errno.EOPNOTSUPP, "not here")

    with pytest.MonkeyPatch.context() as patch:
        System(before).install(patch)
        assert save(shelf, ROW, payload(1))
    assert load(shelf, ROW, 4 * PAGE) == payload(1)


def test_a_row_stays_committed_where_its_part_cannot_be_cleared(tmp_path: Path) -> None:
    shelf = FilesShelf(tmp_path)

    def before(number: int, name: str) -> None:
        if name == "unlink":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        System(before).install(patch)
        assert save_row(shelf, NEW)
    assert verify_all(shelf) == {NEW}
    assert len(list(shelf.parts())) == 1
    discard_all(shelf)
    assert verify_all(shelf) == {NEW}


def test_a_row_that_another_machine_removed_is_missing(tmp_path: Path) -> None:
    shelf = prepared(tmp_path)
    for call in ("open", "preadv", "lstat"):

        def before(number: int, name: str, call: str = call) -> None:
            if name == call:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        with pytest.MonkeyPatch.context() as patch:
            System(before).install(patch)
            if call == "lstat":
                assert not shelf.has("ns", ROW)
                continue
            with pytest.raises(RowMissing):
                verify(shelf, ROW)
    verify(shelf, ROW)


def test_a_link_that_was_made_though_it_says_that_it_exists_is_ours(tmp_path: Path) -> None:
    """NFS answers so to the repeat of a call."""
    shelf = FilesShelf(tmp_path)

    def link(source: str, target: str) -> None:
        os.link(source, target)
        os.link(source, target)

    with pytest.MonkeyPatch.context() as patch:
        System().install(patch).instead["link"] = link
        assert save_row(shelf, NEW) is True
    assert save_row(shelf, NEW) is False


@pytest.mark.parametrize("direct_io", [False, True, "auto"])
@pytest.mark.parametrize("step", [1, PAGE, PAGE + 1])
def test_transfers_that_stop_early_go_on(tmp_path: Path, direct_io: bool, step: int) -> None:
    data = payload(1, 12 * PAGE)

    def cut(call: Callable[..., int]) -> Callable[..., int]:
        def some(fd: int, buffers: list[memoryview], at: int) -> int:
            first = buffers[0]
            few = first[: step if len(first) == 12 * PAGE or step > 1 else len(first) - 1 or 1]
            return call(fd, [few], at)

        return some

    with pytest.MonkeyPatch.context() as patch:
        system = System().install(patch)
        system.instead = {"preadv": cut(os.preadv), "pwritev": cut(os.pwritev)}
        shelf = FilesShelf(tmp_path, direct_io)
        save(shelf, ROW, data)
        assert load(shelf, ROW, len(data)) == data
    assert load(shelf, ROW, len(data)) == data


@pytest.mark.parametrize("left", [0, 1, PAGE, 3 * PAGE - 1, 64 * PAGE])
@pytest.mark.parametrize("direct_io", [False, True, "auto"])
def test_a_truncated_row_is_damaged(tmp_path: Path, direct_io: bool, left: int) -> None:
    shelf = FilesShelf(tmp_path, direct_io)
    save(shelf, ROW, payload(1, 100 * PAGE))
    (path,) = (tmp_path / "rows").rglob(ROW.file_name)
    os.truncate(path, left)
    with pytest.raises(RowDamaged):
        load(shelf, ROW, 100 * PAGE)
    (row,) = shelf.rows()
    assert row.nbytes == left
    assert load(shelf, ROW, left) == payload(1, 100 * PAGE)[:left]


def test_a_row_that_is_truncated_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    shelf = FilesShelf(tmp_path)
    save(shelf, ROW, payload(1))
    (path,) = (tmp_path / "rows").rglob(ROW.file_name)

    def before(number: int, name: str) -> None:
        if name == "preadv":
            os.truncate(path, PAGE)

    with pytest.MonkeyPatch.context() as patch:
        System(before).install(patch)
        with pytest.raises(RowDamaged):
            load(shelf, ROW, 4 * PAGE)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(tmp_path / "small", "tmpfs", "size=1m") as folder:
        yield folder


def test_a_full_disk_refuses_parts_and_keeps_rows(small_disk: Path) -> None:
    shelf = FilesShelf(small_disk, "auto")
    save_row(shelf, ROW)
    with pytest.raises(ShelfFailure, match="ENOSPC"):
        shelf.begin("writer", "large", 2 * MIB)
    assert list(shelf.parts()) == []
    shelf.begin("writer", "p0", 64 * PAGE)
    shelf.begin("writer", "p1", 64 * PAGE)
    shelf.begin("writer", "p2", 64 * PAGE)
    with pytest.raises(ShelfFailure, match="ENOSPC"):
        shelf.begin("writer", "p3", 64 * PAGE)
    with pytest.raises(ShelfFailure, match="ENOSPC"):
        shelf.put_note("writer", "p0", 0, bytes(MIB))
    assert dict(shelf.notes("writer", "p0")) == {}
    shelf.write("writer", "p0", [(0, pages(payload(1, 64 * PAGE)))])
    assert shelf.commit("writer", "p0", "other", OTHER), "its room was its own"
    shelf.remove_row("other", OTHER)
    discard_all(shelf)
    assert verify_all(shelf) == {ROW}
    save_row(shelf, NEW)
    assert verify_all(shelf) == {ROW, NEW}


@pytest.mark.parametrize("above", [0, 1, 2])
@pytest.mark.parametrize(("times", "is_saved"), [(1, True), (3, True), (100, False)])
def test_folders_that_are_removed_as_soon_as_they_are_made(
    tmp_path: Path, above: int, times: int, is_saved: bool
) -> None:
    """Another process removes empty folders, and may meet one before anything is in it."""
    shelf = FilesShelf(tmp_path / "store")
    folder = Path(shelf._folders.row_folder("ns", NEW))
    goes = [folder, *folder.parents][above]
    removed: list[Path] = []

    def mkdir(path: str, mode: int) -> None:
        os.mkdir(path, mode)
        if Path(path) == goes and len(removed) < times:
            removed.append(goes)
            goes.rmdir()

    with pytest.MonkeyPatch.context() as patch:
        System().install(patch).instead["mkdir"] = mkdir
        if not is_saved:
            with pytest.raises(ShelfFailure):
                save_row(shelf, NEW)
            return
        save_row(shelf, NEW)
    assert len(removed) == times
    verify(shelf, NEW)


@pytest.mark.parametrize("code", CODES)
def test_a_root_that_cannot_be_made_is_a_failure(tmp_path: Path, code: int) -> None:
    failed = 0
    for number in range(100):
        root = tmp_path / f"{number}"
        with pytest.MonkeyPatch.context() as patch:
            system = System(failing_at(number, code)).install(patch)
            try:
                open_root(root)
            except ShelfFailure:
                failed += 1
        if number >= len(system.made):
            break
        left = {path.name for path in root.iterdir()} if root.exists() else set()
        assert system.made[number] == "unlink" or left <= {"format"}
        open_root(root)
    assert failed >= 5
