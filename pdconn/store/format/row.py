"""One row: its name, and the layout of its bytes.

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

Rows may be *packed*: of each head of a section all layers are one slab, which is smaller
(:mod:`pdconn.store.format.exponents`).  What a head does not fit into is its *spill*, behind all
slabs, so that every range of a row is known before it is written, and a row is no larger than a
plain one::

    packed    | h0 | h1 | ... | footer |
    spilled   | h0 | h1 | ... | rest of h0 |          | rest of h2 | footer |      h1 has none

The footer is described in :mod:`pdconn.store.format.footer`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import gcd, lcm
from typing import Any

import msgspec
from msgspec import structs

from pdconn.store.format.exponents import HeadPacking, head_packing
from pdconn.store.store_errors import FormatError
from registration.references import (
    AttentionKind,
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
)

KEY_NBYTES = 16
NO_KEY = bytes(KEY_NBYTES)
"""The parent of a prompt's first row."""

TENANT_NBYTES = 8
"""Of the label of a tenant."""

_FILE = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.(\d{1,8})(?:\.([0-9a-f]{16}))?")


class RowKind(StrEnum):
    """Which layers a row holds."""

    FA = "fa"
    WA = "wa"

    # As text, without Python code: tables of rows are by kind.
    __hash__ = str.__hash__


