"""The footer of a row, which says what the row is, and the notes of which it is made.

The footer, whole pages, follows the data::

    | data, whole pages | checksums | seals | meta (msgpack) | zeros | tail, 32 bytes |
                        ^ layout.data_nbytes                           end of the row ^

Each slab has a checksum of 8 bytes, and in an encrypted row a seal of 56.

The tail holds a magic number, the length of the meta, and a checksum of everything else in the
footer, so a footer that is cut, flipped, or of another row is detected.  A slab's checksum
is XXH3-64 of its bytes without the padding after it: 25 GB/s on one core, and each rank can
verify its own slabs alone.

Of an encrypted row the checksums are those of the ciphertext, so that accidents are found without a
key; what proves its bytes are the seals (:mod:`pdconn.store.format.seals`).

A packed row has another magic number, so that an engine that knows plain rows alone refuses it.
Of a spilled row, whose data ends later, the spills that were not written have no checksum: zero.

A *note* is what a rank writes beside a part: the numbers, checksums and seals of the slabs that it
wrote.  The footer is made of the notes of all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from pdconn.store.format.row import (
    Packing,
    RowKind,
    RowLayout,
    RowName,
    StoreLayout,
    aligned,
)
from pdconn.store.format.seals import SEAL_NBYTES
from pdconn.store.store_errors import FormatError, RowDamaged

FORMAT_VERSION = 1
_MAGICS = {
    (False, False): b"pdconnS1",
    (True, False): b"pdconnE1",
    (False, True): b"pdconnP1",
    (True, True): b"pdconnQ1",
}
"""By whether a row is encrypted, and whether it is packed."""
_KINDS = {magic: kind for kind, magic in _MAGICS.items()}
_TAIL = struct.Struct("<8sIIQQ")
_META_NBYTES = 1024
"""Room for the meta: namespace, keys and numbers take about 200 bytes."""

U64 = NDArray[np.uint64]
U8 = NDArray[np.uint8]


class _Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    version: int
    namespace: str
    kind: RowKind
    key: bytes
    parent: bytes
    index: int
    first_token: int
    until_token: int
    data_nbytes: int
    tenant: bytes = b""


# Made here: two threads that decode a type with an enum for the first time crash in msgspec.
_DECODER = msgspec.msgpack.Decoder(_Meta)


@dataclass(frozen=True, slots=True)
class Note:
    """Checksums, and seals of encrypted slabs, by slab number."""

    sums: Mapping[int, int]
    seals: Mapping[int, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Footer:
    """What identifies a row.

    Attributes:
        checksums: one uint64 per slab, in their order; 0 of spills that were not written.
        seals: of an encrypted row, of shape (slabs, 56), uint8.
        is_packed: the row is packed, or spilled.
    """

    namespace: str
    name: RowName
    tokens: range
    data_nbytes: int
    checksums: U64
    seals: U8 | None = None
    is_packed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the row, with the footer."""
        is_sealed = self.seals is not None
        return self.data_nbytes + footer_nbytes(len(self.checksums), is_sealed=is_sealed)

    @classmethod
    def from_notes(
        cls, namespace: str, name: RowName, layout: RowLayout, notes: Sequence[bytes]
    ) -> Self:
        """The footer of a row that ranks have written.

        Raises:
            RowDamaged: a rank failed, a note is not whole, or slabs are missing.
        """
        decoded = [decode_note(note) for note in notes]
        needed = len(layout.slabs)
        if any(number >= needed for note in decoded for number in note.sums):
            layout = layout.most  # with more slabs where rows can spill
        num_slabs = len(layout.slabs)
        sums = joined([note.sums for note in decoded], num_slabs, needed)
        if sums is None:
            raise RowDamaged(f"notes: expected all of {needed} slabs in {len(notes)} notes")
        # A spill without a checksum is one that was not written; one of 2^64 has the checksum 0.
        if any(
            not note.sums[number] for note in decoded for number in note.sums if number >= needed
        ):
            raise RowDamaged("notes: expected spills with another checksum than 0")
        first = name.index * layout.block_tokens
        tokens = range(first, first + layout.block_tokens)
        seals = _joined_seals(decoded, num_slabs) if layout.is_sealed else None
        is_packed = layout.packing is not Packing.NONE
        return cls(namespace, name, tokens, layout.data_nbytes, sums, seals, is_packed)

    def has_slab(self, number: int) -> bool:
        """Whether the slab was written; all are but some spills."""
        return number < len(self.checksums) and bool(self.checksums[number])

    def unwritten_ranges(self, layout: RowLayout) -> Iterator[tuple[int, int]]:
        """First byte and bytes of the spills that no rank has written, which are to be zeros."""
        slabs = layout.most.slabs
        for number in range(len(layout.slabs), len(self.checksums)):
            if not self.has_slab(number):
                yield slabs[number].offset, slabs[number].nbytes

    def check_row(self, namespace: str, name: RowName, layout: RowLayout) -> None:
        """Check that it is the footer of this row.

        Raises:
            RowDamaged: naming what differs.
        """
        for field, expected, seen in (
            ("namespace", namespace, self.namespace),
            ("name", name, self.name),
            ("data_nbytes", layout.data_nbytes, self.data_nbytes),
            ("slabs", len(layout.slabs), len(self.checksums)),
            ("encrypted", layout.is_sealed, self.seals is not None),
            ("packed", layout.packing is not Packing.NONE, self.is_packed),
        ):
            if expected != seen:
                raise RowDamaged(f"footer: {field}: expected {expected}, got {seen}")


