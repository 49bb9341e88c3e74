"""Standard output whose reader may close early, as ``head`` does.

Only the pipe of standard output counts.  ``BrokenPipeError`` alone does not identify the pipe: a
socket to an engine, a log on standard error and standard output all raise it.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def terminal_width() -> int | None:
    """Characters per line, if standard output is a terminal; else None.

    A pipe or a file gets whole lines, regardless of ``COLUMNS``.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class OutputClosed(Exception):
    """The reader of standard output closed it before the command had written its result."""


class OutputPipe(io.FileIO):
    """Standard output as a pipe.  After its reader has closed it, bytes are dropped.

    ``needs_reader``: the first write without a reader raises :class:`OutputClosed`.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self.needs_reader = False
        self._is_read = True

    def write(self, data: ReadableBuffer, /) -> int:
        """Write ``data``, or drop it."""
        if self._is_read:
            try:
                return super().write(data)
            except BrokenPipeError:
                self._is_read = False
                if self.needs_reader:
                    raise OutputClosed(
                        "standard output was closed before the result was written"
                    ) from None
        return memoryview(data).nbytes


def watch_stdout() -> OutputPipe | None:
    """Replace standard output, so that a command ends with its own exit code after a broken pipe.

    Returns:
        the pipe; None if there is no standard output, or a caller captures it.
    """
    ours = sys.__stdout__
    if ours is None or sys.stdout is not ours:
        return None
    mode = os.fstat(ours.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return None
    ours.flush()
    pipe = OutputPipe(ours.fileno())
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(pipe),
        encoding=ours.encoding,
        errors=ours.errors,
        line_buffering=ours.line_buffering,
    )
    return pipe
