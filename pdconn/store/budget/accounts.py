"""The accounts of one root: how many bytes are committed, and how many each writer has reserved.

::

    ROOT/budget/lock              held while anything below is changed
               /ledger            bytes of committed rows, of WA rows among them
               /commits           rows that are new since the evictor last looked
               /writers/WRITER    bytes that it has reserved, wants, and its capacity;
                                  a shared lock is held by all its processes while they live

The invariant: committed + reserved of all writers is at most the capacity, and is never below the
bytes that are there.  So every step counts too much before it counts right (a part is reserved
before it is made), and a process that is killed in between leaves a count that is too high.  A
*recount* corrects it: it lists the rows, and forgets writers without a living process, after it has
discarded their parts.

A process that is stopped while it holds the lock keeps the background threads of others from
saving anything: each try fails after half a minute.  No engine's thread waits for the lock.

All of it may be removed while engines run (``rm -rf ROOT/*``, a file system mounted anew); the next
call makes it anew.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pdconn.store.budget.locks import (
    LOCK_WAIT_S,
    HeldWriter,
    PathLock,
    claim_writer,
    failures,
    is_at,
    open_ours,
    try_lock,
)
from pdconn.store.format.footer import checksum
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.folders import is_writer, listed, read_whole, regular
from pdconn.store.shelf.interface import Shelf, StoredPart, StoredRow
from pdconn.store.store_errors import ShelfFailure, StoreError

log = logging.getLogger(__name__)

_MAGIC = b"pdconnL1"
_DIGEST = struct.Struct("<Q")
_COUNT = struct.Struct("<8sQQ")
_ACCOUNT = struct.Struct("<8sQQQ")
_ATTEMPTS = 3
"""Of readers that hold no lock, and may meet a record while it is written."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a root; ``capacity`` is the smallest that a live writer names.

    ``is_known``: the rows were counted; until they are, all of the capacity counts as taken.
    """

    capacity: int
    committed: int
    wa: int
    reserved: int
    wanted: int
    num_writers: int
    is_known: bool = True

    @property
    def free(self) -> int:
        """Bytes that may still be reserved."""
        return max(0, self.capacity - self.committed - self.reserved)


@dataclass(frozen=True, slots=True)
class RowCount:
    """Bytes of committed rows, and of WA rows among them."""

    committed: int
    wa: int

    def plus(self, nbytes: int, kind: RowKind) -> RowCount:
        """The count with one more row, or one less if ``nbytes`` is negative; never below 0."""
        wa = nbytes if kind is RowKind.WA else 0
        return RowCount(max(0, self.committed + nbytes), max(0, self.wa + wa))


@dataclass(slots=True)
class WriterAccount:
    """Bytes that a writer has reserved, bytes that it wants besides, and its capacity."""

    reserved: int
    wanted: int
    capacity: int


def sum_usage(count: RowCount | None, accounts: Iterable[WriterAccount]) -> Usage:
    """The usage of a root with these writers, at least one."""
    found = list(accounts)
    least = min(account.capacity for account in found)
    return Usage(
        least,
        least if count is None else count.committed,
        0 if count is None else count.wa,
        sum(account.reserved for account in found),
        sum(account.wanted for account in found),
        len(found),
        count is not None,
    )


def read_count(folder: Path) -> RowCount | None:
    """The count of rows, or None without a sound record."""
    found = _read(folder / "ledger", _COUNT)
    return None if found is None else RowCount(*found)


def write_count(folder: Path, count: RowCount) -> None:
    """Write the count of rows."""
    # In place, so that a full disk does not keep a count from going down.
    fd = open_ours(folder / "ledger", os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(fd, _record(_COUNT, count.committed, count.wa), 0)
    finally:
        os.close(fd)


def read_account(path: Path) -> WriterAccount | None:
    """A writer's account; None where there is none yet."""
    found = _read(path, _ACCOUNT)
    return None if found is None else WriterAccount(*found)


