"""A process with all its children: starts, monitors, freezes and ends it.

``process_keeper.py``, a script between this process and the command, ends the whole tree.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from pdconn.tools.lab.lab_errors import EngineDied, LeftBehind
from transport.closing import Closing

_KEEPER = Path(__file__).with_name("process_keeper.py")
_MARGIN_S = 30.0
"""Seconds that the keeper may need beyond the grace period of its command."""


@dataclass(frozen=True)
class Ended:
    """The end of a process.

    Attributes:
        exit_code: the command's, negative for a signal; None if the keeper was killed.
        killed: processes of its tree that outlived it and had to be killed.
        seconds: from the request to end until all processes were gone.
    """

    exit_code: int | None
    killed: tuple[str, ...]
    seconds: float


class RunningKeeper(Protocol):
    """A running keeper, with its pipes; ``subprocess.Popen`` implements it."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Process(Closing):
    """A command and its children; none of them is left after ``close``.

    Output is appended to ``log``.  ``grace_s`` is the time between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self.name = name
        self.log = log
        self._grace_s = grace_s
        self._ended: Ended | None = None
        self._keeper = self._start_keeper(command, None if env is None else dict(env))
        self.pid = self._read_pid()

    def _start_keeper(self, command: Sequence[str], env: dict[str, str] | None) -> RunningKeeper:
        with self.log.open("ab") as sink:
            return subprocess.Popen(
                [sys.executable, "-S", str(_KEEPER), str(self._grace_s), str(self.log), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,  # errors of starting the command
                env=env,
                start_new_session=True,
            )

    def _read_pid(self) -> int:
        """The command's pid; raises if it could not be started."""
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            self.ask_to_end()
            self._keeper.stdout.close()
            raise EngineDied(
                self.name, self._keeper.wait(_MARGIN_S), self.log, self.tail(), self.cause()
            )
        return int(json.loads(line)["pid"])

    def ended(self) -> Ended | None:
        """The end of the command, or None while it runs."""
        if self._ended is None and self._keeper.poll() is not None:
            self._ended = self._read_end(time.monotonic())
        return self._ended

    def pause(self) -> None:
        """Freeze every process of the command's group: they use no CPU time."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo ``pause``."""
        os.killpg(self.pid, signal.SIGCONT)

    def kill_command(self) -> Ended:
        """Send SIGKILL to the command; returns once all processes are gone."""
        if self.ended() is None:
            with suppress(ProcessLookupError):  # it may have ended meanwhile
                os.killpg(self.pid, signal.SIGKILL)
        return self.end_all()

    def ask_to_end(self) -> None:
        """Ask the keeper to end all processes; does not wait."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()

    def end_all(self) -> Ended:
        """End all processes and wait until they are gone.  Idempotent, with the same result.

        Raises:
            LeftBehind: a process survived SIGKILL.
        """
        if self._ended is None:
            asked = time.monotonic()
            self.ask_to_end()
            self._ended = self._read_end(asked)
        return self._ended

    def _read_end(self, asked: float) -> Ended:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        try:
            self._keeper.stdin.close()
            self._keeper.wait(self._grace_s + _MARGIN_S)
            last = self._keeper.stdout.readline() or b"{}"
        except subprocess.TimeoutExpired:
            raise LeftBehind(self.name, [f"keeper ({self._keeper.pid})"]) from None
        finally:
            self._keeper.stdout.close()
        report: dict[str, Any] = json.loads(last)
        if report.get("left"):
            raise LeftBehind(self.name, report["left"])
        return Ended(
            exit_code=report.get("exit_code"),
            killed=tuple(report.get("killed", ())),
            seconds=time.monotonic() - asked,
        )

    def close(self) -> None:
        """End all processes and wait (``end_all``)."""
        self.end_all()

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return tail(self.log, lines)

    def cause(self) -> str | None:
        """The exception that ended the command first (:func:`cause`)."""
        return cause(self.log)


_VLLM_PREFIX = re.compile(r"^\(\w+[^)]*pid=\d+\) (?:\w+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_RAISED = re.compile(r"^(?:\w+\.)*[A-Z]\w*: \S")
_CAUSE_BYTES = 1 << 20
"""Bytes searched at a log's end; an engine that dies at its start wrote less."""


def cause(log: Path) -> str | None:
    """The exception at the end of a log's first traceback; None without a traceback.

    A vLLM server consists of processes that each report the failure of the one below, so the end of
    its log only reports a failed engine core: the first traceback is the cause.  Of chained
    exceptions the last one counts, which was raised for a reader.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _CAUSE_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    found, in_traceback = None, False
    for line in (_VLLM_PREFIX.sub("", line) for line in lines):
        if line.startswith("Traceback (most recent call last)"):
            if found is not None and not in_traceback:
                break  # another process reports the exception of this one
            in_traceback = True
        elif in_traceback and _RAISED.match(line):
            found, in_traceback = line.strip(), False
        elif line.endswith(("exception was the direct cause of the following exception:",
                            "another exception occurred:")):  # fmt: skip
            in_traceback = True
    return found


def tail(log: Path, lines: int = 40) -> str:
    """The last ``lines`` lines of a file that may not exist and may hold anything."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 400 * lines))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
