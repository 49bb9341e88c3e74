"""Which pages lie under host memory, and what to say when they are small.

``transport.hugepages`` asks; here the kernel's own account (``/proc/self/smaps``) says what
came of it.  Pages that were never touched count as what they will be: huge where the
mapping is eligible.  That is not so for memory that processes share: it gets huge pages
from another setting, off by default, or when it is collapsed and its address and its offset
in the file are multiples of 2 MiB alike, which is luck.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transport.types import Memory

SMALL_NBYTES = 64 << 20
"""Below this much memory nothing is said."""

SPEEDS = "4.2 GB/s with pages of 4 KiB and 5.4 GB/s with huge pages"
"""Measured: one READ of 537 MB over CMA, on two cores."""

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_SMAPS = Path("/proc/self/smaps")
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S{4} ")
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")
_KIB = 1024


@dataclass(slots=True)
class Mapping:
    """One mapping of this process: bytes by the kernel's names, and its flags."""

    start: int
    end: int
    nbytes: dict[str, int] = field(default_factory=dict)
    is_eligible: bool = False
    is_shared: bool = False

    @property
    def huge_nbytes(self) -> int:
        """Bytes that lie on huge pages, or will when they are touched."""
        huge = sum(self.nbytes.get(name, 0) for name in _HUGE)
        resident = sum(self.nbytes.get(name, 0) for name in ("Rss", *_HUGE[3:]))
        untouched = max(0, self.end - self.start - resident)
        return huge + (untouched if self.is_eligible else 0)


@dataclass(frozen=True, slots=True)
class Backing:
    """``huge_nbytes`` of ``nbytes`` bytes lie on huge pages; some may be shared memory."""

    nbytes: int
    huge_nbytes: int
    is_shared: bool = False

    @property
    def is_mostly_small(self) -> bool:
        """Whether less than half of it lies on huge pages."""
        return 2 * self.huge_nbytes < self.nbytes


def mappings(smaps: Iterable[str]) -> Iterator[Mapping]:
    """The mappings that the lines of a ``smaps`` file tell of."""
    found: Mapping | None = None
    for line in smaps:
        head = _HEAD.match(line)
        if head is not None:
            if found is not None:
                yield found
            found = Mapping(int(head[1], 16), int(head[2], 16))
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


def backing(memories: Sequence[Memory], smaps: Iterable[str]) -> Backing:
    """What lies under ``memories``; those of a device are left out.

    A mapping that reaches beyond a memory counts by the part that both have.
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
    return Backing(sum(memory.nbytes for memory in host), int(huge), is_shared)


def complaint(found: Backing, settings: str, reasons: Iterable[str] = ()) -> str | None:
    """What to tell an operator, or None where all is well or too small to matter."""
    if found.nbytes < SMALL_NBYTES or not found.is_mostly_small:
        return None
    which = "shmem_enabled to advise (its memory is shared)" if found.is_shared else (
        "enabled to madvise"
    )  # fmt: skip
    why = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
    return (
        f"{found.huge_nbytes:,} of {found.nbytes:,} bytes of registered host memory lie on huge "
        f"pages. Reads between processes of one host were measured at {SPEEDS}. Set {_SETTINGS}/"
        f"{which}, or give the engine memory from hugetlbfs; huge_pages: false silences this. "
        f"Now {settings}{f'; the kernel answered {why}' if why else ''}"
    )


def now(settings: Path = _SETTINGS) -> str:
    """The kernel's settings of huge pages, as ``name=value``."""
    return ", ".join(f"{name}={_chosen(settings / name)}" for name in ("enabled", "shmem_enabled"))


def small_pages(memories: Sequence[Memory], reasons: Iterable[str] = ()) -> str | None:
    """As :func:`complaint`, of memory of this process; None where the kernel does not tell."""
    if sum(memory.nbytes for memory in memories if memory.device.kind == "cpu") < SMALL_NBYTES:
        return None
    try:
        with _SMAPS.open(errors="replace") as smaps:
            found = backing(memories, smaps)
    except OSError:
        return None
    return complaint(found, now(), reasons)


def _chosen(path: Path) -> str:
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return "unknown"
    return "unknown" if chosen is None else chosen[1]