def _joined_seals(notes: Sequence[Note], num_slabs: int) -> U8:
    found = np.zeros((num_slabs, SEAL_NBYTES), dtype=np.uint8)
    seals = {number: seal for note in notes for number, seal in note.seals.items()}
    written = {number for note in notes for number in note.sums}
    if seals.keys() != written:
        raise RowDamaged(f"notes: expected seals of {len(written)} slabs, got {len(seals)}")
    for number, seal in seals.items():
        found[number] = np.frombuffer(seal, dtype=np.uint8)
    return found


def checksum(data: Any) -> int:
    """XXH3-64 of the bytes of ``data``, anything with a buffer."""
    return xxhash.xxh3_64_intdigest(data)


def footer_nbytes(num_slabs: int, *, is_sealed: bool) -> int:
    """Bytes of the footer of a row of so many slabs, whole pages."""
    each = 8 + (SEAL_NBYTES if is_sealed else 0)
    return aligned(each * num_slabs + _META_NBYTES + _TAIL.size)


def row_nbytes(layout: RowLayout) -> int:
    """Bytes of a whole row, data and footer."""
    return layout.data_nbytes + footer_nbytes(len(layout.slabs), is_sealed=layout.is_sealed)


def row_sizes(layout: StoreLayout) -> dict[RowKind, int]:
    """Bytes of a row of each kind with its footer, in which every head fits."""
    sizes = {RowKind.FA: row_nbytes(layout.fa)}
    if layout.wa is not None:
        sizes[RowKind.WA] = row_nbytes(layout.wa)
    return sizes


