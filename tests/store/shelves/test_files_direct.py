"""When rows pass by the page cache, and what happens where the file system refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdconn.store.shelf import transfer
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.transfer import RecentRows, cached_nbytes, file_runs
from tests.store.shelves.plain_rows import MIB, PAGE, load, pages, payload, row_name, save
from tests.store.shelves.system import System

ROW = row_name(1)
DATA = payload(1, MIB)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    transfer.recent_rows.cache_clear()
    yield System().install(monkeypatch)
    transfer.recent_rows.cache_clear()


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets what the kernel says to be in the page cache."""

    def say(nbytes: int | None) -> None:
        monkeypatch.setattr(transfer, "cached_nbytes", lambda *_: nbytes)

    return say


def direct_calls(system: System, act: Callable[[], object]) -> int:
    """Times that O_DIRECT was asked for."""
    before = len(system.made)
    act()
    return system.made[before:].count("fcntl")


def forgotten(shelf: FilesShelf) -> FilesShelf:
    """Another process's shelf over the same rows."""
    transfer.recent_rows.cache_clear()
    return FilesShelf(shelf._folders.root, "auto")


def test_auto_reads_a_cold_row_directly_and_a_hot_one_from_the_cache(
    tmp_path: Path, system: System, cached: Callable[[int | None], None]
) -> None:
    shelf = FilesShelf(tmp_path, "auto")
    cached(0)
    assert direct_calls(system, lambda: save(shelf, ROW, DATA)) == 0, "writes are cached"
    assert direct_calls(system, lambda: load(shelf, ROW, MIB)) == 0, "just saved"
    shelf = forgotten(shelf)
    assert direct_calls(system, lambda: load(shelf, ROW, MIB)) == 1
    assert direct_calls(system, lambda: load(shelf, ROW, MIB)) == 0, "read before"
    shelf = forgotten(shelf)
    shelf.touch("ns", [ROW])
    assert direct_calls(system, lambda: load(shelf, ROW, MIB)) == 0, "touched"
    shelf = forgotten(shelf)
    cached(MIB)
    assert direct_calls(system, lambda: load(shelf, ROW, MIB)) == 0, "in the page cache"
    shelf = forgotten(shelf)
    cached(None)
    assert direct_calls(system, lambda: load(shelf, ROW, MIB)) == 1, "a kernel that does not say"


