"""Ranges of a file as few system calls, and whether they are better read past the page cache.

Whether the page cache has them is asked with ``cachestat`` (Linux 6.5), which costs a
microsecond or two, and unlike a read that may not wait begins no read-ahead.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdconn.store.format.layout import ALIGNMENT
from pdconn.store.shelf.base import Buffer

DIRECT_NBYTES = 64 << 10
"""Reads below are not worth it: the device's latency outweighs the copy."""

_MOST_BUFFERS = 1024  # IOV_MAX
_PROBED = 16 * ALIGNMENT
_CACHESTAT = 451 if platform.machine() in ("x86_64", "aarch64") else None
_MOST_RECENT = 4096


@dataclass(frozen=True, slots=True)
class FileRun:
    """Neighbouring buffers of one range of a file: ``nbytes`` from ``offset`` on.

    ``is_aligned``: offset, and address and length of every buffer, are multiples of 4096.
    """

    offset: int
    buffers: tuple[Buffer, ...]
    nbytes: int
    is_aligned: bool

    def after(self, nbytes: int) -> FileRun:
        """What is left when the first ``nbytes`` are done."""
        left = []
        at = nbytes
        for buffer in self.buffers:
            if at < len(buffer):
                left.append(buffer[at:])
            at = max(0, at - len(buffer))
        return FileRun(self.offset + nbytes, tuple(left), self.nbytes - nbytes, False)


def file_runs(ranges: Sequence[tuple[int, Buffer]]) -> list[FileRun]:
    """The ranges in their order, neighbours joined as far as one call takes them."""
    runs: list[FileRun] = []
    held: list[Buffer] = []
    start = end = 0
    for offset, buffer in ranges:
        if held and (offset != end or len(held) == _MOST_BUFFERS):
            runs.append(_run(start, end, held))
            held = []
        if not held:
            start = end = offset
        if len(buffer):
            held.append(buffer)
            end += len(buffer)
    if held:
        runs.append(_run(start, end, held))
    return runs


def _run(start: int, end: int, held: list[Buffer]) -> FileRun:
    bits = start
    for buffer in held:
        bits |= len(buffer) | address_of(buffer)
    return FileRun(start, tuple(held), end - start, bits % ALIGNMENT == 0)


def address_of(buffer: Buffer) -> int:
    """Of the first byte of host memory that is not empty."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def is_worth_direct(fd: int, runs: Sequence[FileRun]) -> bool:
    """Whether a row is large enough, in whole pages, and not in the page cache."""
    aligned = [run for run in runs if run.is_aligned]
    if sum(run.nbytes for run in aligned) < DIRECT_NBYTES:
        return False
    largest = max(aligned, key=lambda run: run.nbytes)
    probed = min(_PROBED, largest.nbytes)
    cached = cached_nbytes(fd, largest.offset + largest.nbytes - probed, probed)
    return cached is None or 2 * cached < probed


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (field, ctypes.c_uint64)
        for field in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached_nbytes(fd: int, offset: int, nbytes: int) -> int | None:
    """Bytes of a range that are in the page cache; None where the kernel does not say."""
    if _CACHESTAT is None:
        return None
    found = _CacheStat()
    asked = _Range(offset, nbytes)
    code = _libc().syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(found), 0)
    return None if code else int(found.cached) * ALIGNMENT


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
