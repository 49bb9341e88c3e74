"""A file system without ``fallocate(2)``: ramfs here, NFS before 4.2 elsewhere."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdconn.store.shelf import files_shelf as files
from pdconn.store.shelf.files_shelf import FilesShelf, fallocate
from tests.store.shelves.plain_rows import PAGE, load, pages, payload, row_name
from tests.store.shelves.system import in_child, mounted

ROW, HALF = row_name(1), 8 * PAGE


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "ramfs", "ramfs") as folder:
        yield folder


def save_by_two_processes(root: Path) -> bytes:
    """Each rank begins the part and writes its half; what is read of the row."""
    data = payload(1, 2 * HALF)

    def write(rank: int) -> None:
        with FilesShelf(root) as shelf:
            shelf.begin("writer", "p", 2 * HALF)
            at = rank * HALF
            shelf.write("writer", "p", [(at, pages(data[at : at + HALF]))])
            shelf.put_note("writer", "p", rank, b"note")

    write(0)
    assert in_child(lambda: write(1)) == 0, "the second rank failed"
    with FilesShelf(root) as shelf:
        assert set(shelf.notes("writer", "p")) == {0, 1}
        assert shelf.commit("writer", "p", "ns", ROW)
        return load(shelf, ROW, 2 * HALF)


def test_two_ranks_save_where_the_file_system_cannot_reserve(ramfs: Path) -> None:
    """The second rank failed with EBADF, and removed what the first had written."""
    with open(ramfs / "probe", "wb") as file, pytest.raises(OSError, match="supported") as seen:
        fallocate(file.fileno(), PAGE)
    assert seen.value.errno == errno.EOPNOTSUPP
    assert save_by_two_processes(ramfs) == payload(1, 2 * HALF)


def test_two_ranks_save_where_it_can(tmp_path: Path) -> None:
    assert save_by_two_processes(tmp_path) == payload(1, 2 * HALF)


def test_the_c_library_s_emulation_is_caught(ramfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: it undoes what another process writes between its read and its write."""
    with FilesShelf(ramfs) as shelf:
        shelf.begin("writer", "p", PAGE)
    (path,) = ramfs.rglob("p")
    libc = ctypes.CDLL(None)

    def emulated(fd: int, nbytes: int) -> None:
        """Of ``posix_fallocate``: read a block's last byte, and write a zero if it is one."""
        assert os.pread(fd, 1, nbytes - 1) == b"\0"
        path.write_bytes(payload(1, nbytes - 1) + b"x")  # another rank, at this moment
        os.pwrite(fd, b"\0", nbytes - 1)

    with open(path, "wb") as file:
        assert libc.posix_fallocate(file.fileno(), ctypes.c_long(0), ctypes.c_long(PAGE)) == 0
        assert libc.posix_fallocate(file.fileno(), ctypes.c_long(0), ctypes.c_long(PAGE)) == (
            errno.EBADF
        ), "the second call needs to read"
    monkeypatch.setattr(files, "fallocate", emulated)
    with FilesShelf(ramfs) as shelf:
        shelf.begin("writer", "p", PAGE)
    assert path.read_bytes()[-1:] != b"x"
