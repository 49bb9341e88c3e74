"""What is below the root and not ours is not followed, not read and not deleted."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pdconn.store.shelf import folders
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.folders import open_root
from pdconn.store.store_errors import FormatError, RowMissing, ShelfFailure, StoreError
from tests.store.shelves.plain_rows import PAGE, at_once, load, names_of, pages, payload, row_name

ROW, OTHER = row_name(1), row_name(2)


def a_link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def a_pipe(path: Path, target: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path, target: Path) -> None:
    path.mkdir()
    (path / "precious").write_bytes(b"precious")


def a_dangling_link(path: Path, target: Path) -> None:
    path.symlink_to(target.parent / "nowhere")


def a_socket(path: Path, target: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path may have 107 bytes only
        try:
            made.bind(path.name[:100])
            os.rename(path.name[:100], path.name)
        finally:
            os.chdir(here)


STRANGERS = [a_link, a_pipe, a_folder, a_dangling_link, a_socket]
Stranger = Callable[[Path, Path], None]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file elsewhere, of which nothing may be seen or changed."""
    path = tmp_path / "elsewhere" / "file"
    path.parent.mkdir()
    path.write_bytes(payload(9))
    os.utime(path, (1.0, 1.0))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def row_path(root: Path, name: object = ROW) -> Path:
    """Where the row lies, its folder made."""
    path = root / "rows" / "ns" / ROW.kind / ROW.key[:1].hex() / ROW.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_is_in_place_of_a_row_is_no_row(root: Path, target: Path, stranger: Stranger) -> None:
    shelf = FilesShelf(root)
    path = row_path(root)
    stranger(path, target)
    assert not shelf.has("ns", ROW)
    with pytest.raises(RowMissing):
        load(shelf, ROW, PAGE)
    assert names_of(shelf) == []
    assert shelf.remove_row("ns", ROW) == 0
    shelf.touch("ns", [ROW])
    shelf.begin("writer", "p", PAGE)
    with pytest.raises(ShelfFailure):
        shelf.commit("writer", "p", "ns", ROW)
    assert [part.part for part in shelf.parts()] == ["p"]
    assert os.path.lexists(path)
    assert target.read_bytes() == payload(9)
    assert target.stat().st_mtime == 1.0


