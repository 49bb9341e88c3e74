"""Draws a pairing as SVG: a block on each side, and the runs between them.

The upper row is a block of every prefill rank that one decode rank reads from, the lower
row a block of that decode rank::

    prefill rank 0          prefill rank 1
    layer 0  layer 1 ⋯      layer 0  layer 1 ⋯      brackets: what lies outermost
    |h0|h1|  |h0|h1| ⋯      |h2|h3|  |h2|h3| ⋯      cells: a head of a layer
      \\  \\                                          bands: one run each
    |h0|h1|h2|h3|  ...  ⋯

Few wide bands are fast, many narrow ones slow.  Of many layers, heads and rows the first ones and
the last one are drawn, and a note gives the totals.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

import numpy as np

from pdconn.planning.plan import Pairing
from pdconn.planning.template import Template
from pdconn.tools.plan.drawing.cells import Cell, Selection, Strip
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.plan_errors import ShapeError
from registration.references import KVCacheReferences

_WIDTH, _MARGIN, _GAP, _BREAK = 1200.0, 24.0, 12.0, 20.0
_ROW, _BETWEEN, _LINE = 44.0, 180.0, 18.0
_MOST_SOURCES = 8
_MOST_LINES = 3
_LETTER = 7.0
"""Width in pixels of the widest common letter at 12 pixels, to estimate what fits."""
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1b1f27}.title{font-weight:bold;font-size:16px}"
    ".faint{fill:#5c6472}.mid{text-anchor:middle}.in{fill:#1b1f27;font-size:11px}.out{font-size:11px}"
    ".ground{fill:#fff}.run{fill-opacity:.5;stroke:#555;stroke-opacity:.4;stroke-width:.5}"
    ".cell{stroke:#fff;stroke-width:1}.unread{fill-opacity:.3}.bracket{fill:none;stroke:#8a92a0}"
    "@media(prefers-color-scheme:dark){text{fill:#e5e8ee}.faint{fill:#a3abba}"
    ".in{fill:#1b1f27}.ground{fill:#1a1e26}.cell{stroke:#1a1e26}}"
)


@dataclass(frozen=True, slots=True)
class _Row:
    """One rank's strip, drawn from ``left`` with ``scale`` pixels per byte."""

    strip: Strip
    names: tuple[str, ...]
    left: float
    top: float
    scale: float

    def spans(self) -> Iterator[tuple[Cell, float, float]]:
        """Each cell with its left and right edge in pixels."""
        at = self.left
        for cell, breaks in zip(self.strip.cells, self.strip.breaks, strict=False):
            at += _BREAK * breaks
            width = (cell.end - cell.start) * self.scale
            yield cell, at, at + width
            at += width

    @property
    def width(self) -> float:
        """The width in pixels."""
        return self.strip.nbytes * self.scale + _BREAK * sum(self.strip.breaks)


def draw(prefill: EngineShape, decode: EngineShape, group: int, rank: int = 0) -> str:
    """The picture of one group of one decode rank, as a whole SVG document.

    Args:
        group: a KV cache group of decode.
        rank: the decode rank that pulls.

    Raises:
        ShapeError: a group or a rank that decode does not have.
        Incompatible: the two engines cannot exchange KV.
    """
    for field, value, count in (
        ("group", group, len(decode.groups)),
        ("rank", rank, decode.ranks),
    ):
        if not 0 <= value < count:
            raise ShapeError(field, f"0 to {count - 1}", value)
    ours, theirs = decode.references(2)[rank], prefill.references(2)
    pairing = Pairing.between(ours, theirs, rank % decode.tp)
    templates = [template for template in pairing.templates if template.our_group == group]
    titles = _wrapped(
        f"{decode.model.name}, KV cache group {group} of decode: {_what(decode, group)}"
    )
    heads = [_Text(line, "title") for line in titles]
    heads += [
        _Text(line, "faint") for line in _wrapped(f"prefill {prefill}   to   decode {decode}")
    ]
    if not templates:
        return _document([*heads, _Text("this rank holds no layer of the group")], [], 0.0, [])
    selection, sources = _selected(ours, theirs, templates)
    top = _MARGIN + _LINE * len(heads) + 3.5 * _LINE
    upper = _side_by_side([strip for _, strip in sources], [_names(t) for t, _ in sources], top)
    (lower,) = _side_by_side(
        [selection.strip(ours, group)], [(f"decode rank {rank}",)], top + _ROW + _BETWEEN
    )
    colours = _colours(lower.strip.cells)
    bands = [
        band
        for (template, _), row in zip(sources, upper, strict=True)
        for band in _bands(template, row, lower, colours)
    ]
    shapes = [*bands]
    for row, above in [*((row, True) for row in upper), (lower, False)]:
        shapes += [*_cells(row, colours, selection.heads), *_labels(row, above, selection.heads)]
    bottom = lower.top + _ROW + 3 * _LINE
    notes = _notes(templates, selection, len(bands), len(sources))
    if any(cell.head not in selection.heads for row in upper for cell in row.strip.cells):
        notes.append("pale: another head of that rank, which this decode rank does not read")
    if any(any(row.strip.breaks) for row in (*upper, lower)):
        notes.append("⋯ stands for more of the same")
    return _document(
        heads, shapes, bottom, [_Text(line) for note in notes for line in _wrapped(note)]
    )


