"""Checks the folder of a store: writable, enough room, a suitable file system."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.folders import check_private
from pdconn.store.store_errors import FormatError
from pdconn.tools.doctor.findings import Finding, fault, note
from pdconn.tools.doctor.local.host_limits import sized

_BLOCK = 4096
_MOST_FILES = 200_000
"""Files of a root that are summed; the rest of a larger root is ignored."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Facts about a root, tried with one temporary file.

    Attributes:
        exists: whether the root exists; if not, its nearest parent was tried.
        error: the reason why nothing can be written; None if it can.
        free_nbytes: available to users.
        held_nbytes: of rows in the root.
        has_direct_io, has_locks: whether files there support it.
        is_file: whether the path is a file.
        exposed: why an engine would not trust the root; None if only its owner can write there.
    """

    root: str
    exists: bool
    error: str | None = None
    free_nbytes: int = 0
    held_nbytes: int = 0
    has_direct_io: bool = True
    has_locks: bool = True
    is_file: bool = False
    exposed: str | None = None


def read_store(settings: StoreSettings) -> StoreFacts:
    """Try the root, or the folder in which it would be created."""
    root = Path(settings.root)
    folder = root
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    exists = folder == root
    if not folder.is_dir():
        return StoreFacts(settings.root, exists, f"{folder} is not a folder", is_file=True)
    if exists and (exposed := _exposed(settings.root)) is not None:
        return StoreFacts(settings.root, exists, exposed=exposed)
    found = os.statvfs(folder)
    held = _held(root / "rows") if exists else 0
    free = found.f_bavail * found.f_frsize
    if settings.read_only:
        readable = os.access(folder, os.R_OK | os.X_OK) and exists
        error = None if readable else "expected a folder to read (read_only)"
        return StoreFacts(settings.root, exists, error, free, held)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".pdconn-doctor-") as tried:
            locks = _locks(tried.fileno())
            direct = _direct(tried.name)
    except OSError as error:
        why = f"cannot write in {folder}: {error.strerror or error}"
        return StoreFacts(settings.root, exists, why, free, held)
    return StoreFacts(settings.root, exists, None, free, held, direct, locks)


def _exposed(root: str) -> str | None:
    try:
        check_private(root)
    except (FormatError, OSError) as error:
        return str(error)
    return None


def _held(rows: Path) -> int:
    total = count = 0
    for folder, _, names in os.walk(rows):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
            count += 1
            if count >= _MOST_FILES:
                return total
    return total


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _direct(path: str) -> bool:
    """Write and read one block past the page cache."""
    try:
        fd = os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:
        return False
    try:
        with mmap.mmap(-1, _BLOCK) as block:
            return os.write(fd, block) == _BLOCK and os.preadv(fd, [block], 0) == _BLOCK
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        return False
    finally:
        os.close(fd)


def seen_store(facts: StoreFacts, settings: StoreSettings) -> str:
    """One line about the folder."""
    return (
        f"{facts.root}{'' if facts.exists else ' (not made yet)'}: "
        f"{sized(facts.free_nbytes)} free, {sized(facts.held_nbytes)} of rows, "
        f"capacity {sized(settings.capacity)}, O_DIRECT {'yes' if facts.has_direct_io else 'no'}"
    )


def judge_store(facts: StoreFacts, settings: StoreSettings) -> Iterator[Finding]:
    """Findings that would keep rows from being saved or served."""
    if facts.error is not None:
        remedy = (
            f"as the engine's user: sudo install -d -o $(id -u) -g $(id -g) {quote(facts.root)}"
        )
        if settings.read_only:
            remedy = 'set "store.root" to the folder that another engine fills, or mount it here'
        elif facts.is_file:
            remedy = 'move that file away, or set another "store.root"'
        yield fault("store.write", "store.root", facts.error, remedy)
        return
    if facts.exposed is not None:
        remedy = f"as the engine's user: chmod go-w {quote(facts.root)}, or set a folder below it"
        yield fault("store.private", "store.root", facts.exposed, remedy)
        return
    room = facts.free_nbytes + facts.held_nbytes
    if room < settings.capacity and settings.shelf != "obj" and not settings.read_only:
        message = (
            f"expected {sized(settings.capacity)} (capacity) at {facts.root}, got "
            f"{sized(facts.free_nbytes)} free and {sized(facts.held_nbytes)} of rows"
        )
        remedy = f"set store.capacity to {sized(int(room * 0.9))} or less, or free space"
        yield fault("store.space", "store.capacity", message, remedy)
    if not facts.has_locks:
        message = f"{facts.root}: its file system has no flock, by which engines share a budget"
        remedy = "mount it with locks (NFS: local_lock=none), or use another file system"
        yield fault("store.lock", "store.root", message, remedy)
    if not facts.has_direct_io:
        message = f"{facts.root}: its file system has no O_DIRECT"
        if settings.direct_io is True:
            remedy = 'set store.direct_io to "auto", or use another file system'
            yield fault("store.direct-io", "store.direct_io", message, remedy)
        else:
            remedy = "none is needed: rows are read through the page cache"
            yield note("store.direct-io", "store.root", message, remedy)
