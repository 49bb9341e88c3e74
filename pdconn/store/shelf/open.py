"""The shelf that the settings name, and what lies beside its rows."""

from __future__ import annotations

import os
import secrets

from pdconn.store.errors import StoreSettingError
from pdconn.store.format.layout import StoreLayout
from pdconn.store.settings import SHELVES, StoreSettings
from pdconn.store.shelf.base import Shelf
from pdconn.store.shelf.described import check_files, keep_place
from pdconn.store.shelf.files import FilesShelf
from pdconn.store.shelf.folders import (
    LAYOUT_FILE,
    failure,
    make_private,
    unlink_quietly,
    write_whole,
)
from pdconn.store.shelf.obj.bucket import BucketPlace


def open_shelf(settings: StoreSettings) -> Shelf:
    """A shelf for one thread; make one for each.

    Raises:
        StoreSettingError: a shelf of another name.
        StoreError: the root cannot be opened, or is of another version.
    """
    if settings.shelf not in SHELVES:
        raise StoreSettingError("store.shelf", " or ".join(SHELVES), repr(settings.shelf))
    if settings.shelf == "obj":
        from pdconn.store.shelf.obj.shelf import ObjShelf

        place = BucketPlace.of(settings.bucket or "", settings.endpoint, settings.region)
        keep_place(settings.root, place)
        return ObjShelf(settings.root, place)
    check_files(settings.root)
    if settings.shelf == "posix":
        from pdconn.store.shelf.nixl_posix import NixlPosixShelf  # nixl takes a second

        return NixlPosixShelf(settings.root)
    return FilesShelf(settings.root, settings.direct_io)


def keep_layout(settings: StoreSettings, namespace: str, layout: StoreLayout) -> None:
    """Keep the layout of a namespace's rows beside them, unless it is there.

    Raises:
        ShelfFailure: it cannot be written.
    """
    if not settings.root:
        return
    path = os.path.join(settings.root, "rows", namespace, LAYOUT_FILE)
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
