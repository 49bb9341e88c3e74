"""Rows in a bucket of an S3-compatible object store, shared by machines.

::

    bucket   rows: an index each, and the objects that it names    seen by all roots of the bucket
    ROOT     an entry for each row that engines on it wrote,       counted and evicted by this root
             parts that are being written, notes, accounts

    commit   put the index if there is none, then the entry    the first commit of a name wins
    read     get the index, then ranges of objects
    remove   the index, the objects, then the entry            a reader finds a row or none

So each root accounts for what it wrote, and a bucket holds at most the capacities of its roots.
An entry is a sparse file as long as the row: listing, use and accounts are those of files.  The
objects of a process that was killed are found by the records beside its parts
(:mod:`pdconn.store.shelf.obj.part_records`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Sequence

from pdconn.store.format.row import RowName
from pdconn.store.shelf.files_shelf import FilesShelf, lengthen
from pdconn.store.shelf.folders import failure, object_of, regular
from pdconn.store.shelf.interface import Buffer
from pdconn.store.shelf.obj.bucket import BucketPlace, open_bucket
from pdconn.store.shelf.obj.data import BucketData
from pdconn.store.shelf.obj.part_records import (
    ENTRY_NBYTES,
    INTENT,
    CommitRecord,
    RowEntry,
    WriteRecord,
    put_entry,
    put_record,
    read_commit,
    read_entry,
    read_write,
)
from pdconn.store.shelf.obj.row_index import (
    MOST_NBYTES,
    MOST_OBJECTS,
    Extent,
    Inline,
    PieceFinder,
    RowIndex,
    data_key,
    decode_index,
    encode_index,
)
from pdconn.store.shelf.open import keep_place
from pdconn.store.store_errors import RowDamaged, RowMissing, ShelfFailure

log = logging.getLogger(__name__)

INLINE_NBYTES = 32 << 10
"""Writes of so many bytes at most go into the index, as footers do."""


class ObjShelf(FilesShelf):
    """Rows in ``place``, with entries below ``root``.

    Args:
        inline_nbytes: writes of so many bytes at most are kept in the index.

    Raises:
        StoreError: the root or the bucket cannot be used.
    """

    cuts_writes = False  # each write is an object, and readers ask for each

    def __init__(
        self,
        root: str | os.PathLike[str],
        place: BucketPlace,
        inline_nbytes: int = INLINE_NBYTES,
    ) -> None:
        self._place = place
        self._bucket = open_bucket(place)  # before the root names it
        super().__init__(root, direct_io=False)
        self._data = BucketData(self._bucket)
        self._inline_nbytes = inline_nbytes

    def _open_root(self) -> None:
        """As of files; the bucket that holds its rows is named beside them."""
        keep_place(self._root, self._place)
        super()._open_root()

    def close(self) -> None:
        """Close NIXL's agent."""
        self._data.close()
        super().close()

    # Rows

    def has(self, namespace: str, name: RowName) -> bool:
        """Whether the row has an entry here, or an index in the bucket.

        Raises:
            ShelfFailure: the bucket does not answer.
        """
        return super().has(namespace, name) or self._bucket.exists(self._key(namespace, name))

    def read(self, namespace: str, name: RowName, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Fill each buffer from its offset in the row.

        Raises:
            RowMissing, RowDamaged, ShelfFailure: as the interface says.
        """
        key = self._key(namespace, name)
        index = self._read_index(key)
        if index is None:
            raise RowMissing(f"{key}: no such row")
        finder = PieceFinder(index)
        reads: list[tuple[str, int, memoryview]] = []
        for offset, buffer in ranges:
            at = 0
            for piece in finder.pieces(offset, len(buffer)):
                into = buffer[at : at + piece.nbytes]
                if piece.data is not None:
                    into[:] = piece.data
                else:
                    reads.append((piece.key, piece.at, into))
                at += piece.nbytes
        if not reads:
            return
        try:
            self._data.read_objects(reads)
        except ShelfFailure:
            self._raise_if_gone(key, index, sorted({read[0] for read in reads}))
            raise

    def remove_row(self, namespace: str, name: RowName) -> int:
        """Remove the row; the bytes that it had if this root wrote it, else 0.

        Raises:
            ShelfFailure: it cannot be removed, or only in part: it is counted then.
        """
        key, path = self._key(namespace, name), self._row(namespace, name)
        try:
            found = None if path is None else regular(path)
            entry = None if path is None or found is None else read_entry(path)
            self._remove_row(key, entry, is_ours=found is not None)
            if path is None or found is None:
                return 0
            os.unlink(path)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise failure("remove", str(path), error) from error
        return found.st_size

    def _key(self, namespace: str, name: RowName) -> str:
        self._folders.row_folder(namespace, name)  # refuses what is no namespace
        return f"rows/{namespace}/{name.kind}/{name.file_name}"

    def _read_index(self, key: str) -> RowIndex | None:
        data = self._bucket.read_object(key, MOST_NBYTES)
        if data is None:
            return None
        try:
            return decode_index(data)
        except RowDamaged as error:
            raise RowDamaged(f"{key}: {error}") from None

    def _index_or_none(self, key: str) -> RowIndex | None:
        """The index of a row; None where there is none that can be understood."""
        try:
            return self._read_index(key)
        except RowDamaged:
            return None

    def _remove_row(self, key: str, entry: RowEntry | None, *, is_ours: bool) -> None:
        """Remove a row from the bucket, unless there is another root's in place of ours."""
        try:
            index = self._read_index(key)
        except RowDamaged:
            self._remove_all(key, entry)
            return
        if index is None:
            self._remove_all(None, entry)
        elif is_ours:
            is_same = entry is not None and entry.is_of(index)
            self._remove_all(key if is_same else None, entry)
        else:
            self._remove_all(key, RowEntry(index.writer, index.part, index.objects))

    def _remove_all(self, key: str | None, entry: RowEntry | None) -> None:
        """Remove an index first, then the objects of a row."""
        if key is not None:
            self._bucket.remove_object(key)
        for data in () if entry is None else entry.data_keys():
            self._bucket.remove_object(data)

    def _raise_if_gone(self, key: str, index: RowIndex, objects: Sequence[str]) -> None:
        """Raises RowMissing if objects of a row are gone."""
        if all(self._bucket.exists(one) for one in objects):
            return
        # An index without its objects keeps the row from being saved again.
        with contextlib.suppress(ShelfFailure):
            if self._index_or_none(key) == index:
                self._bucket.remove_object(key)
        raise RowMissing(f"{key}: its objects are gone")

    # Parts

    def begin(self, writer: str, part: str, nbytes: int) -> None:
        """Make a part, or lengthen one that is there; it takes no room on this machine.

        Raises:
            ShelfFailure: it cannot be made, or is smaller than a page.
        """
        if nbytes < ENTRY_NBYTES:
            raise ShelfFailure(f"{part}: expected a row of {ENTRY_NBYTES} bytes, got {nbytes}")
        super().begin(writer, part, nbytes)

    def _reserve(self, fd: int, nbytes: int) -> None:
        lengthen(fd, nbytes)

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
            put_record(path, name, WriteRecord(places, data))
            return
        put_record(path, name, WriteRecord(places))
        self._data.put_object(data_key(writer, part, name), [buffer for _, buffer in filled])

    def _room_of(self, writer: str, path: str) -> int:
        try:
            opened = self._opened_part(writer, path)
            if opened is None:
                raise ShelfFailure(f"{path}: no such part")
            os.close(opened[0])
        except OSError as error:
            raise failure("look at", path, error) from error
        return opened[1]

    def commit(self, writer: str, part: str, namespace: str, name: RowName) -> bool:
        """Give the part its name; False if there is such a row already.  The part is gone after.

        Raises:
            ShelfFailure: no such part, it was not written whole, or the bucket fails; it is still
                there then.
        """
        path = self._folders.part(writer, part)
        folder = self._folders.row_folder(namespace, name)
        try:
            is_ours = self._folders.is_folder(os.path.dirname(path))
            made = regular(path) if is_ours else None
            if made is None:
                raise ShelfFailure(f"{path}: no such part")
            index = self._index_of(writer, part, made.st_size)
            entry = RowEntry(writer, part, index.objects)
            data = encode_index(index)
            put_entry(path, entry)
            put_record(path, INTENT, CommitRecord(namespace, name.kind, name.file_name))
            is_new = self._put_index(self._key(namespace, name), data, index)
            if is_new:
                self._enter(path, folder, f"{folder}/{name.file_name}", made, entry)
            else:
                self._remove_all(None, entry)
        except OSError as error:
            raise failure(f"commit {path} as", name.file_name, error) from error
        try:
            self._clear(writer, part)
        except OSError as error:
            log.warning("pdconn: store: a committed part was not cleared: %s: %s", path, error)
        return is_new

    def _objects_of(self, writer: str, part: str) -> dict[str, str]:
        """Records of a part: their files by the names of their objects."""
        try:
            files = [(object_of(one.name), one.path) for one in self._files_of(writer, part)]
        except OSError as error:
            raise failure("list", self._folders.part(writer, part), error) from error
        return {name: path for name, path in files if name is not None and name != INTENT}

    def _index_of(self, writer: str, part: str, nbytes: int) -> RowIndex:
        """The index of what was written of a part, unchecked."""
        objects: list[str] = []
        extents: list[Extent] = []
        inline: list[Inline] = []
        for name, path in sorted(self._objects_of(writer, part).items()):
            record = read_write(path)
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

    def _put_index(self, key: str, data: bytes, index: RowIndex) -> bool:
        """Whether the index is ours now: a call that was repeated finds its own."""
        return self._bucket.put_new(key, data) or self._index_or_none(key) == index

    def _enter(
        self, path: str, folder: str, final: str, made: os.stat_result, entry: RowEntry
    ) -> None:
        """Enter a row that is in the bucket, in place of an entry whose row is gone."""
        if not self._link(path, folder, final, made):
            stale = read_entry(final)
            if stale is not None and stale != entry:
                self._remove_all(None, stale)
            os.replace(path, final)

    def discard(self, writer: str, part: str) -> None:
        """Remove a part with its objects and notes, also where they are gone.

        Raises:
            ShelfFailure: they cannot be removed; the part is still there then.
        """
        path = self._folders.part(writer, part)
        try:
            self._remove_objects(writer, part, path)
        except OSError as error:
            raise failure("discard", path, error) from error
        super().discard(writer, part)

    def _remove_objects(self, writer: str, part: str, path: str) -> None:
        objects = sorted(self._objects_of(writer, part))
        intended = read_commit(path)
        if intended is not None:
            entry = read_entry(path)
            row = self._row(*intended)
            if entry is not None and row is not None and read_entry(row) == entry:
                return  # committed, and not cleared away
            key = self._key(*intended)
            index = self._index_or_none(key)
            if entry is not None and index is not None and entry.is_of(index):
                self._bucket.remove_object(key)
        self._remove_all(None, RowEntry(writer, part, tuple(objects)))