def write_account(fd: int, account: WriterAccount) -> None:
    """Write our account."""
    data = _record(_ACCOUNT, account.reserved, account.wanted, account.capacity)
    os.pwrite(fd, data, 0)


def recorded_usage(root: str | os.PathLike[str]) -> Usage | None:
    """The usage that the accounts of a root record; None if there are none.

    Nothing is locked or written.  Writers that are dead and not yet forgotten count.
    """
    folder = Path(root, "budget")
    found = [read_account(path) for path in folder.glob("writers/*")]
    accounts = [account for account in found if account is not None]
    count = read_count(folder)
    return None if count is None or not accounts else sum_usage(count, accounts)


# New rows, one a line, for the evictor


def news_line(row: StoredRow) -> bytes:
    """The line of a row that is there now."""
    # It begins with an end of line: the line before it may be torn.
    name = row.name
    line = f"\n{row.namespace} {name.kind} {name.file_name} {row.nbytes} {row.used_at!r}\n"
    return line.encode()


def parse_news(data: bytes) -> list[StoredRow]:
    """The rows of these lines; torn lines are skipped."""
    found = []
    for line in data.decode(errors="replace").splitlines():
        try:
            namespace, kind, file_name, nbytes, used_at = line.split(" ")
            name = RowName.from_file_name(RowKind(kind), file_name)
            if name is not None:
                found.append(StoredRow(namespace, name, int(nbytes), float(used_at)))
        except ValueError:
            continue
    return found


def _record(form: struct.Struct, *numbers: int) -> bytes:
    # A checksum each: a record that a crash has torn is not read, and a recount makes it anew.
    body = form.pack(_MAGIC, *numbers)
    return body + _DIGEST.pack(checksum(body))


def _read(path: Path, form: struct.Struct) -> tuple[int, ...] | None:
    for _ in range(_ATTEMPTS):
        data = read_whole(str(path))
        if data is None:
            return None
        body, digest = data[: form.size], data[form.size :]
        if len(data) == form.size + _DIGEST.size and _DIGEST.pack(checksum(body)) == digest:
            magic, *numbers = form.unpack(body)
            return tuple(numbers) if magic == _MAGIC else None
    return None


@dataclass(frozen=True, slots=True)
class Recounted:
    """The rows that are there, and the writers that were dead and are forgotten."""

    rows: list[StoredRow]
    forgotten: list[str]


