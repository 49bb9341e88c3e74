"""Huge pages: the kernel is asked for them within a budget, and small pages are warned of once."""

from __future__ import annotations

import errno
import importlib.util
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from transport.hugepages import (
    HUGE_PAGE_BYTES,
    WARNED_NBYTES,
    CollapseReport,
    PageBacking,
    backing,
    collapse,
    kernel_settings,
    mappings,
    small_page_warning,
    warning_of,
)
from transport.nixl.transport import NixlTransport
from transport.types import Device, Memory

_HUGEPAGE, _COLLAPSE = 14, 25


class Kernel:
    """A fake of madvise: answers as the test says, and records its calls."""

    def __init__(self, answer: Callable[[int, int], int] = lambda address, advice: 0) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._answer = answer

    def __call__(self, address: int, nbytes: int, advice: int) -> int:
        self.calls.append((address, nbytes, advice))
        return self._answer(address, advice)

    def collapsed(self) -> list[tuple[int, int]]:
        return [(address, nbytes) for address, nbytes, advice in self.calls if advice == _COLLAPSE]


def _ticks(step_s: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step_s


def test_only_whole_huge_pages_inside_the_memory_are_touched() -> None:
    kernel = Kernel()
    memory = Memory(5 * HUGE_PAGE_BYTES - 1, 40 * HUGE_PAGE_BYTES)
    report = collapse(memory, madvise=kernel)
    first, end = 5 * HUGE_PAGE_BYTES, 44 * HUGE_PAGE_BYTES
    assert kernel.calls[0] == (first, end - first, _HUGEPAGE)
    assert kernel.collapsed()[0][0] == first
    assert sum(kernel.collapsed()[-1]) == end
    assert sum(nbytes for _, nbytes in kernel.collapsed()) == end - first
    assert report.collapsed_bytes == report.eligible_bytes == end - first
    assert report.reason == ""


@pytest.mark.parametrize(
    "memory",
    [
        Memory(HUGE_PAGE_BYTES + 1, 2 * HUGE_PAGE_BYTES - 2),
        Memory(1 << 40, 1 << 30, Device("cuda")),
    ],
)
def test_what_cannot_have_huge_pages_is_left_alone(memory: Memory) -> None:
    kernel = Kernel()
    report = collapse(memory, madvise=kernel)
    assert (report.eligible_bytes, report.collapsed_bytes) == (0, 0)
    assert report.reason
    assert kernel.calls == []


def test_a_kernel_without_huge_pages_is_asked_once() -> None:
    kernel = Kernel(lambda address, advice: errno.EINVAL)
    report = collapse(Memory(HUGE_PAGE_BYTES, 100 * HUGE_PAGE_BYTES), madvise=kernel)
    assert report.collapsed_bytes == 0
    assert report.reason == "MADV_HUGEPAGE: EINVAL"
    assert len(kernel.calls) == 1


def test_a_refused_chunk_does_not_stop_the_others() -> None:
    first = HUGE_PAGE_BYTES
    kernel = Kernel(
        lambda address, advice: errno.ENOMEM if (address, advice) == (first, _COLLAPSE) else 0
    )
    report = collapse(Memory(first, 24 * HUGE_PAGE_BYTES), madvise=kernel)
    assert report.collapsed_bytes == 16 * HUGE_PAGE_BYTES
    assert report.reason == "MADV_COLLAPSE: ENOMEM"


def test_budgets_of_bytes_and_of_seconds_are_kept() -> None:
    memory = Memory(HUGE_PAGE_BYTES, 100 * HUGE_PAGE_BYTES)
    by_bytes = collapse(memory, madvise=Kernel(), max_bytes=9 * HUGE_PAGE_BYTES)
    assert by_bytes.collapsed_bytes == 16 * HUGE_PAGE_BYTES  # two chunks of 8 pages
    clock = _ticks(1.0)
    by_time = collapse(memory, madvise=Kernel(), max_seconds=3.0, clock=lambda: next(clock))
    assert by_time.collapsed_bytes == 16 * HUGE_PAGE_BYTES
    assert "budget" in by_time.reason
    assert collapse(memory, madvise=Kernel(), max_seconds=0.0).collapsed_bytes == 0


def test_real_memory_keeps_its_bytes() -> None:
    raw = mmap.mmap(-1, 4 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = np.frombuffer(raw, dtype=np.uint8)
    page[:] = np.arange(len(page), dtype=np.uint64).astype(np.uint8)
    report = collapse(Memory(page.ctypes.data, len(page)))
    assert isinstance(report, CollapseReport)
    assert report.collapsed_bytes <= report.eligible_bytes
    assert (page == np.arange(len(page), dtype=np.uint64).astype(np.uint8)).all()


MIB = 1 << 20
BASE = 1 << 40
SETTINGS = "enabled=madvise, shmem_enabled=never"


def smaps(start: int, nbytes: int, *, eligible: bool = False, flags: str = "", **kib: int) -> str:
    """One mapping as the kernel writes it."""
    lines = [f"{start:x}-{start + nbytes:x} rw-p 00000000 00:00 0 ", f"Size: {nbytes // 1024} kB"]
    lines += [f"{name}:     {value} kB" for name, value in kib.items()]
    lines += [f"THPeligible:    {int(eligible)}", f"VmFlags: rd wr {flags} ac "]
    return "\n".join(lines) + "\n"


def under(memory: Memory, *texts: str) -> PageBacking:
    return backing([memory], "".join(texts).splitlines(keepends=True))


def test_touched_bytes_count_as_the_pages_they_lie_on() -> None:
    memory = Memory(BASE, 64 * MIB)
    half = smaps(BASE, 64 * MIB, eligible=True, Rss=65536, AnonHugePages=32768)
    assert under(memory, half) == PageBacking(64 * MIB, 32 * MIB)
    for name in ("ShmemPmdMapped", "FilePmdMapped"):
        assert under(memory, smaps(BASE, 64 * MIB, Rss=65536, **{name: 65536})).huge_nbytes == (
            64 * MIB
        )
    assert under(memory, smaps(BASE, 64 * MIB, Private_Hugetlb=65536)).huge_nbytes == 64 * MIB


@pytest.mark.parametrize("eligible", [True, False])
def test_untouched_bytes_count_as_the_pages_they_will_get(eligible: bool) -> None:
    text = smaps(BASE, 64 * MIB, eligible=eligible, Rss=16384)
    assert under(Memory(BASE, 64 * MIB), text).huge_nbytes == (48 * MIB if eligible else 0)


def test_mappings_count_by_the_part_that_is_of_the_memory() -> None:
    memory = Memory(BASE + 32 * MIB, 64 * MIB)
    texts = [
        smaps(BASE - 64 * MIB, 64 * MIB, Rss=65536, AnonHugePages=65536),
        smaps(BASE, 64 * MIB, Rss=65536, AnonHugePages=65536),
        smaps(BASE + 64 * MIB, 64 * MIB, flags="sh", Rss=65536),
    ]
    assert under(memory, *texts) == PageBacking(64 * MIB, 32 * MIB, is_shared=True)
    assert [m.end - m.start for m in mappings("".join(texts).splitlines(True))] == [64 * MIB] * 3


def test_less_than_half_is_warned_of_with_numbers_and_remedy() -> None:
    text = warning_of(
        PageBacking(WARNED_NBYTES, WARNED_NBYTES // 4), SETTINGS, ["MADV: EINVAL", ""]
    )
    assert text is not None
    assert "16,777,216 of 67,108,864 bytes" in text
    assert "4.2 GB/s with pages of 4 KiB and 5.4 GB/s" in text
    assert "transparent_hugepage/enabled to madvise" in text
    assert "hugetlbfs" in text
    assert SETTINGS in text
    assert text.endswith("the kernel answered MADV: EINVAL")


def test_shared_memory_has_another_remedy() -> None:
    text = warning_of(PageBacking(WARNED_NBYTES, 0, is_shared=True), SETTINGS)
    assert text is not None
    assert "transparent_hugepage/shmem_enabled to advise" in text


@pytest.mark.parametrize(
    "found",
    [
        PageBacking(WARNED_NBYTES, WARNED_NBYTES // 2),
        PageBacking(WARNED_NBYTES - 1, 0),
        PageBacking(0, 0),
    ],
    ids=["half", "little", "none"],
)
def test_there_is_no_warning_of_huge_pages_or_little_memory(found: PageBacking) -> None:
    assert warning_of(found, SETTINGS) is None


def test_memory_of_a_device_is_left_out() -> None:
    gpu = Memory(BASE, 1 << 30, Device("cuda"))
    assert small_page_warning([gpu]) is None
    assert backing([gpu], smaps(BASE, 1 << 30).splitlines(True)) == PageBacking(0, 0)


def test_settings_are_named_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n", encoding="utf-8")
    assert kernel_settings(tmp_path) == "enabled=madvise, shmem_enabled=unknown"


# Real memory, and the warning of a transport


def mapped(nbytes: int, shared: bool) -> NDArray[np.uint8]:
    """Memory that begins with a huge page; if shared, one that no kernel can give it.

    Shared memory is collapsed where its address and its offset in the file, 0 here, are
    multiples of 2 MiB alike; so its mapping must begin elsewhere.
    """
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS
    kept = []
    for more in range(1, 100):
        size = nbytes + HUGE_PAGE_BYTES + more * mmap.PAGESIZE
        raw = np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=np.uint8)
        skip = -raw.ctypes.data % HUGE_PAGE_BYTES
        if skip:
            return raw[skip : skip + nbytes]
        kept.append(raw)
    raise AssertionError("every mapping begins with a huge page")


def test_our_own_small_pages_are_found() -> None:
    page = mapped(WARNED_NBYTES, shared=True)
    page[:: os.sysconf("SC_PAGE_SIZE")] = 1
    if kernel_settings().endswith(("always", "force", "within_size")):
        pytest.skip(f"this kernel backs shared memory with huge pages: {kernel_settings()}")
    text = small_page_warning([Memory(page.ctypes.data, page.size)])
    assert text is not None
    assert f"0 of {page.size:,} bytes" in text


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
@pytest.mark.parametrize(
    ("shared", "nbytes", "huge_pages", "times"),
    [
        (True, WARNED_NBYTES, True, 1),
        (False, WARNED_NBYTES, True, 0),
        (True, WARNED_NBYTES // 2, True, 0),
        (True, WARNED_NBYTES, False, 0),
    ],
    ids=["small pages", "huge pages", "little memory", "switched off"],
)
def test_a_transport_warns_once_of_small_pages(
    shared: bool, nbytes: int, huge_pages: bool, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = "enabled=madvise, shmem_enabled=never"
    if kernel_settings() != expected:
        pytest.skip(f"needs a kernel with {expected}, and this has {kernel_settings()}")
    page, other = mapped(nbytes, shared), mapped(4096, shared)
    page[:: os.sysconf("SC_PAGE_SIZE")] = 1
    with (
        caplog.at_level(logging.WARNING, "transport"),
        NixlTransport("pages", huge_pages=huge_pages, huge_page_s=120.0) as transport,
    ):
        transport.register([Memory(page.ctypes.data, page.size)])
        transport.register([Memory(other.ctypes.data, other.size)])
    warnings = [record for record in caplog.records if "lie on huge pages" in record.getMessage()]
    assert len(warnings) == times
