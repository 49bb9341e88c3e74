"""Rows as files, with plain POSIX calls: the default shelf.

::

    begin       create, fallocate           no space is an error here and not while writing
    write       open, pwritev, close        by any process
    put_note    write aside, rename         so that a note is whole or not there
    commit      link, unlink                a link exists already or not: the first one wins
    read        open, fstat, preadv, close  of one inode: a row that is removed stays readable

Parts and their notes are files of one writer's folder.  A row's size is its file's, and when it
was used last is the file's time of modification, which lies ahead for a row that is kept.  Bytes
are not forced to the device: a row that a power failure cut fails its checksums.

The file system must have hard links (ext4, XFS, tmpfs, NFS and Lustre have them).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self

from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.folders import (
    ABSENT,
    ATTEMPTS,
    Folders,
    failure,
    is_namespace,
    is_writer,
    listed,
    note_of,
    open_regular,
    open_root,
    read_whole,
    regular,
    subfolders,
    unlink_quietly,
    write_whole,
)
from pdconn.store.shelf.interface import (
    SAME_USE_S,
    Buffer,
    StoredPart,
    StoredRow,
    believed_use,
)
from pdconn.store.shelf.transfer import FileTransfer, recent_rows
from pdconn.store.store_errors import RowMissing, ShelfFailure

log = logging.getLogger(__name__)

_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Errors of file systems without ``fallocate``: NFS before 4.2, ramfs, some FUSE."""


