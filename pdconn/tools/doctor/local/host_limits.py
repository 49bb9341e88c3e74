"""Limits of a host: pinned memory, huge pages, shared memory, and reads between processes."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdconn.tools.doctor.findings import Finding, fault, warning
from pdconn.tools.doctor.local.devices import Devices

GIB = 1 << 30
LEAST_SHM_NBYTES = GIB
"""Docker's default is 64 MiB; vLLM's ranks exchange inputs there, and UCX connects through it."""
LEAST_OPEN_FILES = 4096
_CAP_SYS_PTRACE = 19
_ADMIN_ONLY = 2
"""``ptrace_scope`` from which only privileged processes may read other processes' memory."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """The kernel's limits; None for unknown values.

    Attributes:
        memory: bytes of this host; 0 if unknown.
        memlock: bytes that a process may pin; None without a limit.
        open_files: descriptors of a process; None without a limit.
        huge_pages: the chosen word of ``transparent_hugepage``.
        shm: total and free bytes of /dev/shm.
        ptrace_scope: of the Yama module; None if it is not loaded.
        may_trace: whether this process has CAP_SYS_PTRACE.
    """

    memlock: int | None
    open_files: int | None
    huge_pages: str | None
    shm: tuple[int, int] | None
    ptrace_scope: int | None
    may_trace: bool
    memory: int = 0


def read_limits(root: Path = Path("/")) -> HostLimits:
    """Read the limits of this process and host; files are below ``root``."""
    pages = root / "sys/kernel/mm/transparent_hugepage"
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope")
    return HostLimits(
        _soft(resource.RLIMIT_MEMLOCK),
        _soft(resource.RLIMIT_NOFILE),
        _chosen(pages / "enabled"),
        _space(root / "dev/shm"),
        int(scope) if scope is not None and scope.isdecimal() else None,
        _may_trace(root / "proc/self/status"),
        _memory(root / "proc/meminfo"),
    )


def seen_limits(limits: HostLimits) -> str:
    """One line with all limits."""
    shm = "none" if limits.shm is None else f"{sized(limits.shm[1])} free"
    scope = "not restricted" if limits.ptrace_scope is None else str(limits.ptrace_scope)
    return (
        f"memlock {_or_unlimited(limits.memlock)}, open files {limits.open_files or 'unlimited'}, "
        f"huge pages {limits.huge_pages or 'unknown'}, /dev/shm {shm}, ptrace scope {scope}"
    )


def judge_limits(
    limits: HostLimits, devices: Devices, *, wants_huge_pages: bool = True
) -> Iterator[Finding]:
    """Findings about limits that reduce speed, or keep transports from starting."""
    yield from _memlock(limits, devices)
    if limits.open_files is not None and limits.open_files < LEAST_OPEN_FILES:
        message = f"expected at least {LEAST_OPEN_FILES} descriptors, got {limits.open_files}"
        remedy = (
            "ulimit -n 65536 before the engine; docker run --ulimit nofile=65536; "
            "LimitNOFILE=65536 of a service"
        )
        yield warning("limits.open-files", "open files", message, remedy)
    if limits.huge_pages == "never" and wants_huge_pages:
        yield warning(
            "limits.huge-pages",
            "/sys/kernel/mm/transparent_hugepage/enabled",
            "expected madvise or always, got never: reads within a host were measured at 4.2 GB/s "
            "with 4 KiB pages, 5.4 GB/s with huge ones",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    yield from _shared_memory(limits)
    scope = limits.ptrace_scope
    if scope is not None and scope >= (_ADMIN_ONLY + 1 if limits.may_trace else _ADMIN_ONLY):
        yield warning(
            "limits.ptrace-scope",
            "/proc/sys/kernel/yama/ptrace_scope",
            f"expected 0 or 1, got {scope}: UCX cannot copy between processes of this host (CMA)",
            "sudo sysctl -w kernel.yama.ptrace_scope=1; docker run --cap-add SYS_PTRACE does, too"
            if scope == _ADMIN_ONLY
            else "set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and restart the host: the kernel "
            "takes 3 back in no other way",
        )


def _memlock(limits: HostLimits, devices: Devices) -> Iterator[Finding]:
    if limits.memlock is None or not devices.active_rdma:
        return
    if 0 < limits.memory <= limits.memlock:
        return
    yield fault(
        "limits.memlock",
        "memlock",
        f"expected unlimited, since RDMA pins all KV memory, got {sized(limits.memlock)}",
        "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity of a service",
    )


def _shared_memory(limits: HostLimits) -> Iterator[Finding]:
    remedy = "docker run --ipc=host or --shm-size=8g; on Kubernetes a Memory emptyDir at /dev/shm"
    if limits.shm is None:
        message = "expected shared memory for the ranks of an engine, got none"
        yield fault("limits.shm", "/dev/shm", message, remedy)
    elif limits.shm[1] < LEAST_SHM_NBYTES:
        message = f"expected at least {sized(LEAST_SHM_NBYTES)} free, got {sized(limits.shm[1])}"
        yield warning("limits.shm", "/dev/shm", message, remedy)


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _chosen(path: Path) -> str | None:
    found = re.search(r"\[(\w+)\]", _read(path) or "")
    return None if found is None else found[1]


def _space(path: Path) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _may_trace(status: Path) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _read(status) or "", re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _CAP_SYS_PTRACE & 1)


def _memory(meminfo: Path) -> int:
    found = re.search(r"^MemTotal:\s*(\d+) kB$", _read(meminfo) or "", re.MULTILINE)
    return 0 if found is None else int(found[1]) << 10


def sized(nbytes: int) -> str:
    """Bytes in the largest binary unit that is not above them.

    >>> sized(8 << 20), sized(3 << 29)
    ('8 MiB', '1.5 GiB')
    """
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} bytes"


def _or_unlimited(nbytes: int | None) -> str:
    return "unlimited" if nbytes is None else sized(nbytes)
