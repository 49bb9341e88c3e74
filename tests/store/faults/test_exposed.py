"""A root that others may write to is refused, as a secret's file is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdconn.store.settings import read_store_settings
from pdconn.store.shelf import folders
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.store_errors import FormatError
from pdconn.tools.doctor.local.store_folder import judge_store, read_store
from tests.store.shelves.plain_rows import payload, row_name, save
from tests.store.shelves.system import in_child


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir(0o700)
    return made


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o2775, 0o702])
def test_a_root_that_others_can_write_is_refused(root: Path, mode: int) -> None:
    root.chmod(mode)
    with pytest.raises(FormatError, match=f"{root}: .*only its owner can write.*mode {mode:04o}"):
        FilesShelf(root)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o711])
def test_a_root_that_its_owner_alone_can_write_is_taken(root: Path, mode: int) -> None:
    """Mount points may be listed by all; what we make in them may not."""
    root.chmod(mode)
    with FilesShelf(root) as shelf:
        assert save(shelf, row_name(), payload(1))
    assert (root / "rows").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["rows", "parts", "budget"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_in_it_is_ours_alone_to_write(root: Path, name: str, mode: int) -> None:
    (root / name).mkdir()
    (root / name).chmod(mode)
    with pytest.raises(FormatError, match=f"{root / name}: .*mode {mode:04o}"):
        FilesShelf(root)


def test_a_root_that_is_made_is_right_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        FilesShelf(tmp_path / "a" / "b").close()
    finally:
        os.umask(before)
    FilesShelf(tmp_path / "a" / "b").close()
    for folder in ("a", "a/b"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("owner", "is_taken"), [(1234, True), (0, True), (4321, False)])
def test_a_folder_of_another_user_is_refused(root: Path, owner: int, is_taken: bool) -> None:
    if os.geteuid():
        pytest.skip("only root gives folders away")
    os.chown(root, owner, owner)

    def check() -> None:
        os.seteuid(1234)
        folders.check_private(str(root))

    root.chmod(0o755)
    for above in list(root.parents)[:-2]:
        above.chmod(above.stat().st_mode | 0o011)
    assert (in_child(check) == 0) == is_taken
    FilesShelf(root).close()  # root of the machine may


def test_doctor_says_what_an_engine_would(root: Path) -> None:
    settings = read_store_settings({"root": str(root), "capacity": "1MiB"})
    assert not [one.id for one in judge_store(read_store(settings), settings)]
    root.chmod(0o777)
    (found,) = judge_store(read_store(settings), settings)
    assert "mode 0777" in found.message
    assert "chmod go-w" in found.remedy


def test_taking_any_folder_is_caught(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: as it was."""

    monkeypatch.setattr(folders, "check_private", lambda path: None)
    with pytest.raises(pytest.fail.Exception):
        test_a_root_that_others_can_write_is_refused(root, 0o777)
