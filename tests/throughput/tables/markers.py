"""Where measured tables stand in a text: pure rewriting between two lines.

::

    <!-- measured:waterfall -->
    whatever is here is replaced
    <!-- /measured:waterfall -->

Everything else is kept, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tests.throughput.tables.errors import BadMarker

_ANY = re.compile(r"^.*<!--\s*/?\s*measured\b.*$", re.MULTILINE)
_GOOD = re.compile(r"<!-- (/?)measured:([a-z0-9_]+) -->")


@dataclass(frozen=True, slots=True)
class Region:
    """What stands between the markers of ``name``: from the line after the first one to the
    beginning of the second one, in characters."""

    name: str
    start: int
    end: int


def regions(text: str, known: Collection[str]) -> list[Region]:
    """Every measured table's place, in the text's order.

    Raises:
        BadMarker: a marker that cannot be read, names no benchmark, comes twice, or has no
            other half.
    """
    found: list[Region] = []
    begun: re.Match[str] | None = None
    name = ""
    for match in _ANY.finditer(text):
        ends, this = _read(match, known)
        if ends != (begun is not None) or (ends and this != name):
            expected = _end(name) if begun else "the beginning of a table"
            raise BadMarker(_line(match), expected, match[0])
        if begun is not None:
            found.append(Region(name, begun.end() + 1, match.start()))
            begun = None
            continue
        if this in {region.name for region in found}:
            raise BadMarker(_line(match), f"one table called {this}", "a second one")
        begun, name = match, this
    if begun is not None:
        raise BadMarker(_line(begun), f"{_end(name)} after it", "the end of the text")
    return found


def rewritten(text: str, tables: Mapping[str, str], known: Collection[str]) -> str:
    """``text`` with every table of ``tables`` between its markers; others stay as they are.

    Raises:
        BadMarker: see :func:`regions`.
    """
    made, at = [], 0
    for region in regions(text, known):
        if region.name in tables:
            made += [text[at : region.start], tables[region.name].rstrip("\n"), "\n"]
            at = region.end
    return "".join([*made, text[at:]])


def _read(match: re.Match[str], known: Collection[str]) -> tuple[bool, str]:
    """Whether a marker ends a table, and whose it is."""
    good = _GOOD.fullmatch(match[0])
    if good is None:
        expected = "<!-- measured:NAME --> or <!-- /measured:NAME --> alone on a line"
        raise BadMarker(_line(match), expected, match[0])
    if good[2] not in known:
        raise BadMarker(_line(match), f"one of {', '.join(known)}", good[2])
    return good[1] == "/", good[2]


def _end(name: str) -> str:
    return f"<!-- /measured:{name} -->"


def _line(match: re.Match[str]) -> int:
    return match.string.count("\n", 0, match.start()) + 1
