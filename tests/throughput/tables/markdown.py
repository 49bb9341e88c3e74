"""Tables and numbers as the README writes them, and the line under each table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.throughput.tables.record import Record

Rows = Sequence[Sequence[str]]


def table(headings: Sequence[str], rows: Rows) -> str:
    """A Markdown table.

    >>> print(table(["", "ms"], [["plan", "1.2"]]))
    | | ms |
    |---|---|
    | plan | 1.2 |
    """
    lines = [_line(headings), "|" + "---|" * len(headings)]
    for row in rows:
        assert len(row) == len(headings), f"{len(row)} cells under {len(headings)} headings"
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return "".join(f"| {cell} " if cell else "| " for cell in escaped) + "|"


def spaced(number: int) -> str:
    """A whole number in groups of three.

    >>> spaced(131072)
    '131 072'
    """
    return f"{number:,}".replace(",", " ")


def digits(number: float, count: int = 3) -> str:
    """So many digits that count, and all before the point.

    >>> digits(0.01234), digits(4.0), digits(99.96), digits(28388.4)
    ('0.0123', '4.00', '100', '28 388')
    """
    if number == 0:
        return "0"
    rounded = float(f"{number:.{count - 1}e}")
    places = max(0, count - 1 - math.floor(math.log10(abs(rounded))))
    return spaced(round(number)) if places == 0 else f"{number:.{places}f}"


def ms(seconds: float) -> str:
    """Seconds as milliseconds.

    >>> ms(0.0271)
    '27.1'
    """
    return digits(1000 * seconds)


def percent(part: float) -> str:
    """A part of one.

    >>> percent(0.7061)
    '70.6 %'
    """
    return f"{100 * part:.1f} %"


def made_by(record: Record, packages: Sequence[str] = ()) -> str:
    """What was run, when, on what, with which versions of ``packages``."""
    commands = ", ".join(f"`{run.command}`" for run in record.runs.values())
    known = [f"{name} {record.versions[name]}" for name in packages if name in record.versions]
    python = record.versions.get("python", "of unknown version")
    where = [*map(str, record.machine.values()), f"Python {python}", *known]
    return f"{commands}; {record.measured_at[:10]}, {', '.join(where)}."
