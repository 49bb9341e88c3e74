"""Progress of starting engines: those that are not ready, at intervals.

An engine's last log line is no progress: it may be truncated, and most lines are of libraries.
"""

from __future__ import annotations

from pdconn.tools.output.progress_line import LogStep


class StartingEngines:
    """One line every ``every_s`` seconds with all engines that are still starting."""

    def __init__(self, log_step: LogStep, every_s: int = 5) -> None:
        self._log_step = log_step
        self._every_s = every_s
        self._shown = 0
        self._names: list[str] = []

    def show(self, name: str, seconds: float, line: str) -> None:
        """Called once a second per starting engine: a ``Progress`` of ``lab.engine``."""
        del line
        if name in self._names:  # a round is complete
            turn = int(seconds) // self._every_s
            if turn > self._shown:
                self._shown = turn
                self._log_step(f"still starting after {seconds:.0f} s: {', '.join(self._names)}")
            self._names.clear()
        self._names.append(name)
