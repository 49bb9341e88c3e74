"""Bytes between open files and host memory, through the page cache or past it.

Reading a row with O_DIRECT is two to four times faster than through a cold page cache, and
slower than from a warm one.  So ``auto`` decides read by read::

    small, or not in whole pages                              ─► page cache
    used by this process a short while ago: likely again      ─► page cache, which then has it
    its last pages are cached (by any process)                ─► page cache
    else                                                      ─► O_DIRECT

and writes through the page cache, since a row that was just saved is likely to be read next.  Where
the file system refuses O_DIRECT it is not tried again.

Ranges are joined into as few system calls as possible.  ``cachestat`` (Linux 6.5) says whether the
page cache has them; it costs a microsecond or two and, unlike a read with RWF_NOWAIT, starts no
read-ahead.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import logging
import os
import platform
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pdconn.store.format.row import ALIGNMENT
from pdconn.store.shelf.interface import Buffer
from pdconn.store.store_errors import RowDamaged

log = logging.getLogger(__name__)

DIRECT_NBYTES = 64 << 10
"""For smaller reads the device's latency outweighs the copy."""

_MOST_BUFFERS = 1024  # IOV_MAX
_PROBED = 16 * ALIGNMENT
_CACHESTAT = 451 if platform.machine() in ("x86_64", "aarch64") else None


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


_MOST_RECENT = 4096
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class FileTransfer:
    """Reads and writes of one thread."""

    def __init__(self, direct_io: bool | Literal["auto"]) -> None:
        self._direct_io = direct_io

    @property
    def direct_io(self) -> bool | Literal["auto"]:
        """As given, and False once the file system refused."""
        return self._direct_io

    def read_ranges(
        self, fd: int, path: str, ranges: Sequence[tuple[int, Buffer]], *, is_hot: bool
    ) -> None:
        """Fill each buffer from its offset.

        Args:
            is_hot: it was read a short while ago.

        Raises:
            RowDamaged: the file ends early.
            OSError: the device failed.
        """
        runs = file_runs(ranges)
        if self._direct_io is True or (
            self._direct_io == "auto" and not is_hot and is_worth_direct(fd, runs)
        ):
            runs = self._directly(fd, runs, os.preadv)
        for run in runs:
            left = run
            while left.nbytes:
                done = os.preadv(fd, left.buffers, left.offset)
                if not done:
                    raise RowDamaged(f"{path}: ends at {left.offset}, {left.nbytes} bytes early")
                left = left.after(done)

    def write_ranges(self, fd: int, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Write each buffer at its offset.

        Raises:
            OSError: the device failed.
        """
        runs = file_runs(ranges)
        if self._direct_io is True:
            runs = self._directly(fd, runs, os.pwritev)
        for run in runs:
            left = run
            while left.nbytes:
                done = os.pwritev(fd, left.buffers, left.offset)
                if not done:
                    raise OSError(errno.EIO, "nothing was written")
                left = left.after(done)

    def _directly(
        self,
        fd: int,
        runs: Sequence[FileRun],
        call: Callable[[int, Sequence[Buffer], int], int],
    ) -> list[FileRun]:
        """Transfer what is aligned with O_DIRECT; what is left for the page cache."""
        left = [run for run in runs if not run.is_aligned]
        waiting = [run for run in runs if run.is_aligned]
        if not waiting:
            return left
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
            while waiting:
                run = waiting[0]
                done = call(fd, run.buffers, run.offset)
                if done < run.nbytes:
                    left.append(run.after(done))
                del waiting[0]
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._direct_io = False
            log.info("pdconn: store: no direct I/O on this file system: error=%s", error)
        left += waiting
        if left:
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        return left


class RecentRows:
    """Files of rows that this process used last, up to 4096.  Any thread."""

    def __init__(self, most: int = _MOST_RECENT) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._paths: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def add_path(self, path: str) -> None:
        """Note that the file was used now."""
        with self._lock:
            self._paths[path] = None
            self._paths.move_to_end(path)
            if len(self._paths) > self._most:
                self._paths.popitem(last=False)


@functools.cache
def recent_rows(root: str) -> RecentRows:
    """The recent rows of a root, for all shelves of the process."""
    return RecentRows()
