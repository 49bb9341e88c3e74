"""Runs one command and ends its whole process tree: a script of its own.

    Process ── a pipe, held open ──► keeper ──► command ──► its children ...

An engine is a tree of processes, and the process that starts it may be interrupted, killed or
crash.  So the tree is below a keeper, in a session without a terminal.  The keeper ends the tree
when

* the pipe on its standard input closes: ``Process`` closed it, or its process has ended;
* the command ends by itself: its children must not survive it;
* the keeper receives SIGTERM, SIGINT or SIGHUP.

The keeper is a *subreaper*: a process whose parent dies becomes the keeper's child, so every
process that the command ever started is below it, even outside the process group.  If the keeper
itself is killed, the kernel sends SIGTERM to the command.

It writes one JSON object per line to its standard output: ``{"pid": …}`` once the command runs,
``{"exit_code": …, "killed": […], "left": […]}`` at the end.  It is started by path, so it imports
the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_S = 0.02
_GRACE_S = 3.0  # for children to end by themselves after the command ended
_UNLINK_S = 2.0  # more, for the child that frees their shared memory
_KILL_S = 10.0  # for a killed process to disappear


@dataclass(frozen=True)
class Swept:
    """The processes that outlived the command, and their fate."""

    killed: list[str]
    left: list[str]


class Child(Protocol):
    """A running command; ``subprocess.Popen`` implements it."""

    pid: int

    def wait(self) -> int:
        """The exit status, negative for a signal."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


def main(arguments: list[str]) -> int:
    """``keeper GRACE_S LOG COMMAND…``: returns 0 if no process is left."""
    grace_s, log, command = float(arguments[0]), arguments[1], arguments[2:]
    return keep(grace_s, lambda scratch: _start(command, log, scratch))


def keep(grace_s: float, start: Callable[[str], Child]) -> int:
    """Start a command and keep it; ``start`` receives a folder for its temporary files.

    A ``start`` that forks may raise ``SystemExit`` in the new process, which then cleans up nothing
    of the keeper's.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signals = _signal_socket()
    scratch = tempfile.mkdtemp(prefix="pdconn-")
    try:
        child = start(scratch)
    except Exception:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    try:
        _say({"pid": child.pid})
        exit_code = _wait(child, signals, grace_s)
        swept = sweep()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _say({"exit_code": exit_code, "killed": swept.killed, "left": swept.left})
    return 1 if swept.left else 0


def _start(command: list[str], log: str, scratch: str) -> subprocess.Popen[bytes]:
    """Start the command in a session of its own, with ``scratch`` for temporary files."""
    with open(log, "ab", buffering=0) as sink:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": scratch},
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - the keeper has one thread
        )


def _wait(child: Child, signals: socket.socket, grace_s: float) -> int:
    """Wait until the command ends or is to be ended; returns its exit status."""
    ended = os.pidfd_open(child.pid)
    try:
        readable, _, _ = select.select([ended, sys.stdin, signals], [], [])
        if ended not in readable:
            _end(child, ended, grace_s)
        return child.wait()
    finally:
        os.close(ended)


def _end(child: Child, ended: int, grace_s: float) -> None:
    """End the command: SIGTERM, wait, SIGKILL.

    Only the command gets SIGTERM, not its group: a server ends its own children in order, and
    children that receive a signal too stop in the middle of that.
    """
    child.terminate()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGCONT)  # a stopped process does not handle SIGTERM
    readable, _, _ = select.select([ended], [], [], grace_s)
    if not readable:
        child.kill()


def sweep() -> Swept:
    """Send SIGTERM to all descendants of this process, and SIGKILL after ``_GRACE_S``."""
    kill_at = time.monotonic() + _GRACE_S
    kill_all_at = kill_at + _UNLINK_S
    give_up = kill_all_at + _KILL_S
    killed: dict[int, str] = {}
    for pid in descendants(os.getpid()):
        _signal(pid, signal.SIGTERM)
    while True:
        _reap()
        alive = descendants(os.getpid())
        now = time.monotonic()
        if not alive or now > give_up:
            return Swept(list(killed.values()), list(alive.values()))
        for pid, name in alive.items():
            if now > kill_all_at or (now > kill_at and not _unlinks_shared_memory(pid)):
                killed[pid] = name
                _signal(pid, signal.SIGKILL)
        time.sleep(_TICK_S)


def _unlinks_shared_memory(pid: int) -> bool:
    """Whether a process is Python's resource tracker, which frees memory of killed processes.

    The tracker ends by itself once they are gone.
    """
    with suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def descendants(root: int) -> dict[int, str]:
    """Living processes below ``root``: pid to ``name (pid)``.  Zombies are left out."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace", encoding="utf-8")
        except OSError:
            continue  # ended since the listing
        head, _, tail = stat.rpartition(")")  # a name may hold spaces and brackets
        fields = tail.split()
        state, parent, num_threads = fields[0], fields[1], int(fields[17])
        pid = int(entry.name)
        parents[pid] = int(parent)
        # One whose first thread has ended is shown as a zombie while others hold its sockets open.
        if state not in "ZX" or num_threads > 1:
            names[pid] = f"{head.partition('(')[2]} ({pid})"
    return {pid: name for pid, name in names.items() if _is_below(pid, root, parents)}


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    seen = set()
    while (pid := parents.get(pid, 0)) and pid not in seen:
        if pid == root:
            return True
        seen.add(pid)  # a pid that is reused during the scan could make a cycle
    return False


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_socket() -> socket.socket:
    """A socket that becomes readable when a signal arrives, for ``select``."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.detach())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return ours


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _say(message: dict[str, object]) -> None:
    with suppress(BrokenPipeError):  # the reader is gone; the tree still has to be ended
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