class FilesShelf:
    """Rows below ``root``: a :class:`~pdconn.store.shelf.interface.Shelf`.

    Args:
        direct_io: O_DIRECT for ranges in whole pages: always, never, or for ``auto`` where it is
            faster (:mod:`pdconn.store.shelf.transfer`).

    Raises:
        ShelfFailure: the root cannot be made or read.
        FormatError: it is of another version.
    """

    cuts_writes = True

    def __init__(
        self, root: str | os.PathLike[str], direct_io: bool | Literal["auto"] = "auto"
    ) -> None:
        self._root = root
        self._folders = Folders(root, self._open_root)
        self._transfer = FileTransfer(direct_io)
        self._recent = recent_rows(self._folders.root)

    # Rows

    def has(self, namespace: str, name: RowName) -> bool:
        """Whether the row is there now.

        Raises:
            ShelfFailure: the file system refuses.
        """
        path = self._row(namespace, name)
        try:
            return path is not None and regular(path) is not None
        except OSError as error:
            raise failure("look for", str(path), error) from error

    def read(self, namespace: str, name: RowName, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Fill each buffer from its offset in the row.

        Raises:
            RowMissing, RowDamaged, ShelfFailure: as the interface says.
        """
        path = self._row(namespace, name)
        try:
            opened = None if path is None else open_regular(path, os.O_RDONLY)
            if path is None or opened is None:
                raise RowMissing(f"{namespace}/{name.kind}/{name.file_name}: no such row")
            fd, _ = opened
            try:
                self._transfer.read_ranges(fd, path, ranges, is_hot=path in self._recent)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno == errno.ESTALE:  # removed by another machine
                raise RowMissing(f"{path}: removed while it was read") from error
            raise failure("read", str(path), error) from error
        self._recent.add_path(path)

    def rows(self, namespace: str | None = None) -> Iterator[StoredRow]:
        """Every committed row, in any order; those of all namespaces for None.

        Raises:
            ShelfFailure: a folder cannot be listed.
        """
        top = self._folders.rows
        try:
            if not self._folders.is_folder(top):
                return
            for found in [namespace] if namespace is not None else subfolders(top):
                if not is_namespace(found):
                    continue
                for kind in RowKind:
                    yield from self._rows_of(found, kind)
        except OSError as error:
            raise failure("list", top, error) from error

    def _rows_of(self, namespace: str, kind: RowKind) -> Iterator[StoredRow]:
        top = f"{self._folders.rows}/{namespace}/{kind}"
        if not self._folders.is_folder(top):
            return
        for prefix in subfolders(top):
            for entry in listed(f"{top}/{prefix}"):
                name = RowName.from_file_name(kind, entry.name)
                if name is None or not entry.name.startswith(prefix) or len(prefix) != 2:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield StoredRow(namespace, name, found.st_size, found.st_mtime)

    def touch(self, namespace: str, names: Sequence[RowName], at: float | None = None) -> None:
        """Note that the rows are used at ``at``, or now; a later use stays.

        Rows that are gone are skipped.

        Raises:
            ShelfFailure: a use cannot be noted; the rows after it are skipped.
        """
        now = time.time()
        for name in names:
            path, seen = self._row(namespace, name), self.used_at(namespace, name)
            if path is None or seen is None:
                continue
            if believed_use(seen, now) < (now if at is None else at):
                self._set_use(path, at)
            if at is None:
                self._recent.add_path(path)

    def move_use(self, namespace: str, names: Sequence[RowName], old: float, new: float) -> None:
        """Note a use at ``new`` of those rows whose last one is ``old``; all others stay.

        Raises:
            ShelfFailure: a use cannot be noted; the rows after it are skipped.
        """
        for name in names:
            path, seen = self._row(namespace, name), self.used_at(namespace, name)
            if path is not None and seen is not None and abs(seen - old) < SAME_USE_S:
                self._set_use(path, new)

    def _set_use(self, path: str, at: float | None) -> None:
        try:
            os.utime(path, None if at is None else (at, at), follow_symlinks=False)
        except OSError as error:
            if error.errno not in ABSENT:
                raise failure("touch", path, error) from error

    def used_at(self, namespace: str, name: RowName) -> float | None:
        """When the row was last used; None if there is no such row.

        Raises:
            ShelfFailure: the file system refuses.
        """
        path = self._row(namespace, name)
        try:
            found = None if path is None else regular(path)
        except OSError as error:
            raise failure("look at", str(path), error) from error
        return None if found is None else found.st_mtime

    def remove_row(self, namespace: str, name: RowName) -> int:
        """Remove the row; the bytes that it had, 0 if it was gone.

        Raises:
            ShelfFailure: it cannot be removed.
        """
        path = self._row(namespace, name)
        try:
            found = None if path is None else regular(path)
            if path is None or found is None:
                return 0
            os.unlink(path)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise failure("remove", str(path), error) from error
        with contextlib.suppress(OSError):  # as soon as they are empty
            os.rmdir(os.path.dirname(path))
            os.rmdir(os.path.dirname(os.path.dirname(path)))
        return found.st_size

    def _row(self, namespace: str, name: RowName) -> str | None:
        """The row's file; None where its folder is not there, or not ours."""
        folder = self._folders.row_folder(namespace, name)
        try:
            return f"{folder}/{name.file_name}" if self._folders.is_folder(folder) else None
        except OSError as error:
            raise failure("look into", folder, error) from error

    # Parts

    def begin(self, writer: str, part: str, nbytes: int) -> None:
        """Make a part with room for ``nbytes``; one that is there gets so much, and loses none.

        Ranks may call it at the same time: each reserves the room, which costs the later ones
        nothing.

        Raises:
            ShelfFailure: no space; a part that this call made is removed again.
        """
        path = self._folders.part(writer, part)
        folder = self._folders.writer_folder(writer)
        try:
            if not self._folders.is_folder(folder):
                self._folders.make(folder)
            for _ in range(ATTEMPTS):
                made = self._made_or_opened(path)
                if made is not None:
                    fd, is_new = made
                    self._make_room(fd, path, nbytes, is_new=is_new)
                    return
                self._folders.make(folder)
        except OSError as error:
            raise failure("make", path, error) from error
        raise ShelfFailure(f"cannot make {path}: its folder is removed again and again")

    def write(self, writer: str, part: str, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Write each buffer at its offset, any number of processes at a time.

        Raises:
            ShelfFailure: no such part, no room in it, or a device error.
        """
        path = self._folders.part(writer, part)
        try:
            opened = self._opened_part(writer, path)
            if opened is None:
                raise ShelfFailure(f"{path}: no such part")
            fd, nbytes = opened
            try:
                for offset, buffer in ranges:
                    if offset + len(buffer) > nbytes:
                        raise ShelfFailure(
                            f"{path}: expected ranges within {nbytes} bytes, got "
                            f"{offset} + {len(buffer)}"
                        )
                self._transfer.write_ranges(fd, ranges)
            finally:
                os.close(fd)
        except OSError as error:
            raise failure("write", path, error) from error

    def put_note(self, writer: str, part: str, rank: int, note: bytes) -> None:
        """Write the note of ``rank`` beside the part, whole or not at all.

        Raises:
            ShelfFailure: no such part, or the file system refuses.
        """
        path = self._folders.part(writer, part)
        aside = f"{path}.note{rank}.new"
        try:
            if not self._folders.is_folder(os.path.dirname(path)) or regular(path) is None:
                raise ShelfFailure(f"{path}: no such part")
            write_whole(aside, note)
            try:
                os.rename(aside, f"{path}.note{rank}")
            except OSError:
                unlink_quietly(aside)
                raise
        except OSError as error:
            raise failure("note", path, error) from error

    def notes(self, writer: str, part: str) -> Mapping[int, bytes]:
        """The notes that are there, by rank.

        Raises:
            ShelfFailure: they cannot be read.
        """
        path = self._folders.part(writer, part)
        found: dict[int, bytes] = {}
        try:
            for entry in self._files_of(writer, part):
                of = note_of(entry.name)
                if of is None or not of[2]:
                    continue
                note = read_whole(entry.path)
                if note is not None:
                    found[of[1]] = note
        except OSError as error:
            raise failure("read notes of", path, error) from error
        return found

    def commit(self, writer: str, part: str, namespace: str, name: RowName) -> bool:
        """Give the part its name; False if there is such a row already.  The part is gone after.

        If the part cannot be removed after that, the row stays committed, and the part is listed
        until it is discarded.

        Raises:
            ShelfFailure: no such part, or it cannot be named; it is still there then.
        """
        path = self._folders.part(writer, part)
        folder = self._folders.row_folder(namespace, name)
        final = f"{folder}/{name.file_name}"
        try:
            is_ours = self._folders.is_folder(os.path.dirname(path))
            made = regular(path) if is_ours else None
            if made is None:
                raise ShelfFailure(f"{path}: no such part")
            is_new = self._link(path, folder, final, made)
        except OSError as error:
            raise failure(f"commit {path} as", final, error) from error
        try:
            self._clear(writer, part)
        except OSError as error:
            log.warning("pdconn: store: a committed part was not cleared: %s: %s", path, error)
        self._recent.add_path(final)
        return is_new

    def discard(self, writer: str, part: str) -> None:
        """Remove a part and its notes.  Idempotent.

        Raises:
            ShelfFailure: they cannot be removed.
        """
        path = self._folders.part(writer, part)
        try:
            self._clear(writer, part)
            with contextlib.suppress(OSError):
                os.rmdir(self._folders.writer_folder(writer))  # as soon as it is empty
        except OSError as error:
            raise failure("discard", path, error) from error

    def parts(self) -> Iterator[StoredPart]:
        """Every part, of all writers; one of which notes alone are left has 0 bytes.

        Raises:
            ShelfFailure: a folder cannot be listed.
        """
        top = self._folders.parts
        try:
            if not self._folders.is_folder(top):
                return
            for writer in filter(is_writer, subfolders(top)):
                found: dict[str, int] = {}
                for entry in listed(f"{top}/{writer}"):
                    of = note_of(entry.name)
                    part = entry.name if of is None else of[0]
                    if not is_writer(part) or not entry.is_file(follow_symlinks=False):
                        continue
                    if of is not None:
                        found.setdefault(part, 0)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        found[part] = entry.stat(follow_symlinks=False).st_size
                yield from (StoredPart(writer, name, nbytes) for name, nbytes in found.items())
        except OSError as error:
            raise failure("list", top, error) from error

    def close(self) -> None:
        """Nothing is kept open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Files of the root

    def _open_root(self) -> None:
        """Make or check the root, also when a folder of it has been removed."""
        open_root(self._root)

    def _opened_part(self, writer: str, path: str) -> tuple[int, int] | None:
        if not self._folders.is_folder(self._folders.writer_folder(writer)):
            return None
        return open_regular(path, os.O_WRONLY)

    def _files_of(self, writer: str, part: str) -> list[os.DirEntry[str]]:
        """The part and its notes, whole ones and others."""
        folder = self._folders.writer_folder(writer)
        if not self._folders.is_folder(folder):
            return []
        return [
            entry
            for entry in listed(folder)
            if entry.name.startswith(part)
            and (entry.name == part or (note_of(entry.name) or ("",))[0] == part)
            and entry.is_file(follow_symlinks=False)
        ]

    def _clear(self, writer: str, part: str) -> None:
        for entry in self._files_of(writer, part):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)

    def _made_or_opened(self, path: str) -> tuple[int, bool] | None:
        """A descriptor of a part, and whether this call made it; None without its folder."""
        try:
            made = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:  # another rank was first
            opened = open_regular(path, os.O_RDWR)
            return None if opened is None else (opened[0], False)
        return None if made is None else (made[0], True)

    def _make_room(self, fd: int, path: str, nbytes: int, *, is_new: bool) -> None:
        """Reserve a part's bytes and close it; a new one is removed again where that fails.

        One that another rank made stays: that rank may be writing to it.
        """
        try:
            try:
                self._reserve(fd, nbytes)
            finally:
                os.close(fd)
        except BaseException:
            if is_new:
                unlink_quietly(path)
            raise

    def _reserve(self, fd: int, nbytes: int) -> None:
        if not nbytes:
            return
        try:
            fallocate(fd, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
            lengthen(fd, nbytes)

    def _link(self, path: str, folder: str, final: str, made: os.stat_result) -> bool:
        if not self._folders.is_folder(folder):
            self._folders.make(folder)
        for _ in range(ATTEMPTS):
            try:
                os.link(path, final)
            except FileNotFoundError:
                self._folders.make(folder)
            except FileExistsError:
                # NFS reports it also for a repeated call whose first one succeeded.
                with contextlib.suppress(FileNotFoundError):
                    there = os.lstat(final)
                    if not stat.S_ISREG(there.st_mode):
                        raise ShelfFailure(f"{final}: not a file of ours is there") from None
                    return os.path.samestat(there, made)
            else:
                return True
        raise ShelfFailure(f"cannot commit {path} as {final}: gone again and again")


def lengthen(fd: int, nbytes: int) -> None:
    """Make a file at least so long, without room for its bytes.

    Raises:
        OSError: the file system refuses.
    """
    # Unlike fallocate, ftruncate also cuts a file: another rank may ask for more meanwhile.
    fcntl.flock(fd, fcntl.LOCK_EX)  # until it is closed
    if os.fstat(fd).st_size < nbytes:
        os.ftruncate(fd, nbytes)


def fallocate(fd: int, nbytes: int) -> None:
    """Reserve the first ``nbytes`` of a file, which is as long afterwards: ``fallocate(2)`` itself.

    ``os.posix_fallocate`` is not the same where the file system lacks the call (NFS before 4.2,
    ramfs): glibc then writes a zero into each block that reads as zero.  It fails with EBADF on a
    descriptor that cannot read, and undoes what another process writes between its read and write.

    Raises:
        OSError: no space, or the file system cannot reserve (EOPNOTSUPP).
    """
    call, offset = _fallocate(), 0
    if call(fd, 0, offset, nbytes):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@functools.cache
def _fallocate() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    call.restype = ctypes.c_int
    return call
