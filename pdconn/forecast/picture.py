"""A pairing as a picture: a block on each side, and the runs between them, as SVG.

The upper row is a block of every prefill rank that one decode rank reads from, the lower
row a block of that decode rank.  A cell is a head of a layer: its width is its bytes, its
colour its layer.  A band is one run, from source to destination.  Few wide bands are fast,
many narrow ones slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from pdconn.forecast.cells import Cell, Strip, strip_of
from pdconn.forecast.engine import EngineShape
from pdconn.forecast.errors import ShapeError
from pdconn.planning.plan import Pairing
from pdconn.planning.template import Template

_WIDTH, _MARGIN, _GAP = 1200.0, 24.0, 12.0
_TOP, _ROW, _BETWEEN = 96.0, 44.0, 200.0
_HEIGHT = 452.0
_LABEL_WIDTH = 42.0
_MOST_CELLS = 1024
_MOST_BANDS = 2048


@dataclass(frozen=True, slots=True)
class _Row:
    """One rank's strip, drawn from ``left`` on with ``scale`` pixels a byte."""

    strip: Strip
    title: str
    left: float
    top: float
    scale: float

    def x(self, along: int) -> float:
        """Pixels from the left of the byte ``along`` the strip."""
        return self.left + along * self.scale


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
    pairing = Pairing.of(ours, theirs, rank % decode.tp)
    templates = [template for template in pairing.templates if template.our_group == group]
    target = strip_of(ours, group, _MOST_CELLS)
    sources = [strip_of(theirs[t.their_rank], t.their_group, _MOST_CELLS) for t in templates]
    upper = _rows(sources, [f"prefill rank {t.their_rank}" for t in templates], _TOP)
    lower = _rows([target], [f"decode rank {rank}"], _TOP + _ROW + _BETWEEN)
    colours = _colours(target.cells)
    bands = [
        band
        for template, row in zip(templates, upper, strict=True)
        for band in _bands(template, row, lower[0], colours)
    ]
    drawn = [cell for row in [*upper, *lower] for cell in _cells(row, colours)]
    notes = _notes(templates, [*sources, target], len(bands))
    return _document(
        [f"{decode.model.name}, group {group} of decode", f"{prefill}   to   {decode}"],
        [*bands[:_MOST_BANDS], *drawn],
        notes,
    )


def _rows(strips: Sequence[Strip], titles: Sequence[str], top: float) -> list[_Row]:
    """Strips side by side over the width of the picture, at one scale."""
    room = _WIDTH - 2 * _MARGIN - _GAP * max(0, len(strips) - 1)
    scale = max(room, 1.0) / max(1, sum(strip.nbytes for strip in strips))
    rows, left = [], _MARGIN
    for strip, title in zip(strips, titles, strict=True):
        rows.append(_Row(strip, title, left, top, scale))
        left += strip.nbytes * scale + _GAP
    return rows


def _colours(cells: Sequence[Cell]) -> dict[str, str]:
    """A hue for every layer, in memory order."""
    layers = list(dict.fromkeys(cell.layer for cell in cells))
    step = 360 / max(1, len(layers))
    return {layer: f"hsl({index * step:.0f},62%,62%)" for index, layer in enumerate(layers)}


def _bands(template: Template, source: _Row, target: _Row, colours: dict[str, str]) -> list[str]:
    """A band for each run of the template whose ends are both shown."""
    made = []
    upper, lower = source.top + _ROW, target.top
    middle = (upper + lower) / 2
    columns = zip(template.theirs.start, template.ours.start, template.nbytes, strict=True)
    for theirs, ours, nbytes in columns:
        there = source.strip.place(int(theirs), int(nbytes))
        here = target.strip.place(int(ours), int(nbytes))
        if there is None or here is None:
            continue
        a, b = source.x(there[0]), source.x(there[1])
        c, d = target.x(here[0]), target.x(here[1])
        colour = colours.get(_layer_at(target.strip, here[0]), "grey")
        path = (
            f"M{a:.2f},{upper:g} C{a:.2f},{middle:g} {c:.2f},{middle:g} {c:.2f},{lower:g} "
            f"L{d:.2f},{lower:g} C{d:.2f},{middle:g} {b:.2f},{middle:g} {b:.2f},{upper:g} Z"
        )
        made.append(
            f'<path class="run" d="{path}" fill="{colour}">'
            f"<title>{int(nbytes):,} bytes</title></path>"
        )
    return made


def _layer_at(strip: Strip, along: int) -> str:
    return next(
        cell.layer
        for cell, at in zip(reversed(strip.cells), reversed(strip.at), strict=True)
        if at <= along
    )


def _cells(row: _Row, colours: dict[str, str]) -> list[str]:
    """The rank's name, and a box with a tooltip for every cell; a label if it fits."""
    made = [_text(row.left, row.top - 8 if row.top == _TOP else row.top + _ROW + 16, row.title)]
    for cell, at in zip(row.strip.cells, row.strip.at, strict=True):
        width = (cell.end - cell.start) * row.scale
        tip = f"{cell.layer} head {cell.head}: {cell.end - cell.start:,} bytes"
        made.append(
            f'<rect class="cell" x="{row.x(at):.2f}" y="{row.top:g}" width="{width:.2f}" '
            f'height="{_ROW:g}" fill="{colours.get(cell.layer, "lightgrey")}">'
            f"<title>{escape(tip)}</title></rect>"
        )
        if width >= _LABEL_WIDTH:
            label = f"L{cell.layer.split('.')[1]} h{cell.head}"
            made.append(_text(row.x(at) + 4, row.top + 27, label))
    return made


def _notes(templates: Sequence[Template], strips: Sequence[Strip], drawn: int) -> list[str]:
    """Lines below the picture: what it shows, and what it leaves out."""
    runs = sum(len(template.nbytes) for template in templates)
    if not templates:
        return ["this rank holds no layer of the group"]
    first = templates[0]
    nbytes = sum(template.sub_block_nbytes for template in templates)
    notes = [f"{runs:,} runs move {nbytes:,} bytes of {first.sub_block_tokens} tokens"]
    sizes = {first.our_block_tokens, first.their_block_tokens}
    if len(sizes) > 1:
        notes.append(
            f"blocks of {first.their_block_tokens} and {first.our_block_tokens} tokens: "
            f"runs of the first {first.sub_block_tokens} tokens only"
        )
    left_out = sum(strip.left_out for strip in strips)
    shown = min(drawn, _MOST_BANDS)
    if left_out or shown < runs:
        notes.append(f"cut off: {left_out:,} cells and {runs - shown:,} runs are not shown")
    return notes


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.2f}" y="{y:.2f}"{name}>{escape(words)}</text>'


def _document(titles: Sequence[str], shapes: Sequence[str], notes: Sequence[str]) -> str:
    heads = [
        _text(_MARGIN, 28 + 22 * line, words, "title" if line == 0 else "")
        for line, words in enumerate(titles)
    ]
    feet = [_text(_MARGIN, _HEIGHT - 34 + 16 * line, words) for line, words in enumerate(notes)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" '
            f'width="{_WIDTH:g}" height="{_HEIGHT:g}">',
            "<style>text{font:12px sans-serif}.title{font:bold 16px sans-serif}"
            ".run{fill-opacity:.45;stroke:#444;stroke-opacity:.35;stroke-width:.4}"
            ".cell{stroke:#fff;stroke-width:.6}</style>",
            f'<rect width="{_WIDTH:g}" height="{_HEIGHT:g}" fill="#fff"/>',
            *heads,
            *shapes,
            *feet,
            "</svg>",
            "",
        ]
    )
