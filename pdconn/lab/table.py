"""Tables for terminals: columns of plain text, right-aligned where they are numbers."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out ``rows`` under ``headings``; a heading may have several lines.

    >>> print(table(["tokens", "pull\\nms"], [["1", "0.25"], ["3000", "1.5"]]))
              pull
    tokens      ms
    ------  ------
         1    0.25
      3000     1.5
    """
    split = [heading.split("\n") for heading in headings]
    height = max(len(lines) for lines in split)
    tops = [[""] * (height - len(lines)) + lines for lines in split]
    columns = range(len(headings))
    widths = [
        max(6, *(len(line) for line in tops[c]), *(len(row[c]) for row in rows)) for c in columns
    ]
    lines = [[tops[c][line] for c in columns] for line in range(height)]
    lines.append(["-" * width for width in widths])
    lines += [list(row) for row in rows]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