def _what(engine: EngineShape, group: int) -> str:
    """The kind, window and block of a group.

    >>> from pdconn.tools.plan.shapes import built_in
    >>> _what(EngineShape(built_in("gpt-oss-20b")), 0)
    'sliding window of 128, blocks of 16 tokens'
    """
    one = engine.groups[group]
    kind = str(one.kind).replace("_", " ")
    window = f" of {one.window}" if one.window else ""
    return f"{kind}{window}, blocks of {one.block_tokens} tokens"


def _names(template: Template) -> tuple[str, ...]:
    """A rank's name, in decreasing length."""
    rank = template.their_rank
    return f"prefill rank {rank}", f"rank {rank}", str(rank)


def _selected(
    ours: KVCacheReferences, theirs: Sequence[KVCacheReferences], templates: Sequence[Template]
) -> tuple[Selection, list[tuple[Template, Strip]]]:
    """The selection, and the shown sources; a larger one if there are few sources."""
    for most in (8, 4, 2, 1):
        selection = Selection.of_group(ours, templates[0].our_group, most)
        strips = [(t, selection.strip(theirs[t.their_rank], t.their_group)) for t in templates]
        sources = [one for one in strips if one[1].cells]
        if len(sources) <= _MOST_SOURCES:
            break
    return selection, sources


def _side_by_side(
    strips: Sequence[Strip], names: Sequence[tuple[str, ...]], top: float
) -> list[_Row]:
    """Strips side by side across the picture, at one scale."""
    breaks = sum(sum(strip.breaks) for strip in strips)
    room = _WIDTH - 2 * _MARGIN - _GAP * (len(strips) - 1) - _BREAK * breaks
    scale = room / max(1, sum(strip.nbytes for strip in strips))
    rows, left = [], _MARGIN
    for strip, named in zip(strips, names, strict=True):
        rows.append(_Row(strip, named, left, top, scale))
        left += rows[-1].width + _GAP
    return rows


def _colours(cells: Sequence[Cell]) -> dict[str, str]:
    """A hue for every shown layer, in memory order."""
    layers = list(dict.fromkeys(cell.layer for cell in cells))
    step = 330 / max(1, len(layers))
    return {layer: f"hsl({210 + index * step:.0f},62%,70%)" for index, layer in enumerate(layers)}