class Accounts:
    """The accounts of a root, as one writer uses them.

    One thread; calls may wait for other processes.

    Args:
        capacity: bytes; the smallest that a live writer of the root names counts.
        wait_s: how long a call waits for the lock.
        lost: called, within another call, with the reserved bytes that were lost because our
            account was removed.

    Raises:
        ShelfFailure: the accounts cannot be read or written, or are locked for too long; nothing
            was changed then.
    """

    def __init__(
        self,
        root: str | Path,
        writer: str,
        capacity: int,
        wait_s: float = LOCK_WAIT_S,
        lost: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._folder, self._writer, self._wait_s = Path(root, "budget"), writer, wait_s
        self._lost = lost
        self._own = WriterAccount(0, 0, capacity)
        self._lock = PathLock(self._folder / "lock")
        self._mine: HeldWriter | None = None
        self._is_written = True
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            opened.callback(self._lock.close)
            with self._locked():
                self._mine = HeldWriter(root, writer)
                opened.callback(self._mine.close)
                write_account(self._mine.fd, self._own)
            self._open = opened.pop_all()

    def usage(self) -> Usage:
        """The usage now."""
        with self._locked():
            return self._usage()

    # Writing

    def reserve(self, nbytes: int) -> int:
        """Reserve up to ``nbytes``.  Returns those granted; the evictor is to free the rest."""
        with self._locked():
            granted = min(nbytes, self._usage().free)
            self._write_own(granted, nbytes - granted)
        return granted

    def release_reserved(self, nbytes: int) -> None:
        """Give back reserved bytes."""
        with self._locked():
            kept = min(nbytes, self._own.reserved)
            self._write_own(-kept, self._own.wanted)
        if kept < nbytes:
            self._lost(kept - nbytes)  # the rest was lost with our account before

    def commit_row(self, shelf: Shelf, part: StoredPart, row: StoredRow) -> bool:
        """Give a part, whose bytes we reserved, its name; False if the row was there.

        The bytes of a new row are reserved no more; else they stay reserved.

        Raises:
            ShelfFailure: it is not committed.
        """
        # Under one lock: committed, then counted as committed, then reserved no more.
        with self._locked():
            self._check_covered(row)
            self._append_news(row)
            if not shelf.commit(part.writer, part.part, row.namespace, row.name):
                return False
            try:
                count = read_count(self._folder)
                if count is not None:
                    write_count(self._folder, count.plus(row.nbytes, row.name.kind))
                self._write_own(-row.nbytes, self._own.wanted)
            except OSError as error:  # the row is there, and stays reserved
                log.warning("pdconn: store: a row was not counted: %s", error)
        return True

    # Removing

    def remove_row(self, shelf: Shelf, namespace: str, name: RowName) -> int:
        """Remove a row.  Returns its bytes."""
        with self._locked():
            return self._remove(shelf, namespace, name)

    def evict_row(self, shelf: Shelf, namespace: str, name: RowName) -> int | None:
        """Remove a row.  Returns its bytes; None if there are new rows, which may depend on it."""
        with self._locked():
            return None if self._has_news() else self._remove(shelf, namespace, name)

    def take_news(self) -> list[StoredRow]:
        """Rows that were committed since the last call, for the evictor alone."""
        with self._locked():
            if not self._has_news():
                return []
            found = parse_news(read_whole(str(self._folder / "commits")) or b"")
            self._drop_news()
        return found

    def list_rows(self, shelf: Shelf) -> list[StoredRow]:
        """Recount, and drop earlier news.  Returns the rows that are there."""
        with self._locked():
            rows = self._recount(shelf).rows
            if self._has_news():
                self._drop_news()
        return rows

    # Counting

    def recount(self, shelf: Shelf) -> Recounted:
        """Count the rows that are there, and forget the writers that are dead."""
        with self._locked():
            return self._recount(shelf)

    def is_stale(self) -> bool:
        """Whether a recount is due: a writer is dead, or the count cannot be read."""
        with self._locked():
            if read_count(self._folder) is None:
                return True
            for name in self._others():
                claimed = claim_writer(self._folder / "writers" / name)
                if claimed is not None:
                    os.close(claimed)
                    return True
        return False

    def try_evictor(self) -> int | None:
        """A descriptor that makes its holder the evictor of the root; None while there is one."""
        return try_lock(self._folder / "evictor")

    def is_evictor(self, fd: int) -> bool:
        """Whether the holder of a descriptor of :meth:`try_evictor` still is the evictor."""
        with failures():
            return is_at(fd, self._folder / "evictor")

    def leave_root(self) -> None:
        """Close, and remove our account: for a writer of one process that has reserved nothing."""
        try:
            with self._locked():
                (self._folder / "writers" / self._writer).unlink(missing_ok=True)
        finally:
            self.close()

    def close(self) -> None:
        """Close.  A recount frees what is reserved, once no process of this writer lives."""
        self._open.close()

    # Under the lock

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with failures():
            self._lock.lock(self._wait_s)
            try:
                if self._mine is not None and (self._mine.renew_account() or not self._is_written):
                    self._join_again(self._mine)
                yield
            finally:
                self._lock.unlock()

    def _join_again(self, mine: HeldWriter) -> None:
        """Our account was removed: reserve as much of what it had as is free."""
        # The rest may be others' by now.  Rows that are not covered any more are not committed.
        self._is_written = False
        before = self._own
        none = WriterAccount(0, before.wanted, before.capacity)
        kept = min(before.reserved, self._usage(none).free)
        own = WriterAccount(kept, before.wanted, before.capacity)
        write_account(mine.fd, own)
        self._own, self._is_written = own, True
        log.warning(
            "pdconn: store: our account was removed, and is made anew: folder=%s reserved=%d of %d",
            self._folder,
            kept,
            before.reserved,
        )
        self._lost(before.reserved - kept)

    def _usage(self, own: WriterAccount | None = None) -> Usage:
        """The usage now, with ``own`` in place of our account."""
        others = [read_account(self._folder / "writers" / name) for name in self._others()]
        accounts = [account for account in others if account is not None]
        return sum_usage(read_count(self._folder), [*accounts, own or self._own])

    def _others(self) -> list[str]:
        found = listed(str(self._folder / "writers"))
        ours = [each.name for each in found if each.is_file(follow_symlinks=False)]
        return sorted(name for name in ours if is_writer(name) and name != self._writer)

    def _check_covered(self, row: StoredRow) -> None:
        """Check that a row's bytes are reserved: our account may have been removed."""
        if self._own.reserved < row.nbytes:
            raise ShelfFailure(
                f"budget: {row.name.file_name}: expected {row.nbytes} reserved bytes, got "
                f"{self._own.reserved}: our account was removed while the row was written"
            )

    def _write_own(self, more: int, wanted: int) -> None:
        """Reserve more, or less."""
        # Our copy changes once the file has.
        changed = WriterAccount(max(0, self._own.reserved + more), wanted, self._own.capacity)
        assert self._mine is not None
        write_account(self._mine.fd, changed)
        self._own = changed

    def _remove(self, shelf: Shelf, namespace: str, name: RowName) -> int:
        # Removed first, and then counted as removed.
        nbytes = shelf.remove_row(namespace, name)
        count = read_count(self._folder)
        if count is not None:
            write_count(self._folder, count.plus(-nbytes, name.kind))
        return nbytes

    def _append_news(self, row: StoredRow) -> None:
        fd = open_ours(self._folder / "commits", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            line = news_line(row)
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, "no room for the name of a row")
        finally:
            os.close(fd)

    def _has_news(self) -> bool:
        found = regular(str(self._folder / "commits"))
        return found is not None and found.st_size > 0

    def _drop_news(self) -> None:
        os.close(open_ours(self._folder / "commits", os.O_WRONLY | os.O_TRUNC))

    def _recount(self, shelf: Shelf) -> Recounted:
        claimed: dict[str, int] = {}
        try:
            for name in self._others():
                fd = claim_writer(self._folder / "writers" / name)
                if fd is not None:
                    claimed[name] = fd
            count = RowCount(self._sort_parts(shelf, set(claimed)), 0)
            rows = list(shelf.rows())
            for row in rows:
                count = count.plus(row.nbytes, row.name.kind)
            write_count(self._folder, count)
            for name in claimed:
                (self._folder / "writers" / name).unlink(missing_ok=True)
        finally:
            for fd in claimed.values():
                os.close(fd)
        return Recounted(rows, list(claimed))

    def _sort_parts(self, shelf: Shelf, dead: set[str]) -> int:
        """Discard parts of dead writers.  Returns bytes of parts that no reserve covers."""
        live: Counter[str] = Counter()
        uncovered = 0
        known = {self._writer, *self._others()} - dead
        for part in list(shelf.parts()):
            if part.writer in known:
                live[part.writer] += part.nbytes
                continue
            try:
                shelf.discard(part.writer, part.part)
            except StoreError as error:
                log.warning("pdconn: store: part not removed: part=%s: %s", part.part, error)
                uncovered += part.nbytes
        for writer, nbytes in live.items():
            account = read_account(self._folder / "writers" / writer)
            uncovered += max(0, nbytes - (0 if account is None else account.reserved))
        return uncovered
