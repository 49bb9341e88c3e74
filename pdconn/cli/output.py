"""Standard output that a reader may close early, as ``head`` does.

Only standard output's own pipe counts.  ``BrokenPipeError`` alone does not say which pipe
broke: a socket to an engine, a log on standard error and standard output all raise it.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputClosed(Exception):
    """The reader of standard output closed it before the command had written its result."""


def watch_stdout(*, needs_reader: bool) -> None:
    """From now on, handle a reader that closes standard output.

    Without ``needs_reader`` the rest of the output is dropped, and the command goes on to its
    own exit code.  With it, writing raises :class:`OutputClosed`.  Standard output that is
    no pipe, or that a caller captures, stays as it is.
    """
    ours = sys.__stdout__
    if ours is None or sys.stdout is not ours:
        return
    mode = os.fstat(ours.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return
    ours.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Pipe(ours.fileno(), needs_reader)),
        encoding=ours.encoding,
        errors=ours.errors,
        line_buffering=ours.line_buffering,
    )


class _Pipe(io.FileIO):
    """The write end of a pipe; once the reader is gone, bytes are dropped."""

    def __init__(self, fd: int, needs_reader: bool) -> None:
        super().__init__(fd, "w", closefd=False)
        self._needs_reader = needs_reader
        self._is_read = True

    def write(self, data: ReadableBuffer, /) -> int:
        """Write, or drop; raise :class:`OutputClosed` once if a reader is needed."""
        if self._is_read:
            try:
                return super().write(data)
            except BrokenPipeError:
                self._is_read = False
                if self._needs_reader:
                    raise OutputClosed(
                        "standard output was closed before the result was written"
                    ) from None
        return memoryview(data).nbytes
