"""One row: its name, the layout of its bytes, and the footer that says what it is.

A row is head-major, so that the heads of one tensor-parallel rank are one range of it whatever
the sizes of the engines that write and read::

    section 0                                section 1             footer
    | h0: L0 L1 L2 | h1: L0 L1 L2 | ...      | h0: L3 | h1: L3 |   | checksums, name |
          ^ a slab: one head of one layer, its units in order, aligned to 4 KiB

A *section* holds layers of one kind, window, token size and number of heads.  Its *units* are
the stored tokens of a head in order: one token, several where the model compresses, or a whole
engine block where blocks are opaque in tokens (the CPU backend packs them).  Only the last
``units`` units of a canonical block are kept: all of them for full attention, and for a window
what a boundary at the block's end can reach.

Of a compressor's window only a part is kept, or nothing (:func:`as_kept`).  A recurrent state is
like a window of which the boundary alone counts: WA rows hold it as it is after their last token, a
slab for each part that tensor parallelism divides.

The layout is made from the references of all ranks of an engine, and is the same for engines
of any TP size, PP size, layout and block size (but for opaque blocks), since it is ordered by
layer names and model-wide heads.

The footer, whole pages, follows the data::

    | data, whole pages | checksums, 8 bytes a slab | meta (msgpack) | zeros | tail, 32 bytes |
                        ^ layout.data_nbytes                                 ^ end of the row

The tail holds a magic number, the length of the meta, and a checksum of everything else in the
footer, so a footer that is cut, flipped, or of another row is detected.  A slab's checksum
is XXH3-64 of its bytes without the padding after it: 25 GB/s on one core, and each rank can
verify its own slabs alone.

A *note* is what a rank writes beside a part: the numbers and checksums of the slabs it wrote.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import gcd
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from pdconn.store.store_errors import FormatError, RowDamaged
from registration.references import (
    AttentionKind,
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
)

KEY_NBYTES = 16
NO_KEY = bytes(KEY_NBYTES)
"""The parent of a prompt's first row."""

_FILE = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.(\d{1,8})")


class RowKind(StrEnum):
    """Which layers a row holds."""

    FA = "fa"
    WA = "wa"


@dataclass(frozen=True, slots=True, order=True)
class RowName:
    """A row of one namespace: tokens ``[index * block_tokens, (index + 1) * block_tokens)``.

    ``key`` and ``parent`` are 16 bytes; ``parent`` is the key of block ``index - 1``.
    """

    kind: RowKind
    key: bytes
    parent: bytes
    index: int

    def __post_init__(self) -> None:
        for field in ("key", "parent"):
            if len(getattr(self, field)) != KEY_NBYTES:
                raise FormatError(field, f"{KEY_NBYTES} bytes", getattr(self, field))
        if self.index < 0:
            raise FormatError("index", "0 or more", self.index)

    @property
    def file_name(self) -> str:
        """The row's name among files or objects of its kind: a listing shows the chains."""
        return f"{self.key.hex()}.{self.parent.hex()}.{self.index}"

    @classmethod
    def from_file_name(cls, kind: RowKind, file_name: str) -> RowName | None:
        """The row of that file name, or None for another file."""
        match = _FILE.fullmatch(file_name)
        if match is None:
            return None
        key, parent, index = match.groups()
        return cls(kind, bytes.fromhex(key), bytes.fromhex(parent), int(index))


ALIGNMENT = 4096
"""Of slabs and rows, for O_DIRECT."""


class Layer(msgspec.Struct, frozen=True):
    """One layer's chunk in a section; ``unit_nbytes`` are those of one head's unit."""

    name: str
    chunk: int
    unit_nbytes: int


