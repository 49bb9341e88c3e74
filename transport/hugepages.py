"""Huge pages under host memory: requests them from the kernel, and reports what is there.

Copies between two processes on one host (CMA) spend most of their time on 4 KiB pages: huge pages
give 2.4 times the throughput.  PyTorch does not request them, and a connector gets the KV cache
after it was touched, too late for ``MADV_HUGEPAGE`` alone; ``MADV_COLLAPSE`` (Linux 6.1) moves
touched memory into huge pages::

    collapse            requests them; never fails: memory that the kernel refuses stays as it was
    backing             the pages that the kernel reports (/proc/self/smaps)
    small_page_warning  a remedy for the operator
    HugePages           all of these for the memory of one transport

Shared memory is different: whether it gets huge pages depends on another setting, off by default,
and it can be collapsed only if its address and its offset in the file happen to be equal modulo
2 MiB.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transport.types import Memory

_log = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20

WARNED_NBYTES = 64 << 20
"""With less memory than this there is no warning."""

SPEEDS = "4.2 GB/s with pages of 4 KiB and 5.4 GB/s with huge pages"
"""Measured: one READ of 537 MB over CMA, on two cores."""

_CHUNK_BYTES = 8 * HUGE_PAGE_BYTES
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_SMAPS = Path("/proc/self/smaps")
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S{4} ")
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")
_KIB = 1024

Madvise = Callable[[int, int, int], int]
"""``(address, nbytes, advice) -> errno``, 0 for success."""


@dataclass(frozen=True, slots=True)
class CollapseReport:
    """The result for one memory; ``reason`` is why not all of it was collapsed.

    ``eligible_bytes`` is the part that 2 MiB pages can cover.  A chunk that was
    collapsed only in part counts as 0, so ``collapsed_bytes`` is a lower bound.
    """

    eligible_bytes: int
    collapsed_bytes: int
    seconds: float
    reason: str = ""


def collapse(
    memory: Memory,
    *,
    max_bytes: int = 256 << 30,
    max_seconds: float = 10.0,
    madvise: Madvise | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> CollapseReport:
    """Move the 2 MiB-aligned part of ``memory`` into huge pages, within a budget.

    Beyond the budget of bytes or seconds the kernel may still use huge pages later
    (``MADV_HUGEPAGE``).  Memory that was never touched gets them at its first use; the report says
    ``EINVAL`` then.  Takes 0.3 to 3 s per GB of touched 4 KiB pages, more on a busy machine.
    """
    began = clock()
    if memory.device.kind != "cpu":
        return CollapseReport(0, 0, 0.0, f"{memory.device} is not host memory")
    start = -(-memory.base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = memory.end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end <= start:
        return CollapseReport(0, 0, 0.0, "smaller than one aligned huge page")
    advise = madvise or _libc_madvise()
    refused = advise(start, end - start, _MADV_HUGEPAGE)
    if refused:
        return CollapseReport(end - start, 0, clock() - began, _named("MADV_HUGEPAGE", refused))
    done, reason = 0, ""
    for address in range(start, end, _CHUNK_BYTES):
        if address - start >= max_bytes or clock() - began >= max_seconds:
            reason = f"budget of {max_bytes} bytes and {max_seconds} s is used up"
            break
        nbytes = min(_CHUNK_BYTES, end - address)
        refused = advise(address, nbytes, _MADV_COLLAPSE)
        if refused:  # go on: an untouched chunk is refused too, but the next one may be touched
            reason = _named("MADV_COLLAPSE", refused)
        else:
            done += nbytes
    report = CollapseReport(end - start, done, clock() - began, reason)
    _log.info(
        "pdconn: huge pages requested base=%#x nbytes=%s collapsed=%s seconds=%.2f reason=%r",
        memory.base,
        memory.nbytes,
        report.collapsed_bytes,
        report.seconds,
        report.reason,
    )
    return report


@dataclass(slots=True)
class PageMapping:
    """One mapping of this process: bytes by the kernel's names, and its flags."""

    start: int
    end: int
    nbytes: dict[str, int] = field(default_factory=dict)
    is_eligible: bool = False
    is_shared: bool = False

    @property
    def huge_nbytes(self) -> int:
        """Bytes on huge pages; untouched ones count if the mapping is eligible for huge pages."""
        huge = sum(self.nbytes.get(name, 0) for name in _HUGE)
        resident = sum(self.nbytes.get(name, 0) for name in ("Rss", *_HUGE[3:]))
        untouched = max(0, self.end - self.start - resident)
        return huge + (untouched if self.is_eligible else 0)


@dataclass(frozen=True, slots=True)
class PageBacking:
    """``huge_nbytes`` of ``nbytes`` bytes lie on huge pages; some may be shared memory."""

    nbytes: int
    huge_nbytes: int
    is_shared: bool = False

    @property
    def is_mostly_small(self) -> bool:
        """Whether less than half of it lies on huge pages."""
        return 2 * self.huge_nbytes < self.nbytes


