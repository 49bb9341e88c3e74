"""What lies under memory is told as the kernel has it, and small pages are told of once."""

from __future__ import annotations

import importlib.util
import logging
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from transport.hugepages import HUGE_PAGE_BYTES
from transport.nixl.transport import NixlTransport
from transport.pages import SMALL_NBYTES, Backing, backing, complaint, mappings, now, small_pages
from transport.types import Device, Memory

MIB = 1 << 20
BASE = 1 << 40
SETTINGS = "enabled=madvise, shmem_enabled=never"


def smaps(start: int, nbytes: int, *, eligible: bool = False, flags: str = "", **kib: int) -> str:
    """One mapping as the kernel writes it."""
    lines = [f"{start:x}-{start + nbytes:x} rw-p 00000000 00:00 0 ", f"Size: {nbytes // 1024} kB"]
    lines += [f"{name}:     {value} kB" for name, value in kib.items()]
    lines += [f"THPeligible:    {int(eligible)}", f"VmFlags: rd wr {flags} ac "]
    return "\n".join(lines) + "\n"


def under(memory: Memory, *texts: str) -> Backing:
    return backing([memory], "".join(texts).splitlines(keepends=True))


def test_touched_bytes_count_as_the_pages_they_lie_on() -> None:
    memory = Memory(BASE, 64 * MIB)
    half = smaps(BASE, 64 * MIB, eligible=True, Rss=65536, AnonHugePages=32768)
    assert under(memory, half) == Backing(64 * MIB, 32 * MIB)
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
    assert under(memory, *texts) == Backing(64 * MIB, 32 * MIB, is_shared=True)
    assert [m.end - m.start for m in mappings("".join(texts).splitlines(True))] == [64 * MIB] * 3


def test_less_than_half_is_complained_of_with_numbers_and_remedy() -> None:
    text = complaint(Backing(SMALL_NBYTES, SMALL_NBYTES // 4), SETTINGS, ["MADV: EINVAL", ""])
    assert text is not None
    assert "16,777,216 of 67,108,864 bytes" in text
    assert "4.2 GB/s with pages of 4 KiB and 5.4 GB/s" in text
    assert "transparent_hugepage/enabled to madvise" in text
    assert "hugetlbfs" in text
    assert SETTINGS in text
    assert text.endswith("the kernel answered MADV: EINVAL")


def test_shared_memory_has_another_remedy() -> None:
    text = complaint(Backing(SMALL_NBYTES, 0, is_shared=True), SETTINGS)
    assert text is not None
    assert "transparent_hugepage/shmem_enabled to advise" in text


@pytest.mark.parametrize(
    "found",
    [Backing(SMALL_NBYTES, SMALL_NBYTES // 2), Backing(SMALL_NBYTES - 1, 0), Backing(0, 0)],
    ids=["half", "little", "none"],
)
def test_what_is_well_or_too_small_is_passed_over(found: Backing) -> None:
    assert complaint(found, SETTINGS) is None


def test_memory_of_a_device_is_passed_over() -> None:
    gpu = Memory(BASE, 1 << 30, Device("cuda"))
    assert small_pages([gpu]) is None
    assert backing([gpu], smaps(BASE, 1 << 30).splitlines(True)) == Backing(0, 0)


def test_settings_are_named_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert now(tmp_path) == "enabled=madvise, shmem_enabled=unknown"


# Real memory, and what a transport says of it


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
    page = mapped(SMALL_NBYTES, shared=True)
    page[:: os.sysconf("SC_PAGE_SIZE")] = 1
    if now().endswith(("always", "force", "within_size")):
        pytest.skip(f"this kernel backs shared memory with huge pages: {now()}")
    text = small_pages([Memory(page.ctypes.data, page.size)])
    assert text is not None
    assert f"0 of {page.size:,} bytes" in text


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
@pytest.mark.parametrize(
    ("shared", "nbytes", "huge_pages", "times"),
    [
        (True, SMALL_NBYTES, True, 1),
        (False, SMALL_NBYTES, True, 0),
        (True, SMALL_NBYTES // 2, True, 0),
        (True, SMALL_NBYTES, False, 0),
    ],
    ids=["small pages", "huge pages", "little memory", "switched off"],
)
def test_a_transport_complains_once_of_what_is_wrong(
    shared: bool, nbytes: int, huge_pages: bool, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = "enabled=madvise, shmem_enabled=never"
    if now() != expected:
        pytest.skip(f"needs a kernel with {expected}, and this has {now()}")
    page, other = mapped(nbytes, shared), mapped(4096, shared)
    page[:: os.sysconf("SC_PAGE_SIZE")] = 1
    with (
        caplog.at_level(logging.WARNING, "transport"),
        NixlTransport("pages", huge_pages=huge_pages, huge_page_s=120.0) as transport,
    ):
        transport.register([Memory(page.ctypes.data, page.size)])
        transport.register([Memory(other.ctypes.data, other.size)])
    told = [record for record in caplog.records if "lie on huge pages" in record.getMessage()]
    assert len(told) == times
