"""Opens the shelf that the settings name, and keeps a root to its kind of shelf.

``ROOT/shelf.json`` names the bucket of a root whose rows are in one; it has no credentials.  A root
without it holds its rows as files.
"""

from __future__ import annotations

import os
import secrets

import msgspec

from pdconn.store.settings import SHELVES, StoreSettings
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.folders import failure, read_whole, unlink_quietly, write_whole
from pdconn.store.shelf.interface import Shelf
from pdconn.store.shelf.obj.bucket import BucketPlace
from pdconn.store.store_errors import FormatError, StoreSettingError

SHELF_FILE = "shelf.json"


class _Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shelf: str
    bucket: str
    endpoint: str | None = None
    region: str | None = None


_DECODER = msgspec.json.Decoder(_Described)


def place_of(root: str | os.PathLike[str]) -> BucketPlace | None:
    """The bucket of a root's rows; None for a root of files, or one that does not exist.

    Raises:
        FormatError: the file is not ours.
        ShelfFailure: it cannot be read.
    """
    path = os.path.join(os.path.abspath(root), SHELF_FILE)
    try:
        data = read_whole(path)
    except OSError as error:
        raise failure("read", path, error) from error
    if data is None:
        return None
    try:
        found = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(path, "what an engine wrote", data[:80]) from error
    if found.shelf != "obj":
        raise FormatError(path, "a shelf 'obj'", found.shelf)
    return BucketPlace.from_path(found.bucket, found.endpoint, found.region)


def check_files(root: str | os.PathLike[str]) -> None:
    """Check that a root holds its rows as files.

    Raises:
        FormatError: its rows are in a bucket.
    """
    place = place_of(root)
    if place is not None:
        raise FormatError(
            "store.shelf", f"'obj' (or another root): the rows of {root} are in {place}", "files"
        )


def keep_place(root: str | os.PathLike[str], place: BucketPlace) -> None:
    """Check that a root belongs to this bucket; a new root is marked so.

    Raises:
        FormatError: it has rows as files, or rows of another bucket.
        ShelfFailure: it cannot be read or written.
    """
    folder = os.path.abspath(root)
    path = os.path.join(folder, SHELF_FILE)
    there = place_of(folder)
    if there == place:
        return
    if there is None and os.path.exists(os.path.join(folder, "rows")):
        raise FormatError("store.shelf", f"'files' (or another root): {root} has files", "obj")
    if there is not None and (there.bucket, there.prefix) != (place.bucket, place.prefix):
        raise FormatError("store.bucket", f"{there}, as {root} has it (or another root)", place)
    name = f"{place.bucket}/{place.prefix}".rstrip("/")
    aside = f"{path}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        described = _Described("obj", name, place.endpoint, place.region)
        write_whole(aside, msgspec.json.encode(described) + b"\n")
        try:
            os.replace(aside, path)
        except OSError:
            unlink_quietly(aside)
            raise
    except OSError as error:
        raise failure("describe", path, error) from error


def open_shelf(settings: StoreSettings) -> Shelf:
    """Open a shelf for one thread; each thread opens its own.

    Raises:
        StoreSettingError: a shelf of another name.
        StoreError: the root cannot be opened, or is of another version.
    """
    if settings.shelf not in SHELVES:
        raise StoreSettingError("store.shelf", " or ".join(SHELVES), repr(settings.shelf))
    if settings.shelf == "obj":
        from pdconn.store.shelf.obj.shelf import ObjShelf

        place = BucketPlace.from_path(settings.bucket or "", settings.endpoint, settings.region)
        keep_place(settings.root, place)
        return ObjShelf(settings.root, place)
    check_files(settings.root)
    if settings.shelf == "posix":
        from pdconn.store.shelf.nixl_posix import NixlPosixShelf  # nixl takes a second

        return NixlPosixShelf(settings.root)
    return FilesShelf(settings.root, settings.direct_io)