def mappings(smaps: Iterable[str]) -> Iterator[PageMapping]:
    """The mappings that the lines of a ``smaps`` file describe."""
    found: PageMapping | None = None
    for line in smaps:
        head = _HEAD.match(line)
        if head is not None:
            if found is not None:
                yield found
            found = PageMapping(int(head[1], 16), int(head[2], 16))
        elif found is not None:
            name, _, value = line.partition(":")
            if name == "THPeligible":
                found.is_eligible = value.strip() == "1"
            elif name == "VmFlags":
                found.is_shared = "sh" in value.split()
            elif value.endswith(" kB\n"):
                found.nbytes[name] = int(value.split()[0]) * _KIB
    if found is not None:
        yield found


def backing(memories: Sequence[Memory], smaps: Iterable[str]) -> PageBacking:
    """The pages under ``memories``, without device memory.

    A mapping that reaches beyond a memory counts by their common part.
    """
    host = [memory for memory in memories if memory.device.kind == "cpu"]
    huge, is_shared = 0.0, False
    for mapping in mappings(smaps):
        common = sum(
            max(0, min(memory.end, mapping.end) - max(memory.base, mapping.start))
            for memory in host
        )
        if common:
            huge += mapping.huge_nbytes * common / (mapping.end - mapping.start)
            is_shared |= mapping.is_shared
    return PageBacking(sum(memory.nbytes for memory in host), int(huge), is_shared)


def kernel_settings(settings: Path = _SETTINGS) -> str:
    """The kernel's settings of huge pages, as ``name=value``."""
    return ", ".join(f"{name}={_chosen(settings / name)}" for name in ("enabled", "shmem_enabled"))


def warning_of(found: PageBacking, settings: str, reasons: Iterable[str] = ()) -> str | None:
    """The warning for an operator, or None where pages are huge or memory is small."""
    if found.nbytes < WARNED_NBYTES or not found.is_mostly_small:
        return None
    setting = (
        "shmem_enabled to advise (its memory is shared)"
        if found.is_shared
        else "enabled to madvise"
    )
    why = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
    return (
        f"{found.huge_nbytes:,} of {found.nbytes:,} bytes of registered host memory lie on huge "
        f"pages. Reads between processes of one host were measured at {SPEEDS}. Set {_SETTINGS}/"
        f"{setting}, or give the engine memory from hugetlbfs; huge_pages: false silences this. "
        f"Now {settings}{f'; the kernel answered {why}' if why else ''}"
    )


def small_page_warning(memories: Sequence[Memory], reasons: Iterable[str] = ()) -> str | None:
    """The warning for memory of this process, or None; None where /proc has no smaps."""
    if sum(memory.nbytes for memory in memories if memory.device.kind == "cpu") < WARNED_NBYTES:
        return None
    try:
        with _SMAPS.open(encoding="utf-8", errors="replace") as smaps:
            found = backing(memories, smaps)
    except OSError:
        return None
    return warning_of(found, kernel_settings(), reasons)


class HugePages:
    """Huge pages under a transport's host memory, requested for at most ``max_seconds`` in total.

    Switched off, it requests none and warns of nothing.
    """

    def __init__(self, is_on: bool, max_seconds: float) -> None:
        self._left_s = max_seconds if is_on else 0.0
        self._may_warn = is_on
        self._reports: list[CollapseReport] = []

    def back_memory(self, memory: Memory) -> None:
        """Request huge pages under ``memory``, before it is registered."""
        if memory.device.kind == "cpu" and self._left_s > 0:
            report = collapse(memory, max_seconds=self._left_s)
            self._left_s -= report.seconds
            self._reports.append(report)

    def warn_of_small_pages(self, memories: Sequence[Memory], agent: str) -> None:
        """Warn once if ``memories`` have small pages, which do not change later."""
        if self._may_warn:
            reasons = (report.reason for report in self._reports)
            text = small_page_warning(memories, reasons)
            self._may_warn = text is None
            if text is not None:
                _log.warning("pdconn: %s agent=%s", text, agent)

    def describe_backing(self, memories: Iterable[Memory]) -> str:
        """How much of the host memory among ``memories`` has been moved into huge pages."""
        done = sum(report.collapsed_bytes for report in self._reports)
        of = sum(memory.nbytes for memory in memories if memory.device.kind == "cpu")
        return f"{done} of {of} bytes of host memory"


def _chosen(path: Path) -> str:
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text(encoding="utf-8"))
    except OSError:
        return "unknown"
    return "unknown" if chosen is None else chosen[1]


def _named(advice: str, refused: int) -> str:
    return f"{advice}: {errno.errorcode.get(refused, str(refused))}"


def _libc_madvise() -> Madvise:
    libc = ctypes.CDLL(None, use_errno=True)
    function = libc.madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int

    def madvise(address: int, nbytes: int, advice: int) -> int:
        return ctypes.get_errno() if function(address, nbytes, advice) else 0

    return madvise
