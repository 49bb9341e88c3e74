"""Standard output that a reader may close early, as ``head`` does.

Only standard output's own pipe counts.  ``BrokenPipeError`` alone does not say which pipe
broke: a socket to an engine, a log on standard error and standard output all raise it.
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
    """Characters of a line of the terminal that standard output is; None if it is none.

    A pipe or a file gets whole lines, whatever ``COLUMNS`` says.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class OutputClosed(Exception):
    """The reader of standard output closed it before the command had written its result."""


class OutputPipe(io.FileIO):
    """Standard output as a pipe.  Once its reader is gone, bytes are dropped.

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
    """Let the command reach its own exit code, though the reader of standard output closes it.

    Returns:
        the pipe; None where standard output is none, or is captured by a caller.
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