def test_following_a_link_is_caught(
    root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(folders, "_OPEN", os.O_CLOEXEC)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_what_is_in_place_of_a_row_is_no_row(root, target, a_link)


@pytest.mark.parametrize("above", ["rows", "rows/ns", "rows/ns/fa", "rows/ns/fa/XX"])
def test_a_link_in_place_of_a_folder_is_not_followed(
    root: Path, tmp_path: Path, above: str
) -> None:
    elsewhere = FilesShelf(tmp_path / "elsewhere")
    elsewhere.begin("writer", "p", PAGE)
    assert elsewhere.commit("writer", "p", "ns", ROW)
    above = above.replace("XX", ROW.key[:1].hex())
    shelf = FilesShelf(root)
    (root / above).parent.mkdir(parents=True, exist_ok=True)
    (root / above).symlink_to(tmp_path / "elsewhere" / above)
    assert not shelf.has("ns", ROW)
    with pytest.raises(RowMissing):
        load(shelf, ROW, PAGE)
    assert names_of(shelf) == [] == names_of(shelf, "ns")
    assert shelf.remove_row("ns", ROW) == 0
    shelf.begin("writer", "p", PAGE)
    with pytest.raises(ShelfFailure):
        shelf.commit("writer", "p", "ns", row_name(1))
    assert elsewhere.has("ns", ROW)


@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_is_in_place_of_a_part_or_note_is_left(
    root: Path, target: Path, stranger: Stranger
) -> None:
    shelf = FilesShelf(root)
    shelf.begin("writer", "p", PAGE)
    folder = root / "parts" / "writer"
    stranger(folder / "q", target)
    stranger(folder / "p.note0", target)
    assert dict(shelf.notes("writer", "p")) == {}
    assert [part.part for part in shelf.parts()] == ["p"]
    for act in (
        lambda: shelf.begin("writer", "q", PAGE),
        lambda: shelf.write("writer", "q", [(0, pages(PAGE))]),
        lambda: shelf.put_note("writer", "q", 0, b"note"),
        lambda: shelf.commit("writer", "q", "ns", ROW),
    ):
        with pytest.raises(ShelfFailure):
            act()
    shelf.discard("writer", "q")
    shelf.discard("writer", "p")
    assert {path.name for path in folder.iterdir()} == {"q", "p.note0"}
    assert target.read_bytes() == payload(9)


def test_a_link_in_place_of_a_writer_is_not_followed(root: Path, tmp_path: Path) -> None:
    elsewhere = FilesShelf(tmp_path / "elsewhere")
    elsewhere.begin("writer", "p", PAGE)
    shelf = FilesShelf(root)
    (root / "parts").mkdir()
    (root / "parts" / "writer").symlink_to(tmp_path / "elsewhere" / "parts" / "writer")
    assert list(shelf.parts()) == []
    with pytest.raises(ShelfFailure):
        shelf.write("writer", "p", [(0, pages(PAGE))])
    with pytest.raises(ShelfFailure):
        shelf.begin("writer", "q", PAGE)
    assert dict(shelf.notes("writer", "p")) == {}
    shelf.discard("writer", "p")
    assert [part.part for part in elsewhere.parts()] == ["p"]


def test_files_of_other_names_are_not_listed(root: Path) -> None:
    shelf = FilesShelf(root)
    shelf.begin("writer", "p", PAGE)
    assert shelf.commit("writer", "p", "ns", ROW)
    folder = row_path(root).parent
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    (folder / (OTHER.file_name + "x")).write_text("mine", encoding="utf-8")
    (root / "rows" / "ns" / "fa" / "zz").mkdir()
    (root / "rows" / "ns" / "fa" / "zz" / ROW.file_name).write_text(
        "not where it belongs", encoding="utf-8"
    )
    (root / "rows" / "name space" / "fa" / "aa").mkdir(parents=True)
    (root / "rows" / "file").write_text("mine", encoding="utf-8")
    (root / "parts" / "file").write_text("mine", encoding="utf-8")
    (root / "parts" / ".hidden").mkdir()
    assert names_of(shelf) == [("ns", ROW)]
    assert list(shelf.parts()) == []


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a\0b", "x" * 200, "a b"])
@pytest.mark.parametrize(
    "act",
    [
        lambda shelf, name: shelf.has(name, ROW),
        lambda shelf, name: shelf.begin("writer", name, PAGE),
        lambda shelf, name: shelf.begin(name, "p", PAGE),
    ],
)
def test_a_name_that_would_lead_elsewhere_is_refused(
    root: Path, act: Callable[[FilesShelf, str], object], name: str
) -> None:
    with pytest.raises(FormatError, match="expected"):
        act(FilesShelf(root), name)


def test_a_part_may_not_be_named_as_a_note_is(root: Path) -> None:
    with pytest.raises(FormatError, match="note"):
        FilesShelf(root).begin("writer", "p.note0", PAGE)


# The root


def test_a_root_is_made_once_with_folders_for_us_alone(root: Path) -> None:
    at_once(lambda: open_root(root / "deep") for _ in range(8))
    assert [path.name for path in (root / "deep").iterdir()] == ["format"]
    shelf = FilesShelf(root / "deep")
    shelf.begin("writer", "p", PAGE)
    shelf.put_note("writer", "p", 0, b"note")
    assert shelf.commit("writer", "p", "ns", ROW)
    shelf.begin("writer", "p", PAGE)
    for path in (root / "deep").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("text", ["pdconn store, version 2\n", "", "pdconn store, version 1"])
def test_a_root_of_another_version_is_refused(root: Path, text: str) -> None:
    root.mkdir()
    (root / "format").write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match="version 1"):
        FilesShelf(root)
    assert (root / "format").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_version_that_is_no_file_is_refused(root: Path, target: Path, stranger: Stranger) -> None:
    root.mkdir()
    stranger(root / "format", target)
    with pytest.raises(StoreError):
        FilesShelf(root)
    assert [path.name for path in root.iterdir()] == ["format"]


def test_a_root_emptied_under_a_shelf_is_filled_again(root: Path) -> None:
    shelf = FilesShelf(root)
    for _ in range(2):
        shelf.begin("writer", "p", PAGE)
        assert shelf.commit("writer", "p", "ns", ROW)
        assert shelf.has("ns", ROW)
        for folder, _, names in os.walk(root, topdown=False):
            for name in names:
                (Path(folder) / name).unlink()
            if Path(folder) != root:
                Path(folder).rmdir()
        assert not shelf.has("ns", ROW)
        assert names_of(shelf) == []


def test_a_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    root.symlink_to(tmp_path / "disk")
    shelf = FilesShelf(root)
    shelf.begin("writer", "p", PAGE)
    assert shelf.commit("writer", "p", "ns", ROW)
    assert names_of(FilesShelf(tmp_path / "disk")) == [("ns", ROW)]
