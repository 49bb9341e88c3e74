"""Tables for terminals: columns of plain text, with numbers right-aligned."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Lay out ``rows`` under ``headings``; a heading may have several lines.

    ``width``: characters of a line.  Further columns continue below, under the first column.

    >>> print(table(["tokens", "pull\\nms"], [["1", "0.25"], ["3000", "1.5"]]))
              pull
    tokens      ms
    ------  ------
         1    0.25
      3000     1.5
    """
    widths = [
        max(_LEAST, *map(len, heading.split("\n")), *(len(row[column]) for row in rows))
        for column, heading in enumerate(headings)
    ]
    parts = _parts(widths, width)
    return "\n\n".join(
        _laid_out(
            [headings[c] for c in columns],
            [[row[c] for c in columns] for row in rows],
            [widths[c] for c in columns],
        )
        for columns in parts
    )


_LEAST = 6
_BETWEEN = "  "


def _parts(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """The columns of each part; the first column is in all of them."""
    if width is None:
        return [list(range(len(widths)))]
    parts = [[0]]
    used = widths[0]
    for column in range(1, len(widths)):
        needed = len(_BETWEEN) + widths[column]
        if used + needed > width and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0]
        parts[-1].append(column)
        used += needed
    return parts


def _laid_out(headings: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    split = [heading.split("\n") for heading in headings]
    height = max(len(lines) for lines in split)
    tops = [[""] * (height - len(lines)) + lines for lines in split]
    lines = [[top[line] for top in tops] for line in range(height)]
    lines.append(["-" * width for width in widths])
    lines += [list(row) for row in rows]
    return "\n".join(
        _BETWEEN.join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
