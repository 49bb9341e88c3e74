"""One core for the thread of the engine's loop, the other for everything else."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from pathlib import Path

from pdconn.tools.lab.process_keeper import descendants

_CORE_PROCESS = "EngineCore"
_LAST = 10
_FIRST = -15


def engine_core(pid: int) -> int:
    """The process of an engine that runs its loop, by the name that vLLM gives it.

    Raises:
        RuntimeError: there is none below ``pid``, or several.
    """
    found = [each for each in descendants(pid) if _CORE_PROCESS in _command(each)]
    if len(found) != 1:
        raise RuntimeError(f"expected one {_CORE_PROCESS} below {pid}, found {found}")
    return found[0]


def pin(pid: int) -> None:
    """The engine's loop gets core 0, its other threads and all other processes core 1.

    On core 1 the engine core's threads go before the API server and us: the core is to be
    spare for them, and a thread that holds Python's lock while others run holds up the loop.
    As root, they go before other programs, too.  Threads that are started later inherit.  On
    one core everything stays as it is.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    core = engine_core(pid)
    for process in (core, os.getpid()):
        _favour(process)
    for process in {os.getpid(), pid, *descendants(pid)}:
        for thread in threads_of(process):
            is_loop = process == core and thread == core
            with suppress(ProcessLookupError):  # it may end just now
                os.sched_setaffinity(thread, cores[:1] if is_loop else cores[1:2])
                with suppress(PermissionError):
                    os.setpriority(os.PRIO_PROCESS, thread, _FIRST if process == core else _LAST)


def _favour(process: int) -> None:
    """Give its session a greater share, where sessions have shares; until we end."""
    path = Path(f"/proc/{process}/autogroup")
    try:
        before = path.read_text(encoding="utf-8").split()[-1]
        path.write_text(str(_FIRST), encoding="utf-8")
    except OSError:
        return
    if process == os.getpid():
        atexit.register(path.write_text, before)


def threads_of(pid: int) -> list[int]:
    """Threads of a process, natives too."""
    return [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
