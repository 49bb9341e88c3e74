"""Backing host memory with huge pages, best effort, before it is registered.

Copies between two processes on one host (CMA) spend most of their time on
4 KiB pages: huge pages are worth 2.4 times the throughput.  PyTorch does not
ask for them, and by the time a connector sees the KV cache it was touched, so
``MADV_HUGEPAGE`` alone comes too late; ``MADV_COLLAPSE`` (Linux 6.1) moves what
is there into huge pages now.  Nothing here can fail: what the kernel refuses
stays as it was, and the report says so.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from transport.types import Memory

_log = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 8 * HUGE_PAGE_BYTES
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25

Madvise = Callable[[int, int, int], int]
"""``(address, nbytes, advice) -> errno``, 0 for success."""


@dataclass(frozen=True, slots=True)
class CollapseReport:
    """What became of one memory; ``reason`` says why not all of it was collapsed.

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
    """Move the 2 MiB-aligned inside of ``memory`` into huge pages, within a budget.

    Past the budget of bytes or seconds the kernel is still asked to use huge
    pages when it finds the time (``MADV_HUGEPAGE``); memory that was never
    touched gets them when it is, and the report then says ``EINVAL``.  Takes
    0.3 to 3 s per GB of touched 4 KiB pages, more on a busy machine.
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
        if refused:  # go on: an untouched chunk is refused too, and the next one may be touched
            reason = _named("MADV_COLLAPSE", refused)
        else:
            done += nbytes
    report = CollapseReport(end - start, done, clock() - began, reason)
    _log.info("huge pages for %s bytes at %#x: %s", memory.nbytes, memory.base, report)
    return report


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
