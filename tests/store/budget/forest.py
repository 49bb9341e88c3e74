"""Rows of made-up prefixes."""

from __future__ import annotations

import random
from pathlib import Path

from pdconn.store.format.row import NO_KEY, RowKind, RowName

NAMESPACES = ("ns-1", "ns-2")


def key_of(path: tuple[int, ...]) -> bytes:
    """The key of the prefix that takes these branches."""
    return random.Random(repr(path)).randbytes(16) if path else NO_KEY


def row_of(path: tuple[int, ...], kind: RowKind = RowKind.FA) -> RowName:
    """The row at the end of a prefix of one block or more."""
    return RowName(kind, key_of(path), key_of(path[:-1]), len(path) - 1)


def needs(name: RowName, other: RowName) -> bool:
    """Whether ``other`` depends on ``name``."""
    if name.kind is RowKind.WA:
        return False
    if other.kind is RowKind.WA:
        return other.key == name.key
    return other.index == name.index + 1 and other.parent == name.key


def nbytes_there(root: Path) -> int:
    """Bytes of rows and parts; a part that is being committed has two names."""
    sizes = {}
    for top in ("rows", "parts"):
        for path in (root / top).rglob("*"):
            if path.is_file() and ".note" not in path.name and path.name != "layout.json":
                found = path.stat()
                sizes[found.st_ino] = found.st_size
    return sum(sizes.values())
