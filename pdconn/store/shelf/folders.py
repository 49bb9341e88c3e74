"""The folders of a root: where rows, parts and notes lie as files, and which files are ours.

::

    ROOT/format                                                    the version of this picture
    ROOT/rows/<namespace>/<fa|wa>/<2 hex of key>/<key>.<parent>.<index>
    ROOT/parts/<writer>/<part>                                     a row that is being written
    ROOT/parts/<writer>/<part>.note<rank>                          renamed from ….note<rank>.new
    ROOT/parts/<writer>/<part>.wrote<object>                       of the shelf obj alone

Only folders and regular files with such names are ours.  Anything else below the root (a
symbolic link, a pipe, a folder in place of a row, files of other names) is not followed, not
read and not deleted.  Each folder is checked once and remembered, so that this costs nothing
per row; no descriptor of a folder is kept, since a root may be emptied under a running engine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable

from pdconn.store.format.row import RowKind, RowName, StoreLayout
from pdconn.store.store_errors import FormatError, ShelfFailure

ROOT_VERSION = 1
"""Of the folders above; the rows have a version of their own."""

ABSENT = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ESTALE}
)
"""Errors that mean that there is no file of ours; ESTALE, that another machine removed it."""

ATTEMPTS = 4
"""A folder may be removed between making and using it, by a process that removes empty ones."""

_FORMAT = b"pdconn store, version %d\n"
_NAMESPACE = re.compile(r"[A-Za-z0-9-]{1,64}")
_WRITER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_NOTE = re.compile(r"(.+)\.(?:note(\d{1,6})(\.new)?|wrote([0-9a-f]{16}))")
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def failure(action: str, path: str, error: OSError) -> ShelfFailure:
    """The shelf's error for one of the file system."""
    code = errno.errorcode.get(error.errno or 0, "unknown")
    return ShelfFailure(f"cannot {action} {path}: {code}: {error.strerror}")


LAYOUT_FILE = "layout.json"
"""Beside the rows of a namespace: :meth:`StoreLayout.encoded`, to verify them with."""


