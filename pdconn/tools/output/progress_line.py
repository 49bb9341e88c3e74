"""One line of a terminal that shows the current step of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

LogStep = Callable[[str], None]
"""Called with each step of a command as it begins, or with a line about it."""


class ProgressLine:
    """A line on standard error, rewritten in place; no output without a terminal.

    ``shown``: False if the command prints no progress at all.
    """

    def __init__(self, prefix: str = "", *, shown: bool = True) -> None:
        self._prefix = prefix
        self.shown = shown and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show_step(self, text: str) -> None:
        """Show ``text`` in place of the previous step."""
        if self.shown:
            print(f"\r\033[K{self._prefix}{text}", end="", file=sys.stderr, flush=True)

    def erase(self) -> None:
        """Erase the line."""
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