def _bands(template: Template, source: _Row, target: _Row, colours: dict[str, str]) -> list[str]:
    """A band for each run of the template with both ends shown, clipped to what is shown."""
    made = []
    upper, lower = source.top + _ROW, target.top
    middle = (upper + lower) / 2
    ours, nbytes = template.ours.start, template.nbytes
    near = np.zeros(len(nbytes), dtype=bool)
    for cell in target.strip.cells:
        near |= (ours < cell.end) & (ours + nbytes > cell.start)
    for run in np.flatnonzero(near):
        start, size = int(ours[run]), int(nbytes[run])
        here = _overlaps(target, start, size)
        there = _overlaps(source, int(template.theirs.start[run]), size)
        both = sorted(
            (max(a[0], b[0]), min(a[1], b[1]))
            for a in there for b in here if max(a[0], b[0]) < min(a[1], b[1])
        )  # fmt: skip
        if not both:
            continue
        first, last = both[0][0], both[-1][1]
        a, b = _x(there, first, source.scale), _x(there, last, source.scale)
        c, d = _x(here, first, target.scale), _x(here, last, target.scale)
        layers = {layer for _, _, _, layer in here}
        colour = colours[layers.pop()] if len(layers) == 1 else "#9aa3b2"
        path = (
            f"M{a:.2f},{upper:g} C{a:.2f},{middle:g} {c:.2f},{middle:g} {c:.2f},{lower:g} "
            f"L{d:.2f},{lower:g} C{d:.2f},{middle:g} {b:.2f},{middle:g} {b:.2f},{upper:g} Z"
        )
        made.append(
            f'<path class="run" d="{path}" fill="{colour}"><title>{size:,} bytes</title></path>'
        )
    return made


_Overlap = tuple[int, int, float, str]


def _overlaps(row: _Row, start: int, nbytes: int) -> list[_Overlap]:
    """The shown parts of a run, each as: first and last byte of the run, x, layer."""
    return [
        (
            first := max(cell.start, start) - start,
            min(cell.end, start + nbytes) - start,
            left + (first + start - cell.start) * row.scale,
            cell.layer,
        )
        for cell, left, _ in row.spans()
        if cell.start < start + nbytes and cell.end > start
    ]


def _x(parts: Sequence[_Overlap], offset: int, scale: float) -> float:
    """The x position of byte ``offset`` of a run, or of its end."""
    begin, _, left, _ = next(one for one in parts if one[0] <= offset <= one[1])
    return left + (offset - begin) * scale


def _cells(row: _Row, colours: dict[str, str], read: Container[int]) -> Iterator[str]:
    """A box with a tooltip for every cell, faint if it is not read; dots for every break."""
    edges = [row.left]
    for cell, left, right in row.spans():
        unread = "" if cell.head in read else ", not read"
        tip = f"{cell.layer} head {cell.head}: {cell.end - cell.start:,} bytes{unread}"
        yield (
            f'<rect class="cell{" unread" * bool(unread)}" x="{left:.2f}" y="{row.top:g}" '
            f'width="{right - left:.2f}" height="{_ROW:g}" '
            f'fill="{colours.get(cell.layer, "lightgrey")}"><title>{escape(tip)}</title></rect>'
        )
        edges.append(right)
    for edge, breaks in zip(edges, row.strip.breaks, strict=True):
        if breaks:
            yield _Text("⋯", "mid faint").svg_at(edge + _BREAK / 2, row.top + _ROW / 2 + 4)


def _labels(row: _Row, above: bool, read: Container[int]) -> Iterator[str]:
    """The rank's name, brackets around the outermost dimension, and the others in the cells."""
    edge = row.top - 6 if above else row.top + _ROW + 6
    line = -_LINE if above else _LINE
    name = _fitting(row.width + _GAP, row.names)
    yield _Text(name).svg_at(row.left, edge + (2 * line + 4 if above else 2 * line + 6))
    by_layer = [[*parts] for _, parts in groupby(row.spans(), key=lambda one: one[0].layer)]
    by_head = [[*parts] for _, parts in groupby(row.spans(), key=lambda one: one[0].head)]
    layers_outside = len(by_layer) <= len(by_head)
    for parts in by_layer if layers_outside else by_head:
        cell, left, right = parts[0][0], parts[0][1], parts[-1][2]
        drop = 4 if above else -4
        yield (
            f'<path class="bracket" d="M{left + 1:.2f},{edge + drop:g} V{edge:g} '
            f'H{right - 1:.2f} V{edge + drop:g}"/>'
        )
        words: tuple[str, ...] = (
            _layer(cell) if layers_outside else (f"head {cell.head}", f"h{cell.head}")
        )
        label = _fitting(right - left, words)
        middle = (left + right) / 2
        yield _Text(label, "mid").svg_at(middle, edge + (line / 2 + 4 if above else line - 3))
        for inner, begin, end in parts:
            words = (f"h{inner.head}",) if layers_outside else _layer(inner)[1:]
            label, kind = _fitting(end - begin, words), "in" if inner.head in read else "out"
            yield _Text(label, f"mid {kind}").svg_at((begin + end) / 2, row.top + _ROW / 2 + 4)


