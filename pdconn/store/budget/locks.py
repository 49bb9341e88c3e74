"""Locks of files: which processes live, and which one may change something.

All are ``flock``: the kernel frees them when the last process that shares a descriptor ends,
however it ends.
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

LOCK_WAIT_S = 30.0
"""How long a lock is waited for: its holder may list a large root, or be stopped."""

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.01


def hold_writer(root: str | Path, writer: str) -> int:
    """A descriptor that shows that a process of ``writer`` lives, until it is closed.

    Raises:
        ShelfFailure: it cannot be shown.
    """
    path = Path(root, "budget", "writers", writer)
    with failures():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    return _locked_or_closed(fd)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds ``path`` alone, or None while another process does.

    Raises:
        ShelfFailure: it cannot be locked.
    """
    with failures():
        return _locked_or_closed(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


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
