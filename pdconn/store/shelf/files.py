"""Rows as files, with plain POSIX calls: the default shelf.

::

    commit   link, unlink                  a link exists already or not: the first one wins
    read     open, fstat, preadv, close    of one inode: a row that is removed stays readable

A row's size is its file's, and when it was used last is the file's time of modification.  Bytes
are not forced to the device: a row that a power failure cut is told by its checksums.

The file system must have hard links (ext4, XFS, tmpfs, NFS and Lustre have them).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Literal, Self

from pdconn.store.errors import RowMissing, ShelfFailure
from pdconn.store.format.names import RowKind, RowName
from pdconn.store.shelf.base import Buffer, StoredRow
from pdconn.store.shelf.file_parts import ATTEMPTS, FileParts
from pdconn.store.shelf.folders import (
    ABSENT,
    failure,
    is_namespace,
    listed,
    open_regular,
    regular,
    subfolders,
)
from pdconn.store.shelf.transfer import recent_rows

log = logging.getLogger(__name__)


class FilesShelf(FileParts):
    """Rows below ``root``; see :class:`pdconn.store.shelf.base.Shelf`.

    Args:
        direct_io: O_DIRECT for ranges in whole pages: always, never, or for ``auto`` where it is
            faster (see :mod:`pdconn.store.shelf.transfer`).

    Raises:
        ShelfFailure: the root cannot be made or read.
        FormatError: it is of another version.
    """

    def __init__(
        self, root: str | os.PathLike[str], direct_io: bool | Literal["auto"] = "auto"
    ) -> None:
        super().__init__(root, direct_io)
        self._recent = recent_rows(self._folders.root)

    def has(self, namespace: str, name: RowName) -> bool:
        """Whether the row is there now.

        Raises:
            ShelfFailure: it cannot be told.
        """
        path = self._row(namespace, name)
        try:
            return path is not None and regular(path) is not None
        except OSError as error:
            raise failure("look for", str(path), error) from error

    def read(self, namespace: str, name: RowName, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Fill each buffer from its offset in the row.

        Raises:
            RowMissing, RowDamaged, ShelfFailure: see :class:`pdconn.store.shelf.base.Shelf`.
        """
        path = self._row(namespace, name)
        try:
            opened = None if path is None else open_regular(path, os.O_RDONLY)
            if path is None or opened is None:
                raise RowMissing(f"{namespace}/{name.kind}/{name.file_name}: no such row")
            fd, _ = opened
            try:
                self._transfer.read(fd, path, ranges, is_hot=path in self._recent)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno == errno.ESTALE:  # removed by another machine
                raise RowMissing(f"{path}: removed while it was read") from error
            raise failure("read", str(path), error) from error
        self._recent.add(path)

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
                name = RowName.parse(kind, entry.name)
                if name is None or not entry.name.startswith(prefix) or len(prefix) != 2:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield StoredRow(namespace, name, found.st_size, found.st_mtime)

    def touch(self, namespace: str, names: Sequence[RowName]) -> None:
        """Note that the rows were used now; those that are gone are left out.

        Raises:
            ShelfFailure: it cannot be noted; the names after it are left out.
        """
        for name in names:
            path = self._row(namespace, name)
            if path is None:
                continue
            try:
                os.utime(path, follow_symlinks=False)
            except OSError as error:
                if error.errno in ABSENT:
                    continue
                raise failure("touch", path, error) from error
            self._recent.add(path)

    def used_at(self, namespace: str, name: RowName) -> float | None:
        """When the row was last used; None if there is no such row.

        Raises:
            ShelfFailure: it cannot be told.
        """
        path = self._row(namespace, name)
        try:
            found = None if path is None else regular(path)
        except OSError as error:
            raise failure("look at", str(path), error) from error
        return None if found is None else found.st_mtime

    def remove(self, namespace: str, name: RowName) -> int:
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

    def commit(self, writer: str, part: str, namespace: str, name: RowName) -> bool:
        """Give the part its name; False if there is such a row already.  The part is gone after.

        A row that was committed stays committed where the part cannot be cleared away: the part
        is listed until it is discarded.

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
        self._recent.add(final)
        return is_new

    def _link(self, path: str, folder: str, final: str, made: os.stat_result) -> bool:
        if not self._folders.is_folder(folder):
            self._folders.make(folder)
        for _ in range(ATTEMPTS):
            try:
                os.link(path, final)
            except FileNotFoundError:
                self._folders.make(folder)
            except FileExistsError:
                # NFS may answer so to the repeat of a call that was done.
                with contextlib.suppress(FileNotFoundError):
                    there = os.lstat(final)
                    if not stat.S_ISREG(there.st_mode):
                        raise ShelfFailure(f"{final}: not a file of ours is there") from None
                    return os.path.samestat(there, made)
            else:
                return True
        raise ShelfFailure(f"cannot commit {path} as {final}: gone again and again")

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
