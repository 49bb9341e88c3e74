"""What can be wrong with a measured table: its result, its place in the README, its run."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class TablesError(Exception):
    """A measured table that cannot be made."""


class MissingField(TablesError):
    """A result lacks a field, or holds something else there."""

    def __init__(self, field: str, expected: str, seen: str) -> None:
        super().__init__(f"{field}: expected {expected}, seen {seen}")
        self.field = field


class BadMarker(TablesError):
    """Markers of a text that do not come in pairs, or that name no benchmark."""

    def __init__(self, line: int, expected: str, seen: str) -> None:
        super().__init__(f"line {line}: expected {expected}, seen {seen}")
        self.line = line


class UnknownBenchmark(TablesError):
    """No benchmark has that name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        super().__init__(f"benchmark: expected one of {', '.join(known)}, seen {name}{hint}")


class NotHere(TablesError):
    """A benchmark needs what this machine does not have."""


class BenchmarkFailed(TablesError):
    """A benchmark ended otherwise than with 0, took too long, or wrote no result."""
