"""The shelf that the settings name.

Modules are imported when they are needed: NIXL takes a second, and is not everywhere.
"""

from __future__ import annotations

import os
from urllib.parse import parse_qs, urlsplit

from pdconn.store.errors import StoreSettingError
from pdconn.store.format.layout import StoreLayout
from pdconn.store.settings import SHELVES, StoreSettings
from pdconn.store.shelf.base import Shelf
from pdconn.store.shelf.folders import LAYOUT_FILE, failure, write_whole


def open_shelf(settings: StoreSettings) -> Shelf:
    """A shelf for one thread; make one for each.

    Raises:
        StoreSettingError: a shelf of another name.
        StoreError: the root cannot be opened, or is of another version.
    """
    if settings.shelf == "files":
        from pdconn.store.shelf.files import FilesShelf

        return FilesShelf(settings.root, settings.direct_io)
    if settings.shelf == "posix":
        from pdconn.store.shelf.nixl_posix import NixlPosixShelf

        return NixlPosixShelf(settings.root, settings.direct_io)
    if settings.shelf == "obj":
        from pdconn.store.shelf.objects import ObjectShelf

        return ObjectShelf(settings.root)
    raise StoreSettingError("store.shelf", " or ".join(SHELVES), repr(settings.shelf))


def accounts_root(settings: StoreSettings) -> str:
    """The directory that holds the byte budget: the root, or the one that an object store names.

    Raises:
        StoreSettingError: a root of objects that names none.
    """
    if settings.shelf != "obj":
        return settings.root
    named = parse_qs(urlsplit(settings.root).query).get("state", [])
    if not named:
        hint = "as in s3://bucket/prefix?state=/var/lib/pdconn"
        raise StoreSettingError("store.root", "a local directory state=DIR", settings.root, hint)
    return named[-1]


def keep_layout(settings: StoreSettings, namespace: str, layout: StoreLayout) -> None:
    """Keep the layout of a namespace's rows beside them, once, where the shelf has folders.

    Raises:
        ShelfFailure: it cannot be written.
    """
    if settings.shelf == "obj" or not settings.root:
        return
    path = os.path.join(settings.root, "rows", namespace, LAYOUT_FILE)
    try:
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            aside = f"{path}.{os.getpid()}"
            write_whole(aside, layout.encoded())
            os.rename(aside, path)
    except OSError as error:
        raise failure("describe", path, error) from error
