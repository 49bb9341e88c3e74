"""File locks: which processes live, and which one may change the accounts.

All are ``flock``: the kernel frees them when the last process that shares a descriptor ends,
however it ends.  Only regular files are opened, and without waiting: a link, a pipe or a folder in
the place of a file is an error that names it.

A root may be emptied, or replaced, while engines run.  A lock counts only if its file is the one
that its path names *now*: a lock of a removed file excludes no process that opens the path later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pdconn.store.shelf.folders import ABSENT, make_private, open_regular, regular
from pdconn.store.store_errors import ShelfFailure

LOCK_WAIT_S = 30.0
"""How long a lock is waited for: its holder may list a large root, or be stopped."""

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.01


def open_ours(path: str | Path, flags: int) -> int:
    """Open a regular file.

    Raises:
        FileNotFoundError: there is none, or something else is in its place.
        OSError: the file system refuses.
    """
    opened = open_regular(str(path), flags)
    if opened is None:
        raise FileNotFoundError(errno.ENOENT, "no file of ours", str(path))
    return opened[0]


def is_at(fd: int, path: str | Path) -> bool:
    """Whether an open file is the one that its path names now, and not removed or replaced.

    Raises:
        OSError: the file system refuses.
    """
    try:
        ours = os.fstat(fd)
    except OSError as error:
        if error.errno in ABSENT:  # ESTALE: another machine removed it
            return False
        raise
    there = regular(str(path))
    return there is not None and os.path.samestat(ours, there)


class PathLock:
    """An exclusive lock of a path.  Its file and folders are made where they are missing.

    One thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def lock(self, wait_s: float) -> None:
        """Lock the file that the path names.

        Raises:
            OSError: it cannot be made, or another process holds the lock all the time.
        """
        while True:
            if self._fd is None or not is_at(self._fd, self._path):
                self.close()
                make_private(self._path.parent)
                self._fd = open_ours(self._path, os.O_RDWR | os.O_CREAT)
            wait_lock(self._fd, fcntl.LOCK_EX, wait_s)
            if is_at(self._fd, self._path):  # it may have been removed while we waited
                return
            self.unlock()

    def unlock(self) -> None:
        """Unlock.  Idempotent."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unlock, and close the file.  Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


class HeldWriter:
    """A shared lock of a writer's account, which shows that a process of the writer lives.

    Attributes:
        fd: a descriptor of the account.

    Raises:
        ShelfFailure: the account cannot be made or locked.
    """

    def __init__(self, root: str | Path, writer: str) -> None:
        self._path = Path(root, "budget", "writers", writer)
        self.fd = self._locked()
        self._is_closed = False

    def renew_account(self) -> bool:
        """Make and lock the account anew if it is gone.  Returns whether it was.

        Raises:
            ShelfFailure: it cannot be made; the old one is still held then.
        """
        with failures():
            if is_at(self.fd, self._path):
                return False
        before, self.fd = self.fd, self._locked()
        os.close(before)
        return True

    def close(self) -> None:
        """Unlock, and close the file.  Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self.fd)

    def _locked(self) -> int:
        with failures():
            while True:
                make_private(self._path.parent)
                fd = open_ours(self._path, os.O_RDWR | os.O_CREAT)
                try:
                    wait_lock(fd, fcntl.LOCK_SH)
                    if is_at(fd, self._path):
                        return fd
                except BaseException:
                    os.close(fd)
                    raise
                os.close(fd)  # a recount took it for dead, and removed it before we had the lock


def claim_writer(path: Path) -> int | None:
    """Lock a dead writer's account, so that none of its processes returns; None if one lives."""
    try:
        fd = open_ours(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    found = _locked_or_closed(fd)
    if found is not None and not is_at(found, path):  # the writer has renewed its account
        os.close(found)
        return None
    return found


def try_lock(path: Path) -> int | None:
    """A descriptor that holds ``path`` alone, or None while another process does.

    :func:`is_at` says whether it still does.

    Raises:
        ShelfFailure: it cannot be locked.
    """
    with failures():
        return _locked_or_closed(open_ours(path, os.O_RDWR | os.O_CREAT))


def wait_lock(fd: int, kind: int, wait_s: float = LOCK_WAIT_S) -> None:
    """Lock ``fd``, waiting for up to ``wait_s``.

    Raises:
        OSError: another process holds the lock for the whole time.
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
    """Raises errors of the system as :class:`ShelfFailure`."""
    try:
        yield
    except OSError as error:
        raise ShelfFailure(f"budget: {error}") from error
