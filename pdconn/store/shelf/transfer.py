"""Bytes between open files and host memory, through the page cache or past it.

Reading a row with O_DIRECT is two to four times faster than through a cold page cache, and
slower than from a warm one.  So ``auto`` decides read by read::

    small, or not in whole pages                              ─► page cache
    used by this process a short while ago: will be again     ─► page cache, which then has it
    its last pages are cached (written or read by anybody)    ─► page cache
    else                                                      ─► O_DIRECT

and writes through the page cache, since what was just saved is what is likely read next.  Where
the file system refuses O_DIRECT it is not tried again.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

from pdconn.store.errors import RowDamaged
from pdconn.store.shelf.aligned import FileRun, file_runs, is_worth_direct
from pdconn.store.shelf.base import Buffer

log = logging.getLogger(__name__)

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

    def read(
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

    def write(self, fd: int, ranges: Sequence[tuple[int, Buffer]]) -> None:
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

    def add(self, path: str) -> None:
        """The file was used now."""
        with self._lock:
            self._paths[path] = None
            self._paths.move_to_end(path)
            if len(self._paths) > self._most:
                self._paths.popitem(last=False)


@functools.cache
def recent_rows(root: str) -> RecentRows:
    """Those of a root, for all shelves of the process."""
    return RecentRows()
