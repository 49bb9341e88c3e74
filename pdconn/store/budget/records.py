"""What is written below ``ROOT/budget``: the count of rows, the writers' reserves, new rows.

Each record carries a checksum of its own.  Records are changed in place, so that a full disk
does not keep a count from going down; one that a crash has torn cannot be read, which a recount
mends.  Functions here neither lock nor wait.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pdconn.store.budget.locks import open_ours
from pdconn.store.format.footer import checksum
from pdconn.store.format.names import RowKind, RowName
from pdconn.store.shelf.base import StoredRow
from pdconn.store.shelf.folders import read_whole

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
        """With one more row, or one less where ``nbytes`` is negative; never below 0."""
        wa = nbytes if kind is RowKind.WA else 0
        return RowCount(max(0, self.committed + nbytes), max(0, self.wa + wa))


@dataclass(slots=True)
class WriterAccount:
    """Bytes that a writer has reserved, would like besides, and its capacity."""

    reserved: int
    wanted: int
    capacity: int


def sum_usage(count: RowCount | None, accounts: Iterable[WriterAccount]) -> Usage:
    """Of these writers, at least one."""
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
    """Keep the count of rows."""
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
    """Keep our account."""
    data = _record(_ACCOUNT, account.reserved, account.wanted, account.capacity)
    os.pwrite(fd, data, 0)


def recorded_usage(root: str | os.PathLike[str]) -> Usage | None:
    """What the accounts of a root say, without taking part in them; None if there are none.

    Nothing is locked or written.  Writers that are dead and not yet forgotten count.
    """
    folder = Path(root, "budget")
    found = [read_account(path) for path in folder.glob("writers/*")]
    accounts = [account for account in found if account is not None]
    count = read_count(folder)
    return None if count is None or not accounts else sum_usage(count, accounts)


# New rows, one a line, for the evictor


def news_line(row: StoredRow) -> bytes:
    """A row that is there now; begins a line of its own, whatever was written before."""
    name = row.name
    line = f"\n{row.namespace} {name.kind} {name.file_name} {row.nbytes} {row.used_at!r}\n"
    return line.encode()


def parse_news(data: bytes) -> list[StoredRow]:
    """The rows of these lines; what is no whole line is left out."""
    found = []
    for line in data.decode(errors="replace").splitlines():
        try:
            namespace, kind, file_name, nbytes, used_at = line.split(" ")
            name = RowName.parse(RowKind(kind), file_name)
            if name is not None:
                found.append(StoredRow(namespace, name, int(nbytes), float(used_at)))
        except ValueError:
            continue
    return found


def _record(form: struct.Struct, *numbers: int) -> bytes:
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
