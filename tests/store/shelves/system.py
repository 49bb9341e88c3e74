"""The system calls of the shelf of files, counted, made to fail, or cut short by a kill.

Stands for the module ``os`` (and ``fcntl``, and ``fallocate``) in the shelf's modules, and passes
calls on to them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.store.shelf import files_shelf as files
from pdconn.store.shelf import folders, transfer

_CALLS = (
    "open close fstat lstat read write preadv pwritev ftruncate link unlink"
    " rename mkdir rmdir scandir utime makedirs"
)
CALLS = frozenset(_CALLS.split())


class System:
    """Calls made so far, by name, and what happens at the next.

    Attributes:
        before: called with the number and name of each call (from 0) before it is made; what it
            raises is raised by the call.  A ``close`` is made nevertheless, as Linux does.
        instead: calls that are answered otherwise, by name.
    """

    def __init__(self, before: Callable[[int, str], None] | None = None) -> None:
        self.made: list[str] = []
        self.before = before
        self.instead: dict[str, Callable[..., Any]] = {}
        self.fcntl = SimpleNamespace(F_SETFL=fcntl.F_SETFL, fcntl=self._wrapped("fcntl", fcntl))

    def __getattr__(self, name: str) -> Any:
        return self._wrapped(name, os) if name in CALLS else getattr(os, name)

    def _wrapped(self, name: str, module: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(self.made)
            self.made.append(name)
            try:
                if self.before is not None:
                    self.before(number, name)
            except OSError:
                if name == "close":
                    os.close(*args)
                raise
            return self.instead.get(name, getattr(module, name))(*args, **kwargs)

        return call

    def install(self, patch: pytest.MonkeyPatch) -> System:
        """Stand in for ``os`` in the shelf's modules until ``patch`` is undone."""
        for module in (files, folders, transfer):
            patch.setattr(module, "os", self)
        patch.setattr(transfer, "fcntl", self.fcntl)
        reserve = self._wrapped("fallocate", SimpleNamespace(fallocate=files.fallocate))
        patch.setattr(files, "fallocate", reserve)
        return self


def failing_at(number: int, code: int) -> Callable[[int, str], None]:
    """The call of that number fails with ``code``."""

    def before(now: int, name: str) -> None:
        if now == number:
            raise OSError(code, os.strerror(code), name)

    return before


def killed_at(number: int) -> Callable[[int, str], None]:
    """The process is killed before the call of that number."""

    def before(now: int, name: str) -> None:
        if now == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def in_child(run: Callable[[], None]) -> int:
    """The status of a forked process that runs this: 0, or minus the signal that ended it."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(30)
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_small_process(run: Callable[[Path], None], folder: Path) -> None:
    """Run a function of a module in an interpreter that imports its module alone.

    A fork of that takes a millisecond, and one of a process that has vLLM and torch fifty.
    """
    words = f"import pathlib, sys; from {run.__module__} import {run.__name__} as run; "
    command = [sys.executable, "-c", f"{words}run(pathlib.Path(sys.argv[1]))", str(folder)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr


def open_files() -> set[str]:
    """Descriptors of this process."""
    return set(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def mounted(folder: Path, kind: str, options: str = "defaults") -> Iterator[Path]:
    """An empty file system of its own at a new folder; the test is skipped where none may be."""
    if os.geteuid():
        pytest.skip(f"only root mounts {kind}")
    folder.mkdir(0o700)
    mount = ["mount", "-t", kind, "-o", options, kind, str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{kind} cannot be mounted here: {done.stderr.strip()}")
    folder.chmod(0o700)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
