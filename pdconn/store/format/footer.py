"""The footer of a row, and the notes from which it is made.

::

    | data, whole pages | checksums, 8 bytes a slab | meta (msgpack) | zeros | tail, 32 bytes |
                        ^ layout.data_nbytes                                 ^ end of the row

The tail holds a magic number, the length of the meta, and a checksum of everything else in the
footer, so a footer that is cut, flipped, or of another row is told at once.  A slab's checksum
is XXH3-64 of its bytes without the padding after it: 25 GB/s on one core, and each rank can
verify its own slabs alone.

A *note* is what a rank leaves beside a part: the numbers and checksums of slabs that it wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from pdconn.store.errors import FormatError, RowDamaged
from pdconn.store.format.layout import RowLayout, aligned
from pdconn.store.format.names import RowKind, RowName

FORMAT_VERSION = 1
_MAGIC = b"pdconnS1"
_TAIL = struct.Struct("<8sIIQQ")
_META_NBYTES = 1024
"""Room for the meta: namespace, keys and numbers take about 200 bytes."""

U64 = NDArray[np.uint64]


class _Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    namespace: str
    kind: RowKind
    key: bytes
    parent: bytes
    index: int
    first_token: int
    until_token: int
    data_nbytes: int


# Made here: two threads that decode a type with an enum for the first time crash in msgspec.
_DECODER = msgspec.msgpack.Decoder(_Meta)


@dataclass(frozen=True, slots=True, eq=False)
class Footer:
    """What a row says of itself.  ``checksums`` has one uint64 per slab, in their order."""

    namespace: str
    name: RowName
    tokens: range
    data_nbytes: int
    checksums: U64


def checksum(data: Any) -> int:
    """XXH3-64 of the bytes of ``data``, anything with a buffer."""
    return xxhash.xxh3_64_intdigest(data)


def footer_nbytes(num_slabs: int) -> int:
    """Bytes of the footer of a row of so many slabs, whole pages."""
    return aligned(8 * num_slabs + _META_NBYTES + _TAIL.size)


def row_nbytes(layout: RowLayout) -> int:
    """Bytes of a whole row, data and footer."""
    return layout.data_nbytes + footer_nbytes(len(layout.slabs))


def encode_footer(footer: Footer) -> bytes:
    """The bytes that follow the row's data, whole pages."""
    meta = msgspec.msgpack.encode(
        _Meta(
            FORMAT_VERSION,
            footer.namespace,
            footer.name.kind,
            footer.name.key,
            footer.name.parent,
            footer.name.index,
            footer.tokens.start,
            footer.tokens.stop,
            footer.data_nbytes,
        )
    )
    if len(meta) > _META_NBYTES:
        raise ValueError(f"namespace: expected a short one, got {len(footer.namespace)} characters")
    sums = footer.checksums.astype("<u8").tobytes()
    body = sums + meta
    body += bytes(footer_nbytes(len(footer.checksums)) - _TAIL.size - len(body))
    num_slabs = len(footer.checksums)
    fields = _MAGIC, num_slabs, len(meta), footer.data_nbytes
    return body + _TAIL.pack(*fields, _digest(body, *fields))


def decode_footer(data: bytes | memoryview) -> Footer:
    """The footer in the last bytes of a row; ``data`` may begin before it.

    Raises:
        RowDamaged: it is cut, flipped, or of another version.
    """
    view = memoryview(data).cast("B")
    if len(view) < _TAIL.size:
        raise RowDamaged(f"footer: expected at least {_TAIL.size} bytes, got {len(view)}")
    magic, num_slabs, meta_nbytes, data_nbytes, digest = _TAIL.unpack(view[-_TAIL.size :])
    if magic != _MAGIC:
        raise RowDamaged(f"footer: expected {_MAGIC!r} at its end, got {magic!r}")
    nbytes = footer_nbytes(num_slabs)
    if nbytes > len(view):
        raise RowDamaged(f"footer: expected {nbytes} bytes, got {len(view)}")
    body = view[len(view) - nbytes : -_TAIL.size]
    if _digest(body, magic, num_slabs, meta_nbytes, data_nbytes) != digest:
        raise RowDamaged("footer: its checksum differs")
    sums = np.frombuffer(body[: 8 * num_slabs], dtype="<u8").astype(np.uint64)
    try:
        meta = _DECODER.decode(body[8 * num_slabs :][:meta_nbytes])
        name = RowName(meta.kind, meta.key, meta.parent, meta.index)
    except (msgspec.MsgspecError, UnicodeDecodeError, FormatError) as error:
        raise RowDamaged(f"footer: {error}") from error
    if meta.version != FORMAT_VERSION:
        raise RowDamaged(f"footer: expected version {FORMAT_VERSION}, got {meta.version}")
    tokens = range(meta.first_token, meta.until_token)
    return Footer(meta.namespace, name, tokens, data_nbytes, sums)


def _digest(body: bytes | memoryview, *fields: Any) -> int:
    """The checksum of a footer, its tail's other fields among it."""
    return checksum(b"".join((body, _TAIL.pack(*fields, 0))))


def num_slabs_of(tail: bytes | memoryview) -> int:
    """Slabs that a footer's last 32 bytes tell of, to know how much more to read.

    Raises:
        RowDamaged: they are not a footer's end.
    """
    magic, num_slabs, *_ = _TAIL.unpack(memoryview(tail).cast("B")[-_TAIL.size :])
    if magic != _MAGIC:
        raise RowDamaged(f"footer: expected {_MAGIC!r} at its end, got {magic!r}")
    return int(num_slabs)


TAIL_NBYTES = _TAIL.size


def encode_note(sums: Mapping[int, int]) -> bytes:
    """A rank's note: checksums by slab number; empty for none; see :func:`failed_note`."""
    columns = np.array([list(sums), list(sums.values())], dtype="<u8")
    body = columns.tobytes()
    return b"ok" + struct.pack("<Q", checksum(body)) + body


def failed_note(why: str) -> bytes:
    """The note of a rank that could not write."""
    return b"no" + why.encode()[:200]


def decode_note(note: bytes) -> dict[int, int]:
    """Checksums by slab number.

    Raises:
        RowDamaged: the rank failed, or the note is not whole.
    """
    if note[:2] == b"no":
        raise RowDamaged(f"a rank could not write: {note[2:].decode(errors='replace')}")
    body = note[10:]
    if note[:2] != b"ok" or len(body) % 16 or struct.pack("<Q", checksum(body)) != note[2:10]:
        raise RowDamaged("note: its checksum differs")
    columns = np.frombuffer(body, dtype="<u8").reshape(2, -1)
    return dict(zip(columns[0].tolist(), columns[1].tolist(), strict=True))


def joined(notes: Sequence[Mapping[int, int]], num_slabs: int) -> U64 | None:
    """Checksums of all slabs of a row from the notes of all ranks; None if some are missing."""
    sums = np.zeros(num_slabs, dtype=np.uint64)
    seen = np.zeros(num_slabs, dtype=bool)
    for note in notes:
        if not note:
            continue
        if max(note) >= num_slabs:  # numbers of any size: another process wrote them
            return None
        numbers = np.fromiter(note.keys(), dtype=np.int64)
        sums[numbers] = np.fromiter(note.values(), dtype=np.uint64)
        seen[numbers] = True
    return sums if seen.all() else None
