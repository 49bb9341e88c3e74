from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from transport.hugepages import HUGE_PAGE_BYTES, CollapseReport, collapse
from transport.types import Device, Memory

_HUGEPAGE, _COLLAPSE = 14, 25


class Kernel:
    """Answers madvise as it is told and remembers what it was asked."""

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
    backing = mmap.mmap(-1, 4 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = np.frombuffer(backing, dtype=np.uint8)
    page[:] = np.arange(len(page), dtype=np.uint64).astype(np.uint8)
    report = collapse(Memory(page.ctypes.data, len(page)))
    assert isinstance(report, CollapseReport)
    assert report.collapsed_bytes <= report.eligible_bytes
    assert (page == np.arange(len(page), dtype=np.uint64).astype(np.uint8)).all()