def largest_row_sizes(layout: StoreLayout) -> dict[RowKind, int]:
    """The same of the largest rows, of which bytes are reserved before they are written."""
    return row_sizes(StoreLayout(layout.fa.most, layout.wa.most if layout.wa else None))


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
            footer.name.tenant,
        )
    )
    if len(meta) > _META_NBYTES:
        raise ValueError(f"namespace: expected a short one, got {len(footer.namespace)} characters")
    is_sealed = footer.seals is not None
    seals = b"" if footer.seals is None else footer.seals.tobytes()
    body = footer.checksums.astype("<u8").tobytes() + seals + meta
    num_slabs = len(footer.checksums)
    body += bytes(footer_nbytes(num_slabs, is_sealed=is_sealed) - _TAIL.size - len(body))
    magic = _MAGICS[is_sealed, footer.is_packed]
    fields = magic, num_slabs, len(meta), footer.data_nbytes
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
    nbytes = footer_nbytes_of(view)
    if nbytes > len(view):
        raise RowDamaged(f"footer: expected {nbytes} bytes, got {len(view)}")
    body = view[len(view) - nbytes : -_TAIL.size]
    if _digest(body, magic, num_slabs, meta_nbytes, data_nbytes) != digest:
        raise RowDamaged("footer: its checksum differs")
    sums = np.frombuffer(body[: 8 * num_slabs], dtype="<u8").astype(np.uint64)
    at, seals = 8 * num_slabs, None
    is_sealed, is_packed = _KINDS[magic]
    if is_sealed:
        found = np.frombuffer(body[at : at + SEAL_NBYTES * num_slabs], dtype=np.uint8)
        seals = found.reshape(num_slabs, SEAL_NBYTES).copy()
        at += seals.nbytes
    try:
        meta = _DECODER.decode(body[at:][:meta_nbytes])
        name = RowName(meta.kind, meta.key, meta.parent, meta.index, meta.tenant)
    except (msgspec.MsgspecError, UnicodeDecodeError, FormatError) as error:
        raise RowDamaged(f"footer: {error}") from error
    if meta.version != FORMAT_VERSION:
        raise RowDamaged(f"footer: expected version {FORMAT_VERSION}, got {meta.version}")
    tokens = range(meta.first_token, meta.until_token)
    return Footer(meta.namespace, name, tokens, data_nbytes, sums, seals, is_packed)


def _digest(body: bytes | memoryview, *fields: Any) -> int:
    """The checksum of a footer, its tail's other fields among it."""
    return checksum(b"".join((body, _TAIL.pack(*fields, 0))))


def footer_nbytes_of(tail: bytes | memoryview) -> int:
    """Bytes of a footer, by its last 32 bytes.

    Raises:
        RowDamaged: they are not a footer's end.
    """
    magic, num_slabs, *_ = _TAIL.unpack(memoryview(tail).cast("B")[-_TAIL.size :])
    if magic not in _KINDS:
        known = ", ".join(map(repr, _KINDS))
        raise RowDamaged(f"footer: expected one of {known} at its end, got {magic!r}")
    return footer_nbytes(num_slabs, is_sealed=_KINDS[magic][0])


TAIL_NBYTES = _TAIL.size


def encode_note(sums: Mapping[int, int], seals: Mapping[int, bytes] | None = None) -> bytes:
    """A rank's note: checksums by slab number, none where it wrote none, and seals of the same."""
    columns = np.array([list(sums), list(sums.values())], dtype="<u8")
    body = struct.pack("<Q", len(sums)) + columns.tobytes()
    if seals is not None:
        body += b"".join(seals[number] for number in sums)
    return b"ok" + struct.pack("<Q", checksum(body)) + body


def failed_note(why: str) -> bytes:
    """The note of a rank that could not write."""
    return b"no" + why.encode()[:200]


def decode_note(note: bytes) -> Note:
    """What a rank wrote.

    Raises:
        RowDamaged: the rank failed, or the note is not whole.
    """
    if note[:2] == b"no":
        raise RowDamaged(f"a rank could not write: {note[2:].decode(errors='replace')}")
    body = note[10:]
    if note[:2] != b"ok" or len(body) < 8 or struct.pack("<Q", checksum(body)) != note[2:10]:
        raise RowDamaged("note: its checksum differs")
    (count,) = struct.unpack("<Q", body[:8])
    seals = body[8 + 16 * count :]
    if len(body) < 8 + 16 * count or len(seals) not in (0, SEAL_NBYTES * count):
        raise RowDamaged(f"note: expected {count} slabs, got {len(body)} bytes")
    columns = np.frombuffer(body[8 : 8 + 16 * count], dtype="<u8").reshape(2, -1)
    numbers = columns[0].tolist()
    cut = [seals[at : at + SEAL_NBYTES] for at in range(0, len(seals), SEAL_NBYTES)]
    return Note(
        dict(zip(numbers, columns[1].tolist(), strict=True)), dict(zip(numbers, cut, strict=False))
    )


def joined(
    notes: Sequence[Mapping[int, int]], num_slabs: int, needed: int | None = None
) -> U64 | None:
    """Checksums of all slabs of a row from the notes of all ranks.

    Returns:
        None if some are missing of the first ``needed``, all by default; others are 0.
    """
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
    return sums if seen[:needed].all() else None
