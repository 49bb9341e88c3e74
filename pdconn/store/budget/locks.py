"""Locks of files: which processes live, and which one may change something.

All are ``flock``: the kernel frees them when the last process that shares a descriptor ends,
however it ends.  Only regular files are opened, and never waited for: a link, a pipe or a
folder that somebody put in a file's place is an error that names it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pdconn.store.errors import ShelfFailure
from pdconn.store.shelf.folders import make_private, open_regular

LOCK_WAIT_S = 30.0
"""How long a lock is waited for: its holder may list a large root, or be stopped."""

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.01


def open_ours(path: str | Path, flags: int) -> int:
    """A descriptor of a regular file.

    Raises:
        FileNotFoundError: there is none, or something else is in its place.
        OSError: the file system refuses.
    """
    opened = open_regular(str(path), flags)
    if opened is None:
        raise FileNotFoundError(errno.ENOENT, "no file of ours", str(path))
    return opened[0]


def hold_writer(root: str | Path, writer: str) -> int:
    """A descriptor that shows that a process of ``writer`` lives, until it is closed.

    Raises:
        ShelfFailure: it cannot be shown.
    """
    path = Path(root, "budget", "writers", writer)
    with failures():
        make_private(path.parent)
        while True:
            fd = open_ours(path, os.O_RDWR | os.O_CREAT)
            try:
                wait_lock(fd, fcntl.LOCK_SH)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.stat(path)):
                        return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # a recount took it for dead, and removed it before we had the lock


def claim_writer(path: Path) -> int | None:
    """A descriptor that keeps processes of a dead writer from coming back; None if one lives."""
    try:
        fd = open_ours(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    return _locked_or_closed(fd)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds ``path`` alone, or None while another process does.

    Raises:
        ShelfFailure: it cannot be locked.
    """
    with failures():
        return _locked_or_closed(open_ours(path, os.O_RDWR | os.O_CREAT))


def wait_lock(fd: int, kind: int, wait_s: float = LOCK_WAIT_S) -> None:
    """Lock ``fd``.

    Raises:
        OSError: it is held by another process all the time.
    """
    until, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                text = f"another process has held the lock for {wait_s:.0f} s; is it stopped?"
                raise OSError(errno.EAGAIN, text) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            return


def _locked_or_closed(fd: int) -> int | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Errors of the system are those of the shelf."""
    try:
        yield
    except OSError as error:
        raise ShelfFailure(f"budget: {error}") from error