def _layer(cell: Cell) -> tuple[str, str]:
    """A layer's name, long and short.

    >>> _layer(Cell(0, 1, "layers.12.attn", 0))
    ('layer 12', 'L12')
    """
    number = cell.layer.split(".")[1]
    return f"layer {number}", f"L{number}"


def _fitting(width: float, words: Sequence[str]) -> str:
    """The first word that fits; empty if none does."""
    return next((one for one in words if len(one) * _LETTER <= width), "")


def _notes(
    templates: Sequence[Template], selection: Selection, num_bands: int, num_sources: int
) -> list[str]:
    """Lines below the picture: what it shows and omits."""
    runs = sum(len(template.nbytes) for template in templates)
    first = templates[0]
    nbytes = sum(template.sub_block_nbytes for template in templates)
    plural = "" if runs == 1 else "s"
    notes = [
        f"{runs:,} run{plural} move{'s' * (runs == 1)} {nbytes:,} bytes of "
        f"{first.sub_block_tokens} tokens: {_size(nbytes / runs)} a run on average"
    ]
    if first.ours.block_tokens != first.theirs.block_tokens:
        notes.append(
            f"blocks of {first.theirs.block_tokens} and {first.ours.block_tokens} tokens: "
            f"runs of the first {first.sub_block_tokens} tokens only"
        )
    shares = [
        f"{len(places)} of {len(every):,} {what}"
        for what, every, places in (
            ("layers", selection.layers, selection.layer_places),
            ("heads", selection.heads, selection.head_places),
            ("pieces of each", selection.rows, selection.row_places),
        )
        if len(places) < len(every)
    ]
    if num_sources < len(templates):
        shares.append(f"{num_sources} of {len(templates)} prefill ranks")
    if num_bands < runs:
        shares.append(f"{num_bands:,} of {runs:,} runs")
    if shares:
        notes.append(f"drawn are {', '.join(shares)}")
    return notes


def _size(nbytes: float) -> str:
    """Bytes, in KiB if large enough.

    >>> _size(256), _size(8192)
    ('256 bytes', '8.0 KiB')
    """
    return f"{nbytes:,.0f} bytes" if nbytes < 1024 else f"{nbytes / 1024:,.1f} KiB"


def _wrapped(words: str) -> list[str]:
    """Up to three lines that fit the picture; longer text is truncated."""
    most = int((_WIDTH - 2 * _MARGIN) / (_LETTER * 1.5))
    lines = [""]
    for word in words.split(" "):
        short = word if len(word) <= most else f"{word[: most - 1]}…"
        if len(lines[-1]) + 1 + len(short) > most:
            lines.append(short)
        else:
            lines[-1] = f"{lines[-1]} {short}" if lines[-1] else short
    return lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES - 1], "…"]


@dataclass(frozen=True, slots=True)
class _Text:
    """A line of text, and its class in the style."""

    words: str
    kind: str = ""

    def svg_at(self, x: float, y: float) -> str:
        """The text as SVG; empty without words."""
        name = f' class="{self.kind}"' if self.kind else ""
        if not self.words:
            return ""
        return f'<text x="{x:.2f}" y="{y:.2f}"{name}>{escape(self.words)}</text>'


def _document(
    heads: Sequence[_Text], shapes: Sequence[str], bottom: float, notes: Sequence[_Text]
) -> str:
    """The whole document, as high as its contents."""
    above = [one.svg_at(_MARGIN, _MARGIN + 8 + _LINE * line) for line, one in enumerate(heads)]
    first = max(bottom + _LINE, 2 * _MARGIN + _LINE * len(heads))
    below = [one.svg_at(_MARGIN, first + _LINE * line) for line, one in enumerate(notes)]
    height = first + _LINE * max(0, len(notes) - 1) + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
            f'width="{_WIDTH:g}" height="{height:g}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="ground" width="{_WIDTH:g}" height="{height:g}"/>',
            *above,
            *filter(None, shapes),
            *below,
            "</svg>",
            "",
        ]
    )