class RowName(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """A row of one namespace: tokens ``[index * block_tokens, (index + 1) * block_tokens)``.

    ``key`` and ``parent`` are 16 bytes; ``parent`` is the key of block ``index - 1``.  ``tenant``
    is the label of the tenant whose prompt it is, 8 bytes, or empty: a row belongs to one tenant,
    since its key depends on the cache salt.
    """

    # A struct, whose hash and comparison take no Python code: the engine's thread and the evictor
    # look every row of a prompt up in several tables.

    kind: RowKind
    key: bytes
    parent: bytes
    index: int
    tenant: bytes = b""

    def __post_init__(self) -> None:
        for field in ("key", "parent"):
            if len(getattr(self, field)) != KEY_NBYTES:
                raise FormatError(field, f"{KEY_NBYTES} bytes", getattr(self, field))
        if self.index < 0:
            raise FormatError("index", "0 or more", self.index)
        if len(self.tenant) not in (0, TENANT_NBYTES):
            raise FormatError("tenant", f"none or {TENANT_NBYTES} bytes", self.tenant)

    @property
    def file_name(self) -> str:
        """The row's name among files or objects of its kind: a listing shows the chains."""
        name = f"{self.key.hex()}.{self.parent.hex()}.{self.index}"
        return f"{name}.{self.tenant.hex()}" if self.tenant else name

    @classmethod
    def from_file_name(cls, kind: RowKind, file_name: str) -> RowName | None:
        """The row of that file name, or None for another file."""
        match = _FILE.fullmatch(file_name)
        if match is None:
            return None
        key, parent, index, tenant = match.groups()
        owner = bytes.fromhex(tenant or "")
        return cls(kind, bytes.fromhex(key), bytes.fromhex(parent), int(index), owner)


ALIGNMENT = 4096
"""Of slabs and rows, for O_DIRECT."""


class Packing(StrEnum):
    """How the heads of a row are stored; of a spilled row some do not fit into their slabs."""

    NONE = "none"
    PACKED = "packed"
    SPILLED = "spilled"


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
        """Bytes from one head to the next, in rows that are not packed."""
        return sum(aligned(self.slab_nbytes(layer)) for layer in self.layers)

    @property
    def head_packing(self) -> HeadPacking | None:
        """How a head is packed; None of states, and of heads that would not be smaller."""
        if self.kind is AttentionKind.STATE:
            return None
        slabs, at = [], 0
        for layer in self.layers:
            slabs.append((at, self.slab_nbytes(layer)))
            at += aligned(slabs[-1][1])
        found = head_packing(tuple(slabs), at)
        return found if found is not None and aligned(found.packed_nbytes) < at else None

    @property
    def packed_head_nbytes(self) -> int:
        """Bytes from one head to the next, in packed rows."""
        packing = self.head_packing
        return self.head_nbytes if packing is None else aligned(packing.packed_nbytes)


class RowLayout(msgspec.Struct, frozen=True, dict=True, omit_defaults=True):
    """Sections of one kind of row.  Slabs are numbered by section, head, layer.

    ``is_sealed``: slabs are encrypted, and the footer holds a seal of each.
    """

    kind: RowKind
    block_tokens: int
    sections: tuple[Section, ...]
    is_sealed: bool = False
    packing: Packing = Packing.NONE

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first byte of each section, and the end of the last."""
        starts = [0]
        for section in self.sections:
            starts.append(starts[-1] + section.num_heads * self._head_nbytes(section))
        return tuple(starts)

    def _head_nbytes(self, section: Section) -> int:
        is_plain = self.packing is Packing.NONE
        return section.head_nbytes if is_plain else section.packed_head_nbytes

    @cached_property
    def data_nbytes(self) -> int:
        """Bytes before the footer."""
        if self.packing is not Packing.SPILLED:
            return self.starts[-1]
        return sum(section.num_heads * section.head_nbytes for section in self.sections)

    @cached_property
    def most(self) -> RowLayout:
        """The layout of the largest rows: of those that spill, where rows can."""
        return self if self.packing is Packing.NONE else self.packed_as(Packing.SPILLED)

    def packed_as(self, packing: Packing) -> RowLayout:
        """The same heads and layers, packed so."""
        return structs.replace(self, packing=packing)

    @cached_property
    def unit_tokens(self) -> int:
        """Every section's units end at multiples of this."""
        return lcm(*(section.unit_tokens for section in self.sections))

    @cached_property
    def windows(self) -> tuple[Section, ...]:
        """A section of each kind and window."""
        return tuple({(one.kind, one.window): one for one in self.sections}.values())

    @cached_property
    def slabs(self) -> tuple[Slab, ...]:
        """Every slab, in the order of its bytes and its number."""
        if self.packing is Packing.NONE:
            return tuple(self._slabs_of_layers())
        packed = list(self._slabs_of_heads())
        return tuple(packed + list(self._spills(packed)))

    def _slabs_of_layers(self) -> Iterator[Slab]:
        for number, section in enumerate(self.sections):
            for head in range(section.num_heads):
                at = self.starts[number] + head * section.head_nbytes
                for layer in section.layers:
                    nbytes = section.slab_nbytes(layer)
                    where = (number, section.first_head + head, layer.name, layer.chunk)
                    yield Slab(*where, at, nbytes)
                    at += aligned(nbytes)

    def _slabs_of_heads(self) -> Iterator[Slab]:
        for number, section in enumerate(self.sections):
            nbytes, first, last = section.packed_head_nbytes, section.layers[0], section.layers[-1]
            # Also which layers it has: a slab of other layers is another one.
            layers = f"{first.name} to {last.name}, {last.chunk}: {len(section.layers)} layers"
            for head in range(section.num_heads):
                at = self.starts[number] + head * nbytes
                yield Slab(number, section.first_head + head, layers, first.chunk, at, nbytes)

    def _spills(self, packed: Sequence[Slab]) -> Iterator[Slab]:
        """What heads that do not fit go on in; not every row has them all."""
        if self.packing is not Packing.SPILLED:
            return
        at = self.starts[-1]
        for number, slab in enumerate(packed):
            section = self.sections[slab.section]
            nbytes = section.head_nbytes - slab.nbytes
            if section.head_packing is not None:
                yield replace(slab, offset=at, nbytes=nbytes, spilled=number)
                at += nbytes


@dataclass(frozen=True, slots=True)
class Slab:
    """A slab of a row: ``nbytes`` at byte ``offset``.

    It is one head of one layer's chunk; in packed rows of all layers of its section, of which
    ``layer`` names the first and the last.  ``spilled`` is the number of the slab that it goes on
    from, if it is a spill.
    """

    section: int
    head: int
    layer: str
    chunk: int
    offset: int
    nbytes: int
    spilled: int | None = None


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

    def sealed(self) -> StoreLayout:
        """The same rows, encrypted."""
        return self._replaced(is_sealed=True)

    def packed(self) -> StoreLayout:
        """The same rows, packed."""
        return self._replaced(packing=Packing.PACKED)

    def _replaced(self, **fields: Any) -> StoreLayout:
        wa = None if self.wa is None else structs.replace(self.wa, **fields)
        return StoreLayout(structs.replace(self.fa, **fields), wa)

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
