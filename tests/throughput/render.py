"""The tables of ``docs/benchmarks.md``, from ``results/NAME.json``, between two lines.

::

    <!-- measured:waterfall -->
    what is here is replaced; everything else is kept, byte for byte
    <!-- /measured:waterfall -->

A table has a row for each item of a list in the result, and a column for each pair of heading
and template.  A field of a template is ``{PATH:FORMAT}``: the path starts at the row, ``a/b``
and ``a*b`` compute with numbers, and a cell with a null in it is empty.  Formats:

    ``s``     a text, or what ``Table.names`` has for it     none   a whole number: 131 072
    ``3``     digits that count: 0.0123, 4.00, 28 388        ``.2f``  places after the point

The last two may have a unit in front: ``ms`` and ``us`` are made of seconds, ``%``, ``KiB``,
``MB`` and ``GB`` of ones and bytes.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Collection, Iterator, Mapping

from tests.throughput.measured.catalog import Benchmark, Table
from tests.throughput.measured.record import Node, Record, TablesError
from transport.errors import FieldError

_UNITS = {"": 1, "ms": 1e3, "us": 1e6, "%": 1e2, "KiB": 1 / 1024, "MB": 1e-6, "GB": 1e-9}
_FORMAT = re.compile(r"([a-zA-Z%]*?)(?:(\d)|\.(\d)f)")
_ANY_MARKER = re.compile(r"^.*<!--\s*/?\s*measured\b.*$", re.MULTILINE)
_MARKER = re.compile(r"<!-- (/?)measured:([a-z0-9_]+) -->")


class BadMarker(TablesError, FieldError):
    """A marker without its other half, or that names no benchmark."""


# Cells


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


def spaced(number: int) -> str:
    """A whole number in groups of three: 131 072."""
    return f"{number:,}".replace(",", " ")


def filled(template: str, row: Node, names: Mapping[str, str] = {}) -> str:
    """A template with the fields of ``row``."""
    made = []
    for literal, path, wanted, _ in string.Formatter().parse(template):
        made.append(literal)
        if path is None:
            continue
        first, *others = re.split(r"([*/])", path)
        node = row.at(first)
        for operator, other in zip(others[::2], others[1::2], strict=True):
            by = row.at(other).number
            node = Node(path, node.number * by if operator == "*" else node.number / by)
        if node.value is None:
            return ""
        made.append(_written(node, wanted or "", names))
    return "".join(made)


def _written(node: Node, wanted: str, names: Mapping[str, str]) -> str:
    if wanted == "s":
        return names.get(node.text, node.text)
    if not wanted:
        return spaced(node.whole)
    form = _FORMAT.fullmatch(wanted)
    assert form is not None, f"format {wanted}"
    number = node.number * _UNITS[form[1]]
    if form[2]:
        return digits(number, int(form[2]))
    return f"{round(number, int(form[3])) + 0.0:.{form[3]}f}"  # + 0.0: no -0.0


def _rows(table: Table, record: Record) -> Iterator[Node]:
    for run in table.runs:
        node = record.result(run).at(table.rows)
        rows = node.rows if isinstance(node.value, list) else [node]
        yield from (Node(row.where, {**_fields(row), "run": run}) for row in rows)


def _fields(row: Node) -> dict[str, object]:
    return {key: row[key].value for key in row.keys}


def markdown(benchmark: Benchmark, record: Record) -> str:
    """What stands between a benchmark's markers.

    Raises:
        MissingField: the record lacks what a table shows.
    """
    commands = ", ".join(f"`{run.command}`" for run in record.runs.values())
    known = ["python", *(name for name in benchmark.packages if name in record.versions)]
    where = [*record.machine.values(), *(f"{n} {record.versions.get(n, 'unknown')}" for n in known)]
    facts = {
        "Question": benchmark.question,
        "Configuration": benchmark.configuration,
        "Command": commands,
        "Result": f"`tests/throughput/results/{benchmark.name}.json`, "
        f"{record.measured_at[:10]}, {', '.join(where)}.",
    }
    parts = ["\n".join(f"- **{name}**: {words}" for name, words in facts.items())]
    for table in benchmark.tables:
        first = record.result(table.runs[0])
        lines = [
            [filled(heading, first) for heading in table.columns],
            ["---"] * len(table.columns),
        ]
        lines += [
            [filled(cell, row, table.names) for cell in table.columns.values()]
            for row in _rows(table, record)
        ]
        parts.append("\n".join(_line(line) for line in lines))
    return "\n\n".join(parts) + "\n"


def _line(cells: list[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return "".join(f"| {cell} " if cell else "| " for cell in escaped) + "|"


# Places


def places(text: str, known: Collection[str]) -> dict[str, slice]:
    """What stands between each pair of markers, in the text's order.

    Raises:
        BadMarker: a marker cannot be read, names no benchmark, comes twice, or has no other half.
    """
    found: dict[str, slice] = {}
    name, begun = "", None
    for match in _ANY_MARKER.finditer(text):
        line = f"line {text.count(chr(10), 0, match.start()) + 1}"
        good = _MARKER.fullmatch(match[0])
        if good is None:
            wanted = "<!-- measured:NAME --> or <!-- /measured:NAME --> alone on a line"
            raise BadMarker(line, wanted, match[0])
        if good[2] not in known:
            raise BadMarker(line, f"one of {', '.join(known)}", good[2])
        if bool(good[1]) != (begun is not None) or (good[1] and good[2] != name):
            wanted = f"<!-- /measured:{name} -->" if begun else "the beginning of a table"
            raise BadMarker(line, wanted, match[0])
        if begun is not None:
            found[name], begun = slice(begun, match.start()), None
        elif good[2] in found:
            raise BadMarker(line, f"one table called {good[2]}", "a second one")
        else:
            name, begun = good[2], match.end() + 1
    if begun is not None:
        raise BadMarker("the end", f"<!-- /measured:{name} --> before it", "none")
    return found


def rewritten(text: str, tables: Mapping[str, str], known: Collection[str]) -> str:
    """``text`` with every table of ``tables`` at its place; others stay as they are."""
    for name, place in reversed(places(text, known).items()):
        if name in tables:
            text = f"{text[: place.start]}{tables[name].rstrip(chr(10))}\n{text[place.stop :]}"
    return text