class Folders:
    """Paths below one root.

    Args:
        root: made absolute; may be a symbolic link itself.
        open_it: makes or checks the root; called at once, and whenever a folder is made.

    Raises:
        StoreError: from ``open_it``.
    """

    def __init__(self, root: str | os.PathLike[str], open_it: Callable[[], None]) -> None:
        self._open = open_it
        self._open()
        self.root = os.path.abspath(root)
        self.rows = os.path.join(self.root, "rows")
        self.parts = os.path.join(self.root, "parts")
        self._known = {self.root}
        self._of_kind: dict[tuple[str, RowKind], str] = {}
        self._of_writer: dict[str, str] = {}

    def row_folder(self, namespace: str, name: RowName) -> str:
        """The folder of a row.

        Raises:
            FormatError: a namespace that is not 1 to 64 letters, digits and ``-``.
        """
        above = self._of_kind.get((namespace, name.kind))
        if above is None:
            if _NAMESPACE.fullmatch(namespace) is None:
                raise FormatError("namespace", "1 to 64 letters, digits and -", namespace)
            above = f"{self.rows}/{namespace}/{name.kind}/"
            self._of_kind[namespace, name.kind] = above
        return above + name.key[:1].hex()

    def writer_folder(self, writer: str) -> str:
        """The folder of a writer's parts.

        Raises:
            FormatError: a name that cannot be a folder's.
        """
        folder = self._of_writer.get(writer)
        if folder is None:
            if _WRITER.fullmatch(writer) is None:
                raise FormatError("writer", "1 to 128 letters, digits, -, _ and .", writer)
            folder = self._of_writer[writer] = f"{self.parts}/{writer}"
        return folder

    def part(self, writer: str, part: str) -> str:
        """The file of a part.

        Raises:
            FormatError: a name that cannot be a part's, or could be a note's.
        """
        if _WRITER.fullmatch(part) is None or _NOTE.fullmatch(part):
            raise FormatError("part", "1 to 128 letters, digits, -, _ and ., no note's name", part)
        return f"{self.writer_folder(writer)}/{part}"

    def is_folder(self, path: str) -> bool:
        """Whether a path below the root is a folder, and so are all above it: no links.

        Raises:
            OSError: the file system refuses.
        """
        if path in self._known:
            return True
        if not self.is_folder(os.path.dirname(path)):
            return False
        try:
            is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False
        if is_folder:
            self._known.add(path)
        return is_folder

    def make(self, path: str) -> None:
        """Make a folder and those above it, also where they were removed meanwhile.

        Raises:
            OSError: something else is in its place, or the file system refuses.
            StoreError: the root was replaced by one that is not ours, or cannot be made.
        """
        for attempt in range(ATTEMPTS):
            self._open()  # files beside the folders may be removed, too
            self._known = {self.root}
            try:
                self._make(path)
            except FileNotFoundError:  # one of them was removed in between, since it was empty
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                return

    def _make(self, path: str) -> None:
        if self.is_folder(path):
            return
        if path != self.root:
            self._make(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if not self.is_folder(path):
            os.lstat(path)  # if it is not there, it was removed since
            raise NotADirectoryError(errno.ENOTDIR, "not a folder of ours", path)


def make_private(path: str | os.PathLike[str]) -> None:
    """Make a folder and those above it that are missing, for their owner alone.

    Raises:
        OSError: something else is in its place, or the file system refuses.
    """
    whole = os.path.abspath(path)
    if os.path.isdir(whole):
        return
    make_private(os.path.dirname(whole))
    with contextlib.suppress(FileExistsError):
        os.mkdir(whole, 0o700)
    if not os.path.isdir(whole):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", whole)


def note_of(file_name: str) -> tuple[str, int, bool] | None:
    """Part, rank, and whether it is a whole note, of a file beside a part; None for another file.

    Records of the shelf ``obj`` lie beside a part as well, and are no notes.
    """
    match = _NOTE.fullmatch(file_name)
    if match is None:
        return None
    return match[1], int(match[2] or 0), match[4] is None and match[3] is None


def object_of(file_name: str) -> str | None:
    """The name of an object of a part, whose record a file beside it is."""
    match = _NOTE.fullmatch(file_name)
    return None if match is None else match[4]


def is_writer(name: str) -> bool:
    """Whether ``name`` may be that of a writer or of a part."""
    return _WRITER.fullmatch(name) is not None


def is_namespace(name: str) -> bool:
    """Whether a folder may hold rows of a namespace."""
    return _NAMESPACE.fullmatch(name) is not None


def namespaces_of(root: str | os.PathLike[str]) -> list[str]:
    """Names of a root's namespaces that may have rows, of this machine's engines.

    Raises:
        ShelfFailure: the root cannot be listed.
    """
    top = os.path.join(root, "rows")
    try:
        return sorted(filter(is_namespace, subfolders(top)))
    except OSError as error:
        raise failure("list", top, error) from error


def listed(folder: str) -> list[os.DirEntry[str]]:
    """What a folder holds; nothing if it is gone.

    Raises:
        OSError: it cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise


def subfolders(folder: str) -> list[str]:
    """Names of the folders in a folder, without links."""
    return [entry.name for entry in listed(folder) if entry.is_dir(follow_symlinks=False)]


def open_regular(path: str, flags: int) -> tuple[int, int] | None:
    """Descriptor and bytes of a regular file, opened without waiting; None if there is none.

    Raises:
        OSError: the file system refuses.
    """
    try:
        fd = os.open(path, flags | _OPEN, 0o600)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    try:
        found = os.fstat(fd)
    except BaseException:
        os.close(fd)
        if flags & os.O_CREAT and flags & (os.O_EXCL | os.O_TRUNC):
            # Without either it may be another process's, which was first.
            unlink_quietly(path)
        raise
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        return None
    return fd, found.st_size


def read_whole(path: str) -> bytes | None:
    """The bytes of a small regular file; None if there is none.

    Raises:
        OSError: it cannot be read.
    """
    opened = open_regular(path, os.O_RDONLY)
    if opened is None:
        return None
    fd, nbytes = opened
    try:
        found = b""
        while len(found) < nbytes and (more := os.read(fd, nbytes - len(found))):
            found += more
        return found
    finally:
        os.close(fd)


def write_whole(path: str, data: bytes) -> None:
    """Make or replace a small file; not atomic, and removed again if it fails.

    Raises:
        OSError: the file system refuses.
    """
    opened = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if opened is None:
        raise FileNotFoundError(errno.ENOENT, "no folder, or not a file of ours", path)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(opened[0], view) :]
        finally:
            os.close(opened[0])
    except BaseException:
        unlink_quietly(path)
        raise


def regular(path: str) -> os.stat_result | None:
    """The status of a regular file; None if there is none.

    Raises:
        OSError: the file system refuses.
    """
    try:
        found = os.lstat(path)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    return found if stat.S_ISREG(found.st_mode) else None


FolderId = tuple[int, int, int]
"""Device, inode and time of modification, since ext4 gives a folder the inode of one that was just
removed.  The time changes when something directly in the folder comes or goes."""


def folder_id(path: str) -> FolderId | None:
    """Which folder a path names now; None if there is none.

    Raises:
        ShelfFailure: the file system refuses.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise failure("look at", path, error) from error
    if not stat.S_ISDIR(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def unlink_quietly(path: str) -> None:
    """Remove a file after a failure that the caller reports."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def open_root(root: str | os.PathLike[str]) -> None:
    """Make a root, or check that its version is ours.

    Several processes may call it at once.  A root that exists need not be writable.

    Raises:
        FormatError: another version, a file ``format`` that is not ours, or a folder that others
            may write to.
        ShelfFailure: the root cannot be made or read.
    """
    folder = os.path.abspath(root)
    path = os.path.join(folder, "format")
    expected = _FORMAT % ROOT_VERSION
    try:
        make_private(folder)
        check_private(folder)
        seen = read_whole(path)
        if seen is None:
            aside = f"{path}.{os.getpid()}-{secrets.token_hex(4)}"
            write_whole(aside, expected)
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, path)  # no rename: another version may be made at once
            finally:
                unlink_quietly(aside)
            seen = read_whole(path)
    except OSError as error:
        raise failure("open the root", folder, error) from error
    if seen != expected:
        raise FormatError(path, expected, "no regular file" if seen is None else seen[:80])


# Owners of a root's folders.  A user that can write to them chooses the KV that engines compute
# with: checksums of rows have no key, so they detect accidents and not attacks.  A root must
# therefore have the permissions that the side channel requires of a secret's file.  Folders that
# pdconn makes are for their owner alone; others may list the root itself, like a mount point.

_FOLDERS_BELOW = ("rows", "parts", "budget")


def check_private(root: str) -> None:
    """Check that only their owner can write to a root and to the folders that we make in it.

    The superuser may use every user's folder; other users their own, and the superuser's.

    Raises:
        FormatError: naming the folder, its mode or owner, and what to do.
        OSError: a folder cannot be looked at.
    """
    _check_owner(root, os.stat(root))
    for name in _FOLDERS_BELOW:
        path = os.path.join(root, name)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(found.st_mode):  # anything else is not followed
            _check_owner(path, found)


def _check_owner(path: str, found: os.stat_result) -> None:
    user, mode = os.geteuid(), stat.S_IMODE(found.st_mode)
    if user not in (0, found.st_uid) and found.st_uid != 0:
        expected = f"a folder of user {user} (chown, or a folder of its own below it)"
        raise FormatError(f"store.root: {path}", expected, f"one of user {found.st_uid}")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        expected = (
            "a folder that only its owner can write (chmod go-w, or a folder of its own below)"
        )
        raise FormatError(f"store.root: {path}", expected, f"mode {mode:04o}")


def keep_layout(root: str | os.PathLike[str], namespace: str, layout: StoreLayout) -> None:
    """Write the layout of a namespace's rows beside them, unless it is there.

    Raises:
        ShelfFailure: it cannot be written.
    """
    if not root:
        return
    path = os.path.join(root, "rows", namespace, LAYOUT_FILE)
    try:
        if not os.path.exists(path):
            make_private(os.path.dirname(path))
            aside = f"{path}.{os.getpid()}-{secrets.token_hex(4)}"
            write_whole(aside, layout.encoded())
            try:
                os.rename(aside, path)
            except OSError:
                unlink_quietly(aside)
                raise
    except OSError as error:
        raise failure("describe", path, error) from error
