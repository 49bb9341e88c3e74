"""The accounts of one root: how many bytes are committed, and how many each writer has reserved.

::

    ROOT/budget/lock              held while anything below is changed
               /ledger            bytes of committed rows, of WA rows among them
               /writers/WRITER    bytes that it has reserved, wants, and its capacity;
                                  a shared lock is held by all its processes while they live

The law: committed + reserved of all writers is at most the capacity, and is never below the
bytes that are there.  So every step counts too much before it counts right:

* a part is covered by its writer's reserve before it is made;
* a row that was committed stays reserved until it is counted as committed;
* a row is removed, and then counted as removed, under one lock.

A process that is killed between two steps leaves a count that is too high.  A *recount* puts it
right: it lists the rows, and forgets writers of which no process lives, after their parts were
discarded.  A process that is stopped while it holds the lock stops all others' background
threads, which then save nothing; no engine waits for the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdconn.store.errors import ShelfFailure
from pdconn.store.format.footer import checksum
from pdconn.store.format.names import RowKind, RowName
from pdconn.store.shelf.base import Shelf

_LEDGER = struct.Struct("<8sQQQ")
_WRITER = struct.Struct("<8sQQQQ")
_MAGIC = b"pdconnL1"


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a root; ``capacity`` is the smallest that a live writer names."""

    capacity: int
    committed: int
    wa: int
    reserved: int
    wanted: int
    num_writers: int

    @property
    def free(self) -> int:
        """Bytes that may still be reserved."""
        return max(0, self.capacity - self.committed - self.reserved)


@dataclass(slots=True)
class _Account:
    reserved: int
    wanted: int
    capacity: int