class Section(msgspec.Struct, frozen=True):
    """Layers of one kind, window, unit and head count.

    Attributes:
        kind: an :class:`AttentionKind`.
        window: tokens of the window or chunk, None for full attention and states; of compressors
            what :func:`as_kept` says.
        unit_tokens: tokens of the sequence that a unit covers; a state's are the canonical block.
        units: units of a head in one row: the last ones of the canonical block.
        is_opaque: a unit is a block of the engine, or a state, which moves whole.
        first_head, num_heads: the model-wide heads, or parts of a state, held (all of them in a
            whole row).
        layers: in order of their names.
    """

    kind: AttentionKind
    window: int | None
    unit_tokens: int
    units: int
    is_opaque: bool
    first_head: int
    num_heads: int
    layers: tuple[Layer, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the canonical block that the section keeps, the last ones."""
        return self.units * self.unit_tokens

    def slab_nbytes(self, layer: Layer) -> int:
        """Bytes of one head of ``layer``, without what aligns the next slab."""
        return self.units * layer.unit_nbytes

    @property
    def row_kind(self) -> RowKind:
        """Which rows hold it."""
        return row_kind(self.kind)

    @property
    def head_nbytes(self) -> int:
        """Bytes from one head to the next."""
        return sum(aligned(self.slab_nbytes(layer)) for layer in self.layers)


class RowLayout(msgspec.Struct, frozen=True, dict=True):
    """Sections of one kind of row.  Slabs are numbered by section, head, layer."""

    kind: RowKind
    block_tokens: int
    sections: tuple[Section, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first byte of each section, and the end of the last."""
        starts = [0]
        for section in self.sections:
            starts.append(starts[-1] + section.num_heads * section.head_nbytes)
        return tuple(starts)

    @property
    def data_nbytes(self) -> int:
        """Bytes before the footer."""
        return self.starts[-1]

    @cached_property
    def slabs(self) -> tuple[Slab, ...]:
        """Every slab, in the order of its bytes and its number."""
        found = []
        for number, section in enumerate(self.sections):
            for head in range(section.num_heads):
                at = self.starts[number] + head * section.head_nbytes
                for layer in section.layers:
                    nbytes = section.slab_nbytes(layer)
                    where = (number, section.first_head + head, layer.name, layer.chunk)
                    found.append(Slab(*where, at, nbytes))
                    at += aligned(nbytes)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Slab:
    """One head of one layer's chunk in a row: ``nbytes`` at byte ``offset``."""

    section: int
    head: int
    layer: str
    chunk: int
    offset: int
    nbytes: int


class StoreLayout(msgspec.Struct, frozen=True):
    """Rows of an engine, whole or of one rank's share.

    ``wa`` is None without windows and states.
    """

    fa: RowLayout
    wa: RowLayout | None

    def for_kind(self, kind: RowKind) -> RowLayout:
        """The layout of rows of ``kind``.

        Raises:
            FormatError: WA of a model without windows and states.
        """
        found = self.fa if kind is RowKind.FA else self.wa
        if found is None:
            raise FormatError("row kind", RowKind.FA, kind)
        return found

    @property
    def block_tokens(self) -> int:
        """Tokens of a canonical block."""
        return self.fa.block_tokens

    def encoded(self) -> bytes:
        """The same bytes for equal layouts: part of the namespace."""
        return msgspec.json.encode(self)


def row_kind(kind: AttentionKind) -> RowKind:
    """Which rows hold layers of ``kind``: WA rows, where only a boundary's own end is read."""
    return RowKind.FA if kind is AttentionKind.FULL else RowKind.WA


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def store_layout(ranks: Sequence[KVCacheReferences], block_tokens: int) -> StoreLayout:
    """The layout of rows of an engine with these ranks.

    Raises:
        FormatError: naming a layer whose kind rows cannot hold, block sizes that do not
            divide ``block_tokens``, heads that no rank holds, or no full attention at all.
    """
    made = share_layout(ranks, block_tokens)
    if not made.fa.sections:
        raise FormatError("layers", "some with full attention", "windows or states only")
    return made


def as_kept(group: KVCacheGroupReference, block_tokens: int) -> KVCacheGroupReference:
    """A compressor's group as a window of what any canonical boundary needs; others as they are.

    A compressor keeps the tokens that it has yet to compress in a window of its own, and reads it
    only where an output ends.  At a boundary that the ratio divides the next output ends a whole
    ratio later, and the rest of its window lies before the boundary::

        ratio 4, window 8     | b-8 ... b-5 | b-4 ... b-1 | b ... b+3 |    an output ends at b+3:
                                            [   window of 8 tokens    ]    4 tokens of 8 are kept

    >>> state = KVCacheGroupReference(AttentionKind.SLIDING_WINDOW, 8, 4, (), compress_ratio=4)
    >>> as_kept(state, 256).window
    5
    """
    if group.window is None or group.compress_ratio == 1:
        return group
    window = group.window
    # A window that reaches past the boundary before is kept whole: the engine holds blocks for all
    # of a window after a load, so rows before it would be saved from blocks that nothing filled.
    if window <= block_tokens + 1:
        # The first output after a boundary ends at least gcd(ratio, block_tokens) tokens later.  A
        # window of 1 is the next token alone, of which nothing is kept: such layers are in no row.
        window = 1 + max(0, window - gcd(group.compress_ratio, block_tokens))
    return replace(group, window=window, compress_ratio=1)


def share_layout(ranks: Sequence[KVCacheReferences], block_tokens: int) -> StoreLayout:
    """As :func:`store_layout`, of the share that some ranks hold; a stage may lack a kind."""
    found: dict[_Class, dict[tuple[str, int], _HeldHeads]] = defaultdict(dict)
    for references in ranks:
        for group in (as_kept(group, block_tokens) for group in references.groups):
            for ref in group.data:
                key = _class_of(group, ref, block_tokens)
                if not key[3]:
                    continue
                held = found[key].setdefault((ref.layer, ref.chunk), _HeldHeads(ref))
                held.add_reference(ref)
    sections = []
    for key, layers in found.items():
        by_heads: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
        for name, held in layers.items():
            by_heads[held.heads(name[0])].append(name)
        for (first, count), names in by_heads.items():
            made = tuple(
                Layer(*name, unit_nbytes=layers[name].unit_nbytes)
                for name in sorted(names, key=_natural)
            )
            sections.append(Section(*key, first_head=first, num_heads=count, layers=made))
    sections.sort(key=lambda section: _natural((section.layers[0].name, section.layers[0].chunk)))
    full = tuple(section for section in sections if section.row_kind is RowKind.FA)
    windowed = tuple(section for section in sections if section.row_kind is RowKind.WA)
    return StoreLayout(
        RowLayout(RowKind.FA, block_tokens, full),
        RowLayout(RowKind.WA, block_tokens, windowed) if windowed else None,
    )


_Class = tuple[AttentionKind, int | None, int, int, bool]
"""What layers of a section share: kind, window, unit_tokens, units, is_opaque."""


class _HeldHeads:
    """Heads of one layer's chunk that ranks hold."""

    def __init__(self, ref: KVCacheDataReference) -> None:
        self.unit_nbytes = ref.head_nbytes if ref.token_nbytes is None else ref.token_nbytes
        self._heads: set[int] = set()

    def add_reference(self, ref: KVCacheDataReference) -> None:
        self._heads.update(range(ref.first_head, ref.first_head + ref.num_heads))

    def heads(self, layer: str) -> tuple[int, int]:
        """First head and number of heads.

        Raises:
            FormatError: there is a gap.
        """
        first, count = min(self._heads), len(self._heads)
        if max(self._heads) - first + 1 != count:
            raise FormatError(f"heads of {layer}", "all from the first to the last", self._heads)
        return first, count


def _class_of(group: KVCacheGroupReference, ref: KVCacheDataReference, block_tokens: int) -> _Class:
    if block_tokens % group.block_tokens:
        raise FormatError(
            "block_tokens", f"a multiple of the engine's {group.block_tokens}", block_tokens
        )
    is_opaque = ref.num_rows is None
    if group.kind is AttentionKind.STATE:
        return group.kind, None, block_tokens, 1, is_opaque
    unit_tokens = group.block_tokens if ref.num_rows is None else group.block_tokens // ref.num_rows
    all_units = block_tokens // unit_tokens
    units = all_units
    if group.window is not None:
        units = _tail_units(group, unit_tokens, all_units)
    return group.kind, group.window, unit_tokens, units, is_opaque


def _tail_units(group: KVCacheGroupReference, unit_tokens: int, all_units: int) -> int:
    """The fewest units, dividing all, that hold what the next token attends to of a block.

    None of a window of one token.
    """
    assert group.window is not None
    reach = group.window if group.kind is AttentionKind.CHUNKED_LOCAL else group.window - 1
    needed = min(all_units, -(-reach // unit_tokens))
    if needed == 0:
        return 0
    return next(n for n in range(needed, all_units + 1) if all_units % n == 0)


def _natural(name: tuple[str, int]) -> tuple[list[tuple[bool, int, str]], int]:
    """Orders layer names by the numbers in them, and chunks within a layer."""
    parts = re.split(r"(\d+)", name[0])
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts], name[1]


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
    """What identifies a row.  ``checksums`` has one uint64 per slab, in their order."""

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


def row_sizes(layout: StoreLayout) -> dict[RowKind, int]:
    """Bytes of a row of each kind with its footer."""
    sizes = {RowKind.FA: row_nbytes(layout.fa)}
    if layout.wa is not None:
        sizes[RowKind.WA] = row_nbytes(layout.wa)
    return sizes


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
    """The number of slabs in a footer's last 32 bytes, from which its length follows.

    Raises:
        RowDamaged: they are not a footer's end.
    """
    magic, num_slabs, *_ = _TAIL.unpack(memoryview(tail).cast("B")[-_TAIL.size :])
    if magic != _MAGIC:
        raise RowDamaged(f"footer: expected {_MAGIC!r} at its end, got {magic!r}")
    return int(num_slabs)


TAIL_NBYTES = _TAIL.size


def encode_note(sums: Mapping[int, int]) -> bytes:
    """A rank's note: checksums by slab number, none where it wrote none."""
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
