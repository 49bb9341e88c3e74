"""Parts of rows in a bucket: what each write has put where, recorded on this machine.

::

    ROOT/parts/<writer>/<part>                 empty, as long as the row: its room in the accounts
                       <part>.wrote<object>    ranges, and bytes if they are few; made before the
                                               object is, so that no object is forgotten
                       <part>.wrote0000…       the row that it is being committed as

When the part becomes a row, its file says which objects the row has, and becomes the row's entry.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

import msgspec

from pdconn.store.errors import ShelfFailure
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.base import Buffer
from pdconn.store.shelf.files import FilesShelf
from pdconn.store.shelf.folders import failure, object_of, open_regular, read_whole
from pdconn.store.shelf.obj.data import BucketData
from pdconn.store.shelf.obj.index import MOST_OBJECTS, Extent, Inline, RowIndex, data_key

INLINE_NBYTES = 32 << 10
"""Writes of so many bytes at most go into the index, as footers do."""
ENTRY_NBYTES = 4096
"""Room for the names of a row's objects in its file; no row is smaller: footers are pages."""

_NAMED = "0" * 16


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A write: ranges of the row as (offset, bytes), one after another in the object or here."""

    ranges: tuple[tuple[int, int], ...]
    data: bytes | None = None


_RECORDS = msgspec.msgpack.Decoder(Record)


class _Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    namespace: str
    kind: RowKind
    file_name: str


_NAMES = msgspec.msgpack.Decoder(_Named)


class RowEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a row's file says: the part that it was, and its objects."""

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


class ObjParts(FilesShelf):
    """The half of :class:`pdconn.store.shelf.obj.shelf.ObjShelf` that writers use."""

    _data: BucketData
    _inline_nbytes: int

    def begin(self, writer: str, part: str, nbytes: int) -> None:
        """Make a part, unless it is there; it takes no room on this machine.

        Raises:
            ShelfFailure: it cannot be made, or is smaller than a page.
        """
        if nbytes < ENTRY_NBYTES:
            raise ShelfFailure(f"{part}: expected a row of {ENTRY_NBYTES} bytes, got {nbytes}")
        super().begin(writer, part, nbytes)

    def _reserve(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def write(self, writer: str, part: str, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Write all ranges into one object, any number of processes at a time.

        Raises:
            ShelfFailure: no such part, no room in it, or the object is not made.
        """
        path = self._folders.part(writer, part)
        room = self._room_of(writer, path)
        for offset, buffer in ranges:
            if offset + len(buffer) > room:
                raise ShelfFailure(
                    f"{path}: expected ranges within {room} bytes, got {offset} + {len(buffer)}"
                )
        filled = [(offset, buffer) for offset, buffer in ranges if len(buffer)]
        if not filled:
            return
        places = tuple((offset, len(buffer)) for offset, buffer in filled)
        name = secrets.token_hex(8)
        if sum(nbytes for _, nbytes in places) <= self._inline_nbytes:
            data = b"".join(bytes(buffer) for _, buffer in filled)
            self._keep(path, name, Record(places, data))
            return
        self._keep(path, name, Record(places))
        self._data.put(data_key(writer, part, name), [buffer for _, buffer in filled])

    def _room_of(self, writer: str, path: str) -> int:
        try:
            opened = self._opened_part(writer, path)
            if opened is None:
                raise ShelfFailure(f"{path}: no such part")
            os.close(opened[0])
        except OSError as error:
            raise failure("look at", path, error) from error
        return opened[1]

    def _keep(self, path: str, name: str, record: Record | _Named) -> None:
        """Make a file beside a part; a torn one is of a part that will be discarded."""
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

    def _objects_of(self, writer: str, part: str) -> dict[str, str]:
        """Records of a part: their files by the names of their objects."""
        try:
            files = [(object_of(one.name), one.path) for one in self._files_of(writer, part)]
        except OSError as error:
            raise failure("list", self._folders.part(writer, part), error) from error
        return {name: path for name, path in files if name is not None and name != _NAMED}

    def _index_of(self, writer: str, part: str, nbytes: int) -> RowIndex:
        """The index of what was written of a part, unchecked."""
        objects: list[str] = []
        extents: list[Extent] = []
        inline: list[Inline] = []
        for name, path in sorted(self._objects_of(writer, part).items()):
            record = self._recorded(path)
            at = 0
            for offset, size in record.ranges:
                if record.data is None:
                    extents.append(Extent(offset, size, len(objects), at))
                else:
                    inline.append(Inline(offset, record.data[at : at + size]))
                at += size
            if record.data is None:
                objects.append(name)
        if len(objects) > MOST_OBJECTS:
            raise ShelfFailure(f"{part}: expected {MOST_OBJECTS} writes at most")
        return RowIndex(writer, part, nbytes, tuple(objects), tuple(extents), tuple(inline))

    def _recorded(self, path: str) -> Record:
        try:
            return _RECORDS.decode(read_whole(path) or b"")
        except msgspec.MsgspecError as error:
            raise ShelfFailure(f"{path}: not the record of a write: {error}") from error
        except OSError as error:
            raise failure("read", path, error) from error

    def _intend(self, path: str, namespace: str, name: RowName) -> None:
        """Record what a part is being committed as."""
        self._keep(path, _NAMED, _Named(namespace, name.kind, name.file_name))

    def _intended(self, path: str) -> tuple[str, RowName] | None:
        """What a part was being committed as, if that was begun."""
        try:
            data = read_whole(f"{path}.wrote{_NAMED}")
            found = None if data is None else _NAMES.decode(data)
        except msgspec.MsgspecError:
            return None  # torn: the row was not made yet
        except OSError as error:
            raise failure("read", path, error) from error
        name = None if found is None else RowName.parse(found.kind, found.file_name)
        return None if found is None or name is None else (found.namespace, name)


def put_entry(path: str, entry: RowEntry) -> None:
    """Say in a part's file which objects it has; its length stays.

    Raises:
        OSError: the file system refuses.
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
    """What a row's or part's file says; None where it says nothing, or there is none.

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