class Accounts:
    """One writer's way to the accounts of a root.  One thread; calls may wait for other processes.

    Raises:
        ShelfFailure: the accounts cannot be read or written.
    """

    def __init__(self, root: str | Path, writer: str, capacity: int) -> None:
        self._folder, self._writer = Path(root, "budget"), writer
        self._own = _Account(0, 0, capacity)
        with _failures():
            Path(self._folder, "writers").mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(
                self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            with self._locked():  # so that no recount takes a writer for dead that begins
                self._mine = hold_writer(root, writer)
                self._write_own()

    @property
    def folder(self) -> Path:
        """Where the accounts are."""
        return self._folder

    def usage(self) -> Usage:
        """As of now."""
        with self._locked():
            return self._usage()

    def reserve(self, nbytes: int, wanted: int = 0) -> int:
        """Reserve up to ``nbytes``; those granted.  ``wanted`` more are noted for the evictor."""
        with self._locked():
            granted = min(nbytes, self._usage().free)
            self._own.reserved += granted
            self._own.wanted = max(0, nbytes - granted, wanted)
            self._write_own()
        return granted

    def release(self, nbytes: int) -> None:
        """Reserved bytes are not used."""
        with self._locked():
            self._own.reserved -= nbytes
            self._write_own()

    def committed(self, nbytes: int, kind: RowKind) -> None:
        """A row of ours is there now: its bytes are committed, and reserved no more."""
        with self._locked():
            committed, wa = self._read_ledger()
            self._write_ledger(committed + nbytes, wa + nbytes * (kind is RowKind.WA))
            self._own.reserved -= nbytes
            self._write_own()

    def remove(self, shelf: Shelf, namespace: str, name: RowName) -> int:
        """Remove a row; its bytes."""
        with self._locked():
            nbytes = shelf.remove(namespace, name)
            committed, wa = self._read_ledger()
            wa -= nbytes * (name.kind is RowKind.WA)
            self._write_ledger(max(0, committed - nbytes), max(0, wa))
        return nbytes

    def recount(self, shelf: Shelf) -> list[str]:
        """Count the rows that are there, and forget the writers that are dead; these."""
        with self._locked():
            dead = [name for name in self._writers() if self._is_dead(name)]
            known = set(self._writers()) - set(dead)
            for part in shelf.parts():
                if part.writer not in known:
                    shelf.discard(part.writer, part.part)
            for name in dead:
                with contextlib.suppress(FileNotFoundError):
                    (self._folder / "writers" / name).unlink()
            committed = wa = 0
            for row in shelf.rows():
                committed += row.nbytes
                wa += row.nbytes * (row.name.kind is RowKind.WA)
            self._write_ledger(committed, wa)
        return dead

    def has_dead(self) -> bool:
        """Whether a writer is dead, so that a recount would free bytes."""
        with _failures():
            return any(self._is_dead(name) for name in self._writers())

    def close(self) -> None:
        """Leave.  What is reserved is freed by a recount, once no process of ours lives."""
        if self._mine < 0:
            return
        os.close(self._mine)
        os.close(self._lock)
        self._mine = -1

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with _failures():
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _usage(self) -> Usage:
        committed, wa = self._read_ledger()
        accounts = [self._read_account(name) for name in self._writers()]
        found = [account for account in accounts if account is not None]
        return Usage(
            min([account.capacity for account in found] + [self._own.capacity]),
            committed,
            wa,
            sum(account.reserved for account in found),
            sum(account.wanted for account in found),
            len(found),
        )

    def _read_ledger(self) -> tuple[int, int]:
        """Committed bytes and WA bytes; without a ledger everything counts as taken."""
        return _ledger_in(self._folder) or (1 << 62, 0)

    def _write_ledger(self, committed: int, wa: int) -> None:
        body = _LEDGER.pack(_MAGIC, committed, wa, 0)[:-8]
        _replace(self._folder / "ledger", body + struct.pack("<Q", checksum(body)))

    def _writers(self) -> list[str]:
        return sorted(p.name for p in (self._folder / "writers").iterdir() if p.is_file())

    def _read_account(self, writer: str) -> _Account | None:
        """A writer's account; one that cannot be read counts as none: it was just made."""
        if writer == self._writer:
            return self._own
        return _account_in(self._folder / "writers" / writer)

    def _write_own(self) -> None:
        own = self._own
        body = _WRITER.pack(_MAGIC, own.reserved, own.wanted, own.capacity, 0)[:-8]
        os.pwrite(self._mine, body + struct.pack("<Q", checksum(body)), 0)

    def _is_dead(self, writer: str) -> bool:
        if writer == self._writer:
            return False
        try:
            fd = os.open(self._folder / "writers" / writer, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


def recorded_usage(root: str | os.PathLike[str]) -> Usage | None:
    """What the accounts of a root say, without taking part in them; None if there are none.

    Nothing is locked or written.  Writers that are dead and not yet forgotten count.
    """
    folder = Path(root, "budget")
    found = [_account_in(path) for path in folder.glob("writers/*")]
    accounts = [account for account in found if account is not None]
    ledger = _ledger_in(folder)
    if ledger is None or not accounts:
        return None
    return Usage(
        min(account.capacity for account in accounts),
        *ledger,
        sum(account.reserved for account in accounts),
        sum(account.wanted for account in accounts),
        len(accounts),
    )


def _ledger_in(folder: Path) -> tuple[int, int] | None:
    """Committed bytes and WA bytes, or None without a sound ledger."""
    try:
        data = (folder / "ledger").read_bytes()
        magic, committed, wa, digest = _LEDGER.unpack(data)
    except (OSError, struct.error):
        return None
    return (committed, wa) if magic == _MAGIC and checksum(data[:-8]) == digest else None


def _account_in(path: Path) -> _Account | None:
    try:
        data = path.read_bytes()
        magic, reserved, wanted, capacity, digest = _WRITER.unpack(data)
    except (OSError, struct.error):
        return None
    if magic != _MAGIC or checksum(data[:-8]) != digest:
        return None
    return _Account(reserved, wanted, capacity)


def hold_writer(root: str | Path, writer: str) -> int:
    """A descriptor that shows that a process of ``writer`` lives, until it is closed."""
    folder = Path(root, "budget", "writers")
    with _failures():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / writer, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def try_lock(path: Path) -> int | None:
    """A descriptor that holds ``path`` alone, or None while another process does."""
    with _failures():
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
    return fd


def _replace(path: Path, data: bytes) -> None:
    aside = path.with_name(f"{path.name}.new")
    aside.write_bytes(data)
    aside.rename(path)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ShelfFailure(f"budget: {error}") from error