def test_auto_reads_little_or_unaligned_from_the_cache(
    tmp_path: Path, system: System, cached: Callable[[int | None], None]
) -> None:
    shelf = FilesShelf(tmp_path, "auto")
    cached(0)
    save(shelf, ROW, DATA)
    shelf = forgotten(shelf)
    assert direct_calls(system, lambda: load(shelf, ROW, 16 * PAGE - PAGE)) == 0
    shelf = forgotten(shelf)
    into = memoryview(bytearray(MIB + 1))[1:]
    if transfer.address_of(into) % PAGE:
        assert direct_calls(system, lambda: shelf.read("ns", ROW, [(0, into)])) == 0
        assert into == DATA
    assert direct_calls(system, lambda: load(shelf, ROW, 0, at=[(PAGE // 2, MIB // 2)])) == 0


@pytest.mark.parametrize("direct_io", [True, False])
def test_always_and_never(tmp_path: Path, system: System, direct_io: bool) -> None:
    shelf = FilesShelf(tmp_path, direct_io)
    if direct_io and not is_supported(tmp_path):
        pytest.skip("no O_DIRECT on this file system")
    assert direct_calls(system, lambda: save(shelf, ROW, DATA)) == int(direct_io)
    for _ in range(2):
        assert direct_calls(system, lambda: load(shelf, ROW, MIB)) == int(direct_io)


def test_a_mixed_read_takes_each_range_as_it_can(tmp_path: Path, system: System) -> None:
    shelf = FilesShelf(tmp_path, True)
    save(shelf, ROW, DATA)
    at = [(MIB - 100, 100), (0, 16 * PAGE), (17, 31), (32 * PAGE, 16 * PAGE)]
    assert load(shelf, ROW, 0, at=at) == b"".join(DATA[a : a + n] for a, n in at)


def is_supported(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("refuses", ["fcntl", "transfer", "second transfer"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_is_asked_once(
    tmp_path: Path, system: System, refuses: str, code: int
) -> None:
    """Whether it refuses the flag, or the calls that come after."""
    is_direct = False
    calls = 0

    def fcntl(fd: int, command: int, flags: int) -> int:
        nonlocal is_direct
        if refuses == "fcntl" and flags:
            raise OSError(code, "no O_DIRECT")
        is_direct = bool(flags)
        return 0

    def refusing(call: Callable[..., int]) -> Callable[..., int]:
        def transferred(fd: int, buffers: Any, at: int) -> int:
            nonlocal calls
            calls += is_direct
            if is_direct and calls >= (2 if refuses.startswith("second") else 1):
                raise OSError(code, "no O_DIRECT")
            return call(fd, buffers, at)

        return transferred

    system.fcntl.fcntl = system._wrapped("fcntl", system.fcntl)
    system.instead = {
        "fcntl": fcntl,
        "preadv": refusing(os.preadv),
        "pwritev": refusing(os.pwritev),
    }
    halves = [(MIB // 2, MIB // 2), (0, MIB // 2)]
    shelf = FilesShelf(tmp_path, True)
    shelf.begin("writer", "p", MIB)
    shelf.write("writer", "p", [(at, pages(DATA[at : at + n])) for at, n in halves])
    assert shelf.commit("writer", "p", "ns", ROW)
    assert direct_calls(system, lambda: load(shelf, ROW, 0, at=halves)) == 0
    other = FilesShelf(tmp_path, True)
    is_direct, calls = False, 0
    assert load(other, ROW, 0, at=halves) == DATA[MIB // 2 :] + DATA[: MIB // 2]
    assert direct_calls(system, lambda: load(other, ROW, MIB)) == 0


def test_the_kernel_says_what_is_cached(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDWR)
    try:
        if cached_nbytes(fd, 0, MIB) is None:
            pytest.skip("a kernel without cachestat")
        assert cached_nbytes(fd, 0, MIB) == MIB
        assert cached_nbytes(fd, MIB, MIB) == 0
        assert transfer.is_worth_direct(fd, file_runs([(0, pages(MIB))])) is False
    finally:
        os.close(fd)


def test_neighbours_are_one_run_up_to_what_a_call_takes() -> None:
    memory = pages(3000 * 16)
    ranges = [(at, memory[at : at + 16]) for at in range(0, len(memory), 16)]
    runs = file_runs(ranges)
    assert [run.nbytes for run in runs] == [1024 * 16, 1024 * 16, 952 * 16]
    assert [run.offset for run in runs] == [0, 1024 * 16, 2048 * 16]
    assert file_runs([]) == [] == file_runs([(5, memory[:0])])
    apart = file_runs([(0, memory[:16]), (32, memory[16:32]), (16, memory[:0])])
    assert [(run.offset, run.nbytes) for run in apart] == [(0, 16), (32, 16)]


def test_a_run_is_aligned_if_all_of_it_is() -> None:
    memory = pages(8 * PAGE)
    one = memory[:PAGE]
    for ranges, expected in (
        ([(0, one), (PAGE, memory[4 * PAGE :])], True),
        ([(1, one)], False),
        ([(0, memory[: PAGE - 1])], False),
        ([(0, memory[1 : PAGE + 1])], False),
        ([(0, one), (PAGE, memory[PAGE : PAGE + 5])], False),
    ):
        (run,) = file_runs(ranges)
        assert run.is_aligned is expected


def test_what_is_left_of_a_run_is_the_rest() -> None:
    memory = pages(payload(1, 30))
    (run,) = file_runs([(100, memory[:10]), (110, memory[10:20]), (120, memory[20:])])
    for done in range(30):
        left = run.after(done)
        assert (left.offset, left.nbytes) == (100 + done, 30 - done)
        assert b"".join(left.buffers) == bytes(memory[done:])


def test_recent_rows_are_the_last_ones() -> None:
    recent = RecentRows(most=3)
    for path in ("a", "b", "c", "a", "d"):
        recent.add_path(path)
    assert [path for path in "abcd" if path in recent] == ["a", "c", "d"]
