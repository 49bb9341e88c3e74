"""The CPU time that other processes used during a measurement.

On a shared machine other processes distort a benchmark.  ``/proc/stat`` counts the work of every
core; work that is not of our own processes belongs to others, and a round with too much of it is
repeated.  The rule uses CPU time only, never the result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from pdconn.tools.lab.process_keeper import descendants

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WORK = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq and steal: the columns of ``/proc/stat`` that count work."""


class Neighbours:
    """CPU time of other processes since this object was created.

    ``ours``: processes of the measurement; their descendants count as ours too.
    """

    def __init__(self, ours: Iterable[int]) -> None:
        self._ours = [os.getpid(), *ours]
        self._began = time.monotonic()
        self._machine = _machine_s()
        self._own = self._own_s()

    def share(self) -> float:
        """Share of all cores that other processes used, 0 to 1."""
        cores = os.cpu_count() or 1
        available = (time.monotonic() - self._began) * cores
        others = _machine_s() - self._machine - (self._own_s() - self._own)
        return max(0.0, others / available)

    def _own_s(self) -> float:
        pids = set(self._ours)
        for pid in self._ours[1:]:
            pids |= set(descendants(pid))
        return sum(map(_process_s, pids))


def wait_for_quiet(most: float, timeout_s: float, ours: Iterable[int] = ()) -> bool:
    """Wait until other processes use at most ``most`` of the machine; False after the time-out."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        neighbours = Neighbours(ours)
        time.sleep(0.5)
        if neighbours.share() <= most:
            return True
    return False


def _machine_s() -> float:
    columns = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0].split()[1:]
    return sum(int(columns[column]) for column in _WORK) / _TICKS_PER_S


def _process_s(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_S
