"""One block of a group as pieces of memory, in address order, gaps left out.

A *cell* is a piece of one layer and head that lies in one run of addresses::

    address   0x000 .. 0x040   0x900 .. 0x940      a layout with layers outermost
    cells     | L0 h0 | L0 h1 | L1 h0 | L1 h1 |
    strip     0      32      64      96     128    bytes without the gaps

A *strip* is what one row of the picture shows: pieces beyond ``most`` are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from registration.references import KVCacheDataReference, KVCacheReferences


@dataclass(frozen=True, slots=True)
class Cell:
    """Bytes ``[start, end)`` of block 0; ``head`` counts in the whole model."""

    start: int
    end: int
    layer: str
    head: int


@dataclass(frozen=True, slots=True)
class Strip:
    """Cells that are shown, each at ``at[i]`` bytes along the strip, and the number of others."""

    cells: tuple[Cell, ...]
    at: tuple[int, ...]
    left_out: int

    @property
    def nbytes(self) -> int:
        """Bytes shown."""
        return self.at[-1] + self.cells[-1].end - self.cells[-1].start if self.cells else 0

    def place(self, start: int, nbytes: int) -> tuple[int, int] | None:
        """Where the run of addresses lies along the strip; None beyond its end."""
        index = bisect_right(self.cells, start, key=lambda cell: cell.start) - 1
        if index < 0 or start >= self.cells[index].end:
            return None
        first = self.at[index] + start - self.cells[index].start
        return (first, first + nbytes) if first + nbytes <= self.nbytes else None


def strip_of(references: KVCacheReferences, group: int, most: int) -> Strip:
    """The cells of block 0 of one group on one rank, up to ``most`` of them."""
    pieces = sorted(
        (
            cell
            for ref in references.groups[group].data
            for cell in _pieces(references.tensors[ref.tensor].base, ref)
        ),
        key=lambda cell: cell.start,
    )
    merged: list[Cell] = []
    for cell in pieces:
        last = merged[-1] if merged else None
        if last and (last.end, last.layer, last.head) == (cell.start, cell.layer, cell.head):
            merged[-1] = Cell(last.start, cell.end, cell.layer, cell.head)
        else:
            merged.append(cell)
    shown = merged[:most]
    at, along = [], 0
    for cell in shown:
        at.append(along)
        along += cell.end - cell.start
    return Strip(tuple(shown), tuple(at), len(merged) - len(shown))


def _pieces(base: int, ref: KVCacheDataReference) -> list[Cell]:
    """What is contiguous: a head's block, or a row of it."""
    start = base + ref.offset
    rows, nbytes = ref.num_rows or 1, ref.token_nbytes or ref.head_nbytes
    step = ref.token_stride or 0
    if step == nbytes:
        rows, nbytes = 1, ref.head_nbytes
    return [
        Cell(first, first + nbytes, ref.layer, ref.first_head + head)
        for head in range(ref.num_heads)
        for first in (start + head * ref.head_stride + row * step for row in range(rows))
    ]
