"""One block of a group as pieces of memory, in address order, gaps left out.

A *cell* is a piece of one layer and head that lies in one run of addresses::

    address   0x000 .. 0x040   0x900 .. 0x940      a layout with layers outermost
    cells     | L0 h0 | L0 h1 | L1 h0 | L1 h1 |
    strip     0      32      64      96     128    bytes without the gaps

A model has too many of them for a picture, and they are alike.  So a *selection* names layers,
heads and rows, the first ones and the last one of each, and a strip shows their cells, with a break
at omitted ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from registration.references import KVCacheDataReference, KVCacheReferences

MOST_CELLS = 48
"""Maximum cells of a selection: at a width of 24 pixels they fill the picture."""
_MOST_ROWS = 4

_T = TypeVar("_T")
RowKey = tuple[int, int]
"""A chunk of a layer, and a row of tokens in it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Bytes ``[start, end)`` of block 0; ``head`` counts in the whole model."""

    start: int
    end: int
    layer: str
    head: int


@dataclass(frozen=True, slots=True)
class Strip:
    """Cells in address order.

    ``breaks[i]``: cells are omitted before cell ``i``; one entry more than cells, for the end.
    """

    cells: tuple[Cell, ...]
    breaks: tuple[bool, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the cells."""
        return sum(cell.end - cell.start for cell in self.cells)


@dataclass(frozen=True, slots=True)
class Selection:
    """The shown layers, heads and rows, and the totals.

    ``layers`` are all names in order, of which ``layer_places`` are shown, and so on.
    """

    layers: tuple[str, ...]
    heads: tuple[int, ...]
    rows: tuple[RowKey, ...]
    layer_places: tuple[int, ...]
    head_places: tuple[int, ...]
    row_places: tuple[int, ...]

    @classmethod
    def of_group(cls, references: KVCacheReferences, group: int, most: int) -> Selection:
        """A selection of up to ``most`` layers and as many heads, ``MOST_CELLS`` in all."""
        data = references.groups[group].data
        layers = tuple(dict.fromkeys(ref.layer for ref in data))
        heads = tuple(sorted({head for ref in data for head in _heads(ref)}))
        rows = _rows(data)
        counts = _grown((len(layers), len(heads), len(rows)), (most, most, _MOST_ROWS))
        places = [
            _first_and_last(len(every), count)
            for every, count in zip((layers, heads, rows), counts, strict=True)
        ]
        return cls(layers, heads, rows, *places)

    def strip(self, references: KVCacheReferences, group: int) -> Strip:
        """The selected cells in one group of a rank, which may have other heads and rows.

        One head outside the selection is shown too, if the rank has any: it is not read.
        """
        data = references.groups[group].data
        layers = tuple(dict.fromkeys(ref.layer for ref in data))
        heads = tuple(sorted({head for ref in data for head in _heads(ref)}))
        rows = _rows(data)
        row_places = _first_and_last(len(rows), _MOST_ROWS)
        if len(rows) == len(self.rows):
            row_places = self.row_places
        shown_layers = {self.layers[place] for place in self.layer_places}
        shown_heads = {self.heads[place] for place in self.head_places}
        if shown_heads & set(heads):
            shown_heads |= set([head for head in heads if head not in self.heads][:1])
        shown_rows = {rows[place] for place in row_places}
        # With their neighbours, since omitted cells begin with one of those.
        near = (
            _with_neighbours(layers, shown_layers),
            _with_neighbours(heads, shown_heads),
            _with_neighbours(rows, shown_rows),
        )
        found = []
        for number, ref in _numbered(data):
            base = references.tensors[ref.tensor].base + ref.offset
            for head in near[1] & {*_heads(ref)} if ref.layer in near[0] else ():
                for key in near[2]:
                    if key[0] == number and key[1] < _num_pieces(ref):
                        shown = (
                            ref.layer in shown_layers and head in shown_heads and key in shown_rows
                        )
                        found.append((_cell(base, ref, head, key[1]), shown))
        found.sort(key=lambda one: one[0].start)
        return _joined(found)


def _joined(found: Sequence[tuple[Cell, bool]]) -> Strip:
    cells: list[Cell] = []
    breaks: list[bool] = []
    left_out = False
    for cell, shown in found:
        if not shown:
            left_out = True
            continue
        last = cells[-1] if cells else None
        if last and (last.end, last.layer, last.head) == (cell.start, cell.layer, cell.head):
            cells[-1] = Cell(last.start, cell.end, cell.layer, cell.head)
        else:
            cells.append(cell)
            breaks.append(left_out)
        left_out = False
    return Strip(tuple(cells), (*breaks, left_out and bool(cells)))


def _grown(sizes: Sequence[int], most: Sequence[int]) -> list[int]:
    """Numbers to show: increased in turn while the product is small enough.

    >>> _grown((80, 8, 1), (8, 8, 4))
    [6, 8, 1]
    """
    counts = [1] * len(sizes)
    grows = True
    while grows:
        grows = False
        for place in reversed(range(len(sizes))):
            tried = [count + (number == place) for number, count in enumerate(counts)]
            product = 1
            for count in tried:
                product *= count
            if tried[place] <= min(sizes[place], most[place]) and product <= MOST_CELLS:
                counts, grows = tried, True
    return counts


def _first_and_last(size: int, count: int) -> tuple[int, ...]:
    """The first ``count - 1`` places and the last one.

    >>> _first_and_last(80, 4)
    (0, 1, 2, 79)
    """
    return (*range(min(size, count) - 1), size - 1) if size else ()


def _with_neighbours(every: Sequence[_T], shown: set[_T]) -> set[_T]:
    """The shown items, with the ones before and after each.

    >>> sorted(_with_neighbours("abcdef", {"a", "e"}))
    ['a', 'b', 'd', 'e', 'f']
    """
    places = {at for at, one in enumerate(every) if one in shown}
    return {one for at, one in enumerate(every) if places & {at - 1, at, at + 1}}


def _numbered(data: Sequence[KVCacheDataReference]) -> list[tuple[int, KVCacheDataReference]]:
    """Each reference with its number among those of its layer."""
    seen: dict[str, int] = {}
    made = []
    for ref in data:
        number = seen[ref.layer] = seen.get(ref.layer, -1) + 1
        made.append((number, ref))
    return made


def _heads(ref: KVCacheDataReference) -> range:
    return range(ref.first_head, ref.first_head + ref.num_heads)


def _num_pieces(ref: KVCacheDataReference) -> int:
    """Pieces of a head: one if its rows are contiguous."""
    apart = (ref.token_stride or 0) != (ref.token_nbytes or ref.head_nbytes)
    return (ref.num_rows or 1) if apart else 1


def _rows(data: Sequence[KVCacheDataReference]) -> tuple[RowKey, ...]:
    """All rows of the layer with the most."""
    most: dict[int, int] = {}
    for number, ref in _numbered(data):
        most[number] = max(most.get(number, 0), _num_pieces(ref))
    return tuple((number, row) for number, rows in sorted(most.items()) for row in range(rows))


def _cell(base: int, ref: KVCacheDataReference, head: int, row: int) -> Cell:
    nbytes = ref.token_nbytes or ref.head_nbytes
    step = ref.token_stride or 0
    if step == nbytes:
        nbytes = ref.head_nbytes
    first = base + (head - ref.first_head) * ref.head_stride + row * step
    return Cell(first, first + nbytes, ref.layer, head)
