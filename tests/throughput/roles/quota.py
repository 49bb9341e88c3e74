"""An equal part of the processor's time for each engine, so that three are three machines.

By the CPU controller of cgroups, version 1, which needs root: an engine computes for at most its
share of every ten milliseconds, whoever else waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdconn.tools.lab.process_keeper import descendants

_CONTROLLER = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 10_000


class NoQuota(Exception):
    """This machine has no CPU controller that this user may use."""


@contextmanager
def shares_of(pids: Sequence[int], cores: float) -> Iterator[None]:
    """Give each of these processes, with all below it, so many cores while the block runs.

    Raises:
        NoQuota: see there.
    """
    groups = [_CONTROLLER / f"pdconn-roles-{pid}" for pid in pids]
    try:
        for pid, group in zip(pids, groups, strict=True):
            _limit(group, pid, cores)
        yield
    finally:
        for group in groups:
            _remove(group)


def _limit(group: Path, pid: int, cores: float) -> None:
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US), encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(str(int(cores * _PERIOD_US)), encoding="ascii")
        for one in (pid, *descendants(pid)):
            (group / "cgroup.procs").write_text(str(one), encoding="ascii")
    except OSError as error:
        raise NoQuota(f"expected root and {_CONTROLLER} with quotas, found: {error}") from error


def _remove(group: Path) -> None:
    if not group.is_dir():
        return
    # A group is removed when it is empty; its processes go back to the root of the controller.
    for one in (group / "cgroup.procs").read_text(encoding="ascii").split():
        (_CONTROLLER / "cgroup.procs").write_text(one, encoding="ascii")
    group.rmdir()
