"""One rank's share of rows: which of a row's slabs are its own, and whether they are whole.

A row holds the slabs of all heads and layers, a share those of one rank, in the same order and
each from a page of its own.  Neighbours in both are one run, so that with equal layers a rank
reads one range of the file::

    row     | h0 | h1 | h2 | h3 |  | h0 | h1 | footer
    share             | h2 | h3 |       | h1 |           2 runs, and the footer

Every rank reads the footer too and verifies its own slabs against it.  Where several ranks hold
the same heads, they divide the rows among themselves when they save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np
from numpy.typing import NDArray

from pdconn.planning.gaps import Gaps
from pdconn.planning.plan import Need, Pairing
from pdconn.store.commands import OpenStore
from pdconn.store.errors import FormatError, RowDamaged
from pdconn.store.format.footer import checksum, decode_footer, footer_nbytes
from pdconn.store.format.layout import RowLayout, aligned, share_layout
from pdconn.store.format.names import RowKind, RowName
from pdconn.store.rank.pairing import RowPairing, unsaved_layers
from registration.references import KVCacheReferences

I64 = NDArray[np.int64]

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
    """

    number: int
    row_offset: int
    offset: int
    nbytes: int
    replica: int
    replicas: int

    def is_written(self, index: int) -> bool:
        """Whether this rank saves the slab of row ``index``."""
        return index % self.replicas == self.replica


@dataclass(frozen=True, eq=False)
class RowShare:
    """A rank's slabs of rows of one kind, in order.

    Attributes:
        whole: the layout of the whole row.
        layout: the layout of the share alone, as it lies in staging.
    """

    whole: RowLayout
    layout: RowLayout
    slabs: tuple[OwnSlab, ...]

    @classmethod
    def of(cls, whole: RowLayout, layout: RowLayout, replicas: Replicas) -> RowShare:
        """Find a share's slabs in the whole row.

        Raises:
            FormatError: a slab that the row does not have, or has with another size, or a
                layer that ``replicas`` does not name.
        """
        there = {(slab.layer, slab.chunk, slab.head): n for n, slab in enumerate(whole.slabs)}
        found = []
        for slab in layout.slabs:
            where = f"{whole.kind} slab of {slab.layer}, chunk {slab.chunk}, head {slab.head}"
            number = there.get((slab.layer, slab.chunk, slab.head))
            if number is None:
                raise FormatError(where, "one of the row's", "none such in the row")
            in_row = whole.slabs[number]
            if in_row.nbytes != slab.nbytes:
                raise FormatError(f"{where}: bytes", in_row.nbytes, slab.nbytes)
            if (slab.layer, slab.chunk) not in replicas:
                raise FormatError(f"{where}: replicas", "an entry", "none")
            which = replicas[slab.layer, slab.chunk]
            found.append(OwnSlab(number, in_row.offset, slab.offset, slab.nbytes, *which))
        return cls(whole, layout, tuple(found))

    @cached_property
    def nbytes(self) -> int:
        """Bytes that a row takes in staging: whole pages."""
        return aligned(self.layout.data_nbytes)

    @cached_property
    def footer_nbytes(self) -> int:
        """Bytes of a row's footer, which follows its data."""
        return footer_nbytes(len(self.whole.slabs))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The ranges to read, neighbours joined."""
        return joined_runs(self.slabs)

    @cached_property
    def _numbers(self) -> I64:
        return np.array([slab.number for slab in self.slabs], dtype=np.int64)

    @cached_property
    def _bounds(self) -> tuple[slice, ...]:
        return tuple(slice(slab.offset, slab.offset + slab.nbytes) for slab in self.slabs)

    def ranges(self, data: memoryview, footer: memoryview) -> list[tuple[int, memoryview]]:
        """What to read of a row: our runs into ``data`` (a share), the footer into ``footer``."""
        made = [(at, data[start : start + nbytes]) for at, start, nbytes in self.runs]
        made.append((self.whole.data_nbytes, footer))
        return made

    def check(self, data: memoryview, footer: memoryview, namespace: str, name: RowName) -> None:
        """Compare the bytes read with what the row says that they are.

        Raises:
            RowDamaged: naming what differs.
        """
        said = decode_footer(footer)
        for field, expected, seen in (
            ("namespace", namespace, said.namespace),
            ("name", name, said.name),
            ("data_nbytes", self.whole.data_nbytes, said.data_nbytes),
            ("slabs", len(self.whole.slabs), len(said.checksums)),
        ):
            if expected != seen:
                raise RowDamaged(f"footer: {field}: expected {expected}, got {seen}")
        sums = np.array([checksum(data[at]) for at in self._bounds], dtype=np.uint64)
        wrong = np.flatnonzero(sums != said.checksums[self._numbers])
        if len(wrong):
            first = self.slabs[int(wrong[0])].number
            raise RowDamaged(f"checksums of {len(wrong)} slabs differ, the first is slab {first}")

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
    def of(cls, opening: OpenStore, references: KVCacheReferences, rank: int) -> OpenedRank:
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
            layout = ours.of(kind) if has_some else RowLayout(kind, whole.block_tokens, ())
            share = RowShare.of(whole, layout, opening.replicas[rank])
            kinds[kind] = OwnRows(share, RowPairing(references, layout))
        unsaved = unsaved_layers(references, (ours.fa, *filter(None, (ours.wa,))))
        return cls(rank, opening.writer, kinds, unsaved)

    def gaps(self, need: Need) -> Iterator[Gaps]:
        """What rows leave of the blocks of a load: vLLM zeroes no block that a connector loads.

        Raises:
            BlockOutOfRange: a block id beyond the cache.
        """
        for own in self.kinds.values():
            yield from own.pairing.gaps(need)
        if self.unsaved is not None:
            yield self.unsaved.whole_blocks(need)

    @property
    def most_nbytes(self) -> int:
        """Bytes of a share of the larger kind."""
        return max(rows.share.nbytes for rows in self.kinds.values())

    @property
    def most_footer_nbytes(self) -> int:
        """Bytes of a footer of the larger kind."""
        return max(rows.share.footer_nbytes for rows in self.kinds.values())
