"""Records of a part of a row in a bucket: what each write has put where, kept on this machine.

::

    ROOT/parts/<writer>/<part>                 empty, as long as the row: its room in the accounts
                       <part>.wrote<object>    ranges, and bytes if they are few; made before the
                                               object is, so that no object is forgotten
                       <part>.wrote0000…       the row that it is being committed as

When the part becomes a row, its file lists the objects of the row, and becomes the row's *entry*.
"""

from __future__ import annotations

import os

import msgspec

from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.folders import failure, open_regular, read_whole
from pdconn.store.shelf.obj.row_index import RowIndex, data_key
from pdconn.store.store_errors import ShelfFailure

ENTRY_NBYTES = 4096
"""Room for the names of a row's objects in its file; no row is smaller: footers are pages."""

INTENT = "0" * 16
"""Stands for the name of an object in the name of the file that records a commit."""


class WriteRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A write: ranges of the row as (offset, bytes), one after another in the object or here."""

    ranges: tuple[tuple[int, int], ...]
    data: bytes | None = None


_WRITES = msgspec.msgpack.Decoder(WriteRecord)


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A commit that was begun: the row that the part is to become."""

    namespace: str
    kind: RowKind
    file_name: str


_COMMITS = msgspec.msgpack.Decoder(CommitRecord)


def put_record(path: str, name: str, record: WriteRecord | CommitRecord) -> None:
    """Make the file of a record beside the part at ``path``.

    A torn one belongs to a part that will be discarded.

    Raises:
        ShelfFailure: no such part, or the file cannot be written.
    """
    beside = f"{path}.wrote{name}"
    try:
        opened = open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if opened is None:
            raise ShelfFailure(f"{path}: no such part")
        try:
            view = memoryview(msgspec.msgpack.encode(record))
            while view:
                view = view[os.write(opened[0], view) :]
        finally:
            os.close(opened[0])
    except OSError as error:
        raise failure("record a write of", path, error) from error


def read_write(path: str) -> WriteRecord:
    """The record of a write in the file ``path``.

    Raises:
        ShelfFailure: it cannot be read, or is torn.
    """
    try:
        return _WRITES.decode(read_whole(path) or b"")
    except msgspec.MsgspecError as error:
        raise ShelfFailure(f"{path}: not the record of a write: {error}") from error
    except OSError as error:
        raise failure("read", path, error) from error


def read_commit(path: str) -> tuple[str, RowName] | None:
    """Namespace and row that the part at ``path`` was being committed as, if that was begun.

    Raises:
        ShelfFailure: the record cannot be read.
    """
    try:
        data = read_whole(f"{path}.wrote{INTENT}")
        found = None if data is None else _COMMITS.decode(data)
    except msgspec.MsgspecError:
        return None  # torn: the row was not made yet
    except OSError as error:
        raise failure("read", path, error) from error
    name = None if found is None else RowName.from_file_name(found.kind, found.file_name)
    return None if found is None or name is None else (found.namespace, name)


class RowEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a row's file: the part that the row was, and its objects."""

    writer: str
    part: str
    objects: tuple[str, ...]

    def is_of(self, index: RowIndex) -> bool:
        """Whether an index is that of the same part."""
        return (self.writer, self.part, self.objects) == (index.writer, index.part, index.objects)

    def data_keys(self) -> list[str]:
        """Keys of the objects, below the bucket's prefix."""
        return [data_key(self.writer, self.part, name) for name in self.objects]


_ENTRIES = msgspec.json.Decoder(RowEntry)


def put_entry(path: str, entry: RowEntry) -> None:
    """Write the objects of a part into its file, whose length stays.

    Raises:
        OSError: the file system refuses.
        ShelfFailure: no such part, or no room for the names.
    """
    data = msgspec.json.encode(entry) + b"\n"
    opened = open_regular(path, os.O_WRONLY)
    if opened is None:
        raise ShelfFailure(f"{path}: no such part")
    try:
        if len(data) > min(ENTRY_NBYTES, opened[1]) or os.pwrite(opened[0], data, 0) < len(data):
            raise ShelfFailure(f"{path}: no room for the names of {len(entry.objects)} objects")
    finally:
        os.close(opened[0])


def read_entry(path: str) -> RowEntry | None:
    """The entry in a row's or part's file; None where the file is missing or has none.

    Raises:
        OSError: it cannot be read.
    """
    opened = open_regular(path, os.O_RDONLY)
    if opened is None:
        return None
    try:
        line = os.pread(opened[0], ENTRY_NBYTES, 0).partition(b"\n")[0]
    finally:
        os.close(opened[0])
    try:
        return _ENTRIES.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
