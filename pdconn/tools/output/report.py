"""The interface of every command's result."""

from __future__ import annotations

from typing import Protocol


class Report(Protocol):
    """The result of a command."""

    def text(self, width: int | None = None) -> str:
        """The result as text, in lines of ``width`` characters if given."""

    def document(self) -> object:
        """The result for ``json.dumps``, not rounded."""
