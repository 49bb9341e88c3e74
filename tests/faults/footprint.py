"""The memory, threads and files of a process.  Two measurements show what grew."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Footprint:
    """A process at one moment.  ``objects`` are blocks of Python's allocator."""

    rss_nbytes: int
    objects: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> Self:
        """Of this process, after what is garbage has gone."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        resident = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * _PAGE
        return cls(
            resident,
            sys.getallocatedblocks(),
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
        )

    def growth(self, before: Footprint, rss_nbytes: int, objects: int = 200) -> list[str]:
        """What is more than ``before``, in words.

        Memory may grow by ``rss_nbytes``.  That misses what fits into holes that were there,
        so Python's own blocks are counted too, and may grow by ``objects``.
        """
        grown = []
        if self.objects - before.objects > objects:
            grown.append(f"objects by {self.objects - before.objects}, of {objects} allowed")
        if self.rss_nbytes - before.rss_nbytes > rss_nbytes:
            more = (self.rss_nbytes - before.rss_nbytes) / MIB
            grown.append(f"memory by {more:.1f} MiB, of {rss_nbytes / MIB:.1f} allowed")
        for name in ("threads", "files"):
            was, now = getattr(before, name), getattr(self, name)
            if now > was:
                grown.append(f"{name} from {was} to {now}")
        return grown


def peak_nbytes() -> int:
    """The most memory that this process ever held."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024
