"""Processor time that a process and its children have used so far."""

from __future__ import annotations

from pathlib import Path


def used_s(pid: int) -> float:
    """Seconds of all living threads of a process, and of the processes that it has started."""
    total_s = 0.0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            # In nanoseconds, where ``stat`` counts in hundredths of a second.
            total_s += int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
            children = (task / "children").read_text(encoding="ascii").split()
            total_s += sum(used_s(int(child)) for child in children)
    except OSError:  # it has just ended
        pass
    return total_s
