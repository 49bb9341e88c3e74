"""The index of a row in a bucket: which objects hold its bytes.  Pure.

A row's index lies at the row's own key, and is what makes it a row; its bytes lie in objects of
the part that it was, one for each write, and what is small in the index itself::

    PREFIX/rows/<namespace>/<fa|wa>/<row file name>      | magic | XXH3-64 of the rest | msgpack |
    PREFIX/data/<writer>/<part>/<object>                 bytes

An index comes from a bucket that others may write: everything in it is checked.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash

from pdconn.store.store_errors import RowDamaged, ShelfFailure

MOST_NBYTES = 16 << 20
"""Of an index."""
MOST_OBJECTS = 128
"""Of a row, so that their names fit into a page; ranks make one each."""
_MOST_ROW_NBYTES = 1 << 40
_MAGIC = b"pdconnO1"
_SUM = struct.Struct("<Q")
_OBJECT = re.compile(r"[0-9a-f]{16}")
_WRITER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")

_Size = Annotated[int, msgspec.Meta(ge=1, le=_MOST_ROW_NBYTES)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=_MOST_ROW_NBYTES)]


class Extent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``nbytes`` of a row from ``offset`` on: those of object number ``of`` from ``at`` on."""

    offset: _Offset
    nbytes: _Size
    of: _Offset
    at: _Offset


class Inline(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes of a row from ``offset`` on that are in the index itself."""

    offset: _Offset
    data: bytes


class RowIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the bytes of a row are, each exactly once; ``writer`` and ``part`` made it."""

    writer: str
    part: str
    nbytes: _Size
    objects: tuple[str, ...]
    extents: tuple[Extent, ...]
    inline: tuple[Inline, ...]

    def data_key(self, number: int) -> str:
        """The key of an object, below the bucket's prefix."""
        return data_key(self.writer, self.part, self.objects[number])


_INDEXES = msgspec.msgpack.Decoder(RowIndex)


@dataclass(frozen=True, slots=True)
class ObjectPiece:
    """Where ``nbytes`` are: in an object from ``at`` on, or here in ``data``."""

    nbytes: int
    key: str = ""
    at: int = 0
    data: memoryview | None = None


def data_key(writer: str, part: str, name: str) -> str:
    """The key of an object of a part, below the bucket's prefix."""
    return f"data/{writer}/{part}/{name}"


def encode_index(index: RowIndex) -> bytes:
    """The bytes of an index.

    Raises:
        ShelfFailure: ranges of the row are missing, twice there, or too many.
    """
    problem = _problem(index)
    if problem is not None:
        raise ShelfFailure(f"{index.writer}/{index.part}: {problem}")
    body = msgspec.msgpack.encode(index)
    if len(body) + len(_MAGIC) + _SUM.size > MOST_NBYTES:
        raise ShelfFailure(f"{index.part}: expected an index of {MOST_NBYTES} bytes, got more")
    return _MAGIC + _SUM.pack(xxhash.xxh3_64_intdigest(body)) + body


def decode_index(data: bytes) -> RowIndex:
    """The index in bytes that were read from a bucket.

    Raises:
        RowDamaged: they are no index.
    """
    if data[: len(_MAGIC)] != _MAGIC:
        raise RowDamaged(f"index: expected {_MAGIC!r} first, got {data[: len(_MAGIC)]!r}")
    body = data[len(_MAGIC) + _SUM.size :]
    if _SUM.pack(xxhash.xxh3_64_intdigest(body)) != data[len(_MAGIC) : -len(body) or None]:
        raise RowDamaged("index: its checksum differs")
    try:
        index = _INDEXES.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RowDamaged(f"index: {error}") from error
    problem = _problem(index)
    if problem is not None:
        raise RowDamaged(f"index: {problem}")
    return index


def _problem(index: RowIndex) -> str | None:
    """What is wrong with an index whose fields have the right types."""
    names = [("writer", index.writer, _WRITER), ("part", index.part, _WRITER)]
    for field, name, form in names + [("object", name, _OBJECT) for name in index.objects]:
        if form.fullmatch(name) is None:
            return f"{field}: expected {form.pattern}, got {name[:200]!r}"
    if len(index.objects) > MOST_OBJECTS:
        return f"objects: expected at most {MOST_OBJECTS}, got {len(index.objects)}"
    for extent in index.extents:
        if extent.of >= len(index.objects):
            return f"extent: expected an object below {len(index.objects)}, got {extent.of}"
    end = 0
    for offset, nbytes in sorted(_places(index)):
        if offset != end or not nbytes:
            return f"ranges: expected one from {end} on, got {nbytes} bytes at {offset}"
        end += nbytes
    return None if end == index.nbytes else f"ranges: expected {index.nbytes} bytes, got {end}"


def _places(index: RowIndex) -> list[tuple[int, int]]:
    places = [(extent.offset, extent.nbytes) for extent in index.extents]
    return places + [(inline.offset, len(inline.data)) for inline in index.inline]


class PieceFinder:
    """Finds the pieces of ranges of one row."""

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._all: Sequence[Extent | Inline] = sorted(
            (*index.extents, *index.inline), key=lambda one: one.offset
        )

    def pieces(self, offset: int, nbytes: int) -> list[ObjectPiece]:
        """The pieces of a range, in order.

        Raises:
            RowDamaged: the row ends before it does.
        """
        end = offset + nbytes
        if end > self._index.nbytes:
            raise RowDamaged(f"row: expected {end} bytes or more, got {self._index.nbytes}")
        found = []
        for one in self._all:
            size = one.nbytes if isinstance(one, Extent) else len(one.data)
            first, last = max(offset, one.offset), min(end, one.offset + size)
            if first >= last:
                continue
            at = first - one.offset
            if isinstance(one, Inline):
                data = memoryview(one.data)[at : at + last - first]
                found.append(ObjectPiece(last - first, data=data))
            else:
                found.append(ObjectPiece(last - first, self._index.data_key(one.of), one.at + at))
        return found
