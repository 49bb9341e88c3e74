"""What every result of a command has."""

from __future__ import annotations

from typing import Protocol


class Report(Protocol):
    """The result of a command."""

    def text(self, width: int | None = None) -> str:
        """The result for people, in lines of ``width`` characters where that is given."""

    def document(self) -> object:
        """The result for programs: what ``json.dumps`` takes, not rounded."""
