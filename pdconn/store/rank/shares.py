"""One rank's share of rows: which slabs are its own, and which bytes of KV blocks belong to them.

A row holds the slabs of all heads and layers, a share those of one rank, in the same order and
each from a page of its own.  Neighbours in both are one run, so that with equal layers a rank
reads one range of the file::

    row     | h0 | h1 | h2 | h3 |  | h0 | h1 | footer
    share             | h2 | h3 |       | h1 |           2 runs, and the footer

Every rank reads the footer too and verifies its own slabs against it.  Where several ranks hold
the same heads, they divide the rows among themselves when they save.

Where rows are packed, a share has two forms: as it is copied to KV blocks, and as it is stored
(:mod:`pdconn.store.rank.packed_shares`).

What goes where between a share and KV blocks is planned in
:mod:`pdconn.store.rank.row_pairing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from pdconn.planning.plan import Gaps, Need, Pairing
from pdconn.store.format.exponents import HeadPacking
from pdconn.store.format.footer import Footer, checksum, decode_footer, footer_nbytes
from pdconn.store.format.row import (
    Packing,
    RowKind,
    RowLayout,
    RowName,
    Slab,
    aligned,
    share_layout,
)
from pdconn.store.rank.row_pairing import RowPairing, unsaved_layers
from pdconn.store.rank_commands import OpenStore
from pdconn.store.store_errors import FormatError, RowDamaged, RowLocked
from registration.references import (
    KVCacheReferences,
)

Replicas = Mapping[tuple[str, int], tuple[int, int]]
"""By layer and chunk: our number among the ranks that hold the same heads, and their count."""

Run = tuple[int, int, int]
"""Offset in the row, offset in the share, bytes: all of whole pages."""


@dataclass(frozen=True, slots=True)
class OwnSlab:
    """One slab of a share.

    Attributes:
        number: of the slab in the whole row.
        row_offset, offset: where it begins in the row, and in the share.
        nbytes: without what aligns the next one.
        replica, replicas: we write it to rows whose index % replicas == replica.
        spilled: the number of the slab that it goes on from, if it is a spill.
    """

    number: int
    row_offset: int
    offset: int
    nbytes: int
    replica: int
    replicas: int
    spilled: int | None = None

    def is_written(self, index: int) -> bool:
        """Whether this rank saves the slab of row ``index``."""
        return index % self.replicas == self.replica


@dataclass(frozen=True, slots=True)
class OwnHead:
    """One head of one section of a share, where rows are packed.

    Attributes:
        slab, spill: where it is stored; no spill where it always fits into its slab.
        offset, nbytes: of it in the share as it is copied.
        packing: None where it is stored as it is.
    """

    slab: OwnSlab
    spill: OwnSlab | None
    offset: int
    nbytes: int
    packing: HeadPacking | None


@dataclass(frozen=True, eq=False)
class RowShare:
    """A rank's slabs of rows of one kind, in order.

    Attributes:
        whole: the layout of the whole row.
        layout: the layout of the share alone, as it lies in staging.
        stored: the same as it is read and written; another one where rows are packed.
        slabs: those that every row has.
        heads: of packed rows, in order; none of others.
    """

    whole: RowLayout
    layout: RowLayout
    stored: RowLayout
    slabs: tuple[OwnSlab, ...]
    heads: tuple[OwnHead, ...] = ()

    @classmethod
    def from_layouts(cls, whole: RowLayout, layout: RowLayout, replicas: Replicas) -> RowShare:
        """Find a share's slabs in the whole row.

        Args:
            layout: of the share when it is not packed.

        Raises:
            FormatError: a slab that the row does not have, or has with another size, or a
                layer that ``replicas`` does not name.
        """
        is_packed = whole.packing is not Packing.NONE
        stored = layout.packed_as(whole.packing) if is_packed else layout
        found = _own_slabs(whole.most, stored.most, replicas)
        slabs = tuple(slab for slab in found if slab.spilled is None)
        heads = tuple(_own_heads(layout, found)) if is_packed else ()
        return cls(whole, layout, stored, slabs, heads)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that a row takes in staging: whole pages."""
        return aligned(self.layout.data_nbytes)

    @cached_property
    def stored_nbytes(self) -> int:
        """Bytes that it takes at most as it is stored: whole pages."""
        return aligned(self.stored.most.data_nbytes)

    @cached_property
    def footer_nbytes(self) -> int:
        """Bytes of a row's footer, which follows its data."""
        return footer_nbytes(len(self.whole.slabs), is_sealed=self.whole.is_sealed)

    @cached_property
    def most_footer_nbytes(self) -> int:
        """Bytes of the footer of the largest row."""
        return footer_nbytes(len(self.whole.most.slabs), is_sealed=self.whole.is_sealed)

    def ranges(self, data: memoryview, footer: memoryview) -> list[tuple[int, memoryview]]:
        """What to read of a row that did not spill.

        Args:
            data: the share as it is stored.
            footer: ``footer_nbytes``.
        """
        return [*ranges_of(self.runs, data), (self.whole.data_nbytes, footer)]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The ranges to read, neighbours joined."""
        return joined_runs(self.slabs)

    def verify_row(
        self, data: memoryview, footer: memoryview, namespace: str, name: RowName
    ) -> None:
        """Compare the bytes read of a row that did not spill with its footer.

        Raises:
            RowDamaged: naming what differs.
            RowLocked: they are encrypted.
        """
        check_sums(self.slabs, data, self.checked_footer(footer, namespace, name))

    def checked_footer(self, footer: memoryview, namespace: str, name: RowName) -> Footer:
        """The footer that was read of a row that did not spill.

        Raises:
            RowDamaged: naming what differs.
        """
        found = decode_footer(footer)
        found.check_row(namespace, name, self.whole)
        return found

    @cached_property
    def _period(self) -> int:
        return lcm(*(slab.replicas for slab in self.slabs))

    @cached_property
    def _written(self) -> dict[int, tuple[OwnSlab, ...]]:
        return {
            index: tuple(slab for slab in self.slabs if slab.is_written(index))
            for index in range(self._period)
        }

    def written(self, index: int) -> tuple[OwnSlab, ...]:
        """The slabs that this rank saves of row ``index``, in order."""
        return self._written[index % self._period]


def _own_slabs(whole: RowLayout, share: RowLayout, replicas: Replicas) -> list[OwnSlab]:
    """The slabs of a share with their places in the row."""
    there = {_identity(slab): number for number, slab in enumerate(whole.slabs)}
    found: list[OwnSlab] = []
    for slab in share.slabs:
        where = f"{whole.kind} slab of {slab.layer}, chunk {slab.chunk}, head {slab.head}"
        number = there.get(_identity(slab))
        if number is None:
            raise FormatError(where, "one of the row's", "none such in the row")
        in_row = whole.slabs[number]
        if in_row.nbytes != slab.nbytes:
            raise FormatError(f"{where}: bytes", in_row.nbytes, slab.nbytes)
        chunks = [(slab.layer, slab.chunk)]
        if whole.packing is not Packing.NONE:
            layers = share.sections[slab.section].layers
            chunks = [(layer.name, layer.chunk) for layer in layers]
        if any(chunk not in replicas for chunk in chunks):
            raise FormatError(f"{where}: replicas", "an entry", "none")
        which = {replicas[chunk] for chunk in chunks}
        if len(which) > 1:
            raise FormatError(f"{where}: replicas", "the same of all layers", which)
        place = number, in_row.offset, slab.offset, slab.nbytes
        found.append(OwnSlab(*place, *which.pop(), spilled=in_row.spilled))
    return found


def _identity(slab: Slab) -> tuple[str, int, int, bool]:
    return slab.layer, slab.chunk, slab.head, slab.spilled is not None


def _own_heads(layout: RowLayout, slabs: Sequence[OwnSlab]) -> Iterator[OwnHead]:
    """The heads of a share that is ``layout`` when it is not packed, in order."""
    spills = {slab.spilled: slab for slab in slabs if slab.spilled is not None}
    own = iter(slabs)
    for number, section in enumerate(layout.sections):
        nbytes = section.head_nbytes
        for head in range(section.num_heads):
            slab, at = next(own), layout.starts[number] + head * nbytes
            yield OwnHead(slab, spills.get(slab.number), at, nbytes, section.head_packing)


def check_sums(slabs: Sequence[OwnSlab], data: memoryview, found: Footer) -> None:
    """Compare slabs that were read with the row's footer.

    Raises:
        RowDamaged: naming the first that differs.
        RowLocked: they are encrypted.
    """
    if found.seals is not None:
        raise RowLocked("encrypted, and there is no key")
    sums = found.checksums
    wrong = [
        slab.number
        for slab in slabs
        if checksum(data[slab.offset : slab.offset + slab.nbytes]) != sums[slab.number]
    ]
    if wrong:
        raise RowDamaged(f"checksums of {len(wrong)} slabs differ, the first is slab {wrong[0]}")


def ranges_of(runs: Sequence[Run], data: memoryview) -> list[tuple[int, memoryview]]:
    """The ranges of a row that are these runs of a share."""
    return [(at, data[start : start + nbytes]) for at, start, nbytes in runs]


def joined_runs(slabs: Sequence[OwnSlab]) -> tuple[Run, ...]:
    """The ranges of ``slabs`` and their padding, where both row and share continue joined."""
    runs: list[Run] = []
    for slab in slabs:
        nbytes = aligned(slab.nbytes)
        if runs:
            at, start, length = runs[-1]
            if (at + length, start + length) == (slab.row_offset, slab.offset):
                runs[-1] = (at, start, length + nbytes)
                continue
        runs.append((slab.row_offset, slab.offset, nbytes))
    return tuple(runs)


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """Rows of one kind as this rank sees them."""

    share: RowShare
    pairing: RowPairing


@dataclass(frozen=True, slots=True, eq=False)
class OpenedRank:
    """One rank's part of an open store.  A kind is absent where the model has none of it.

    Attributes:
        unsaved: layers that are in rows of no kind.
    """

    rank: int
    writer: str
    kinds: dict[RowKind, OwnRows]
    unsaved: Pairing | None

    @classmethod
    def from_opening(
        cls, opening: OpenStore, references: KVCacheReferences, rank: int
    ) -> OpenedRank:
        """Match this rank's memory with the engine's rows.

        Raises:
            FormatError: they do not fit.
            Incompatible: the share is of other memory.
        """
        ours = share_layout([references], opening.layout.block_tokens)
        kinds = {}
        for kind, whole in ((RowKind.FA, opening.layout.fa), (RowKind.WA, opening.layout.wa)):
            if whole is None:
                continue
            has_some = kind is RowKind.FA or ours.wa is not None
            layout = ours.for_kind(kind) if has_some else RowLayout(kind, whole.block_tokens, ())
            share = RowShare.from_layouts(whole, layout, opening.replicas[rank])
            kinds[kind] = OwnRows(share, RowPairing(references, layout))
        unsaved = unsaved_layers(references, (ours.fa, *filter(None, (ours.wa,))))
        return cls(rank, opening.writer, kinds, unsaved)

    def gaps_of_load(self, need: Need) -> Iterator[Gaps]:
        """What rows leave of the blocks of a load, to be zeroed, as vLLM zeroes none of them.

        Raises:
            BlockOutOfRange: a block id beyond the cache.
        """
        for own in self.kinds.values():
            yield from own.pairing.gaps_of_load(need)
        if self.unsaved is not None:
            yield self.unsaved.whole_blocks(need)

    @property
    def most_nbytes(self) -> int:
        """Bytes of a share of the larger kind."""
        return max(rows.share.nbytes for rows in self.kinds.values())

    @property
    def most_stored_nbytes(self) -> int:
        """Bytes of a share of the larger kind, as it is stored."""
        return max(rows.share.stored_nbytes for rows in self.kinds.values())

    @property
    def is_packed(self) -> bool:
        """Whether rows are packed."""
        return any(rows.share.whole.packing is not Packing.NONE for rows in self.kinds.values())

    @property
    def most_footer_nbytes(self) -> int:
        """Bytes of a footer of the larger kind."""
        return max(rows.share.most_footer_nbytes for rows in self.kinds.values())
