"""Our side of a kept process: start it, watch it, freeze it, end it.

The keeping itself is done by ``keeper``, which see.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdconn.lab.errors import EngineDied, LeftBehind

_KEEPER = Path(__file__).with_name("keeper.py")
_MARGIN_S = 30.0  # what the keeper may need beyond the grace that we gave


@dataclass(frozen=True)
class Ended:
    """How a kept process ended.

    Attributes:
        exit_code: the command's, negative for a signal; None if the keeper was killed.
        killed: processes of its tree that outlived it and had to be killed.
        seconds: from asking until everything was gone.
    """

    exit_code: int | None
    killed: tuple[str, ...]
    seconds: float


class Process:
    """A command and all that it starts, gone for certain when this closes.

    Output goes to ``log``, appended.  ``grace_s`` is what the command gets
    between SIGTERM and SIGKILL.
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
        with log.open("ab") as sink:
            self._keeper = subprocess.Popen(
                [sys.executable, "-S", str(_KEEPER), str(grace_s), str(log), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,  # why a command could not be run
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        self.pid = self._first_word()

    def _first_word(self) -> int:
        """The command's pid; raises if it could not be started at all."""
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            self._keeper.communicate()
            raise EngineDied(self.name, self._keeper.returncode, self.log, self.tail())
        return int(json.loads(line)["pid"])

    def ended(self) -> Ended | None:
        """How it ended, or None while it runs."""
        if self._ended is None and self._keeper.poll() is not None:
            self._ended = self._last_word(time.monotonic())
        return self._ended

    def pause(self) -> None:
        """Freeze every process of the command's group, so that it takes no processor time."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo ``pause``."""
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> Ended:
        """End everything without asking, as the kernel does; returns once it is gone."""
        if self.ended() is None:
            with suppress(ProcessLookupError):  # it may end just now
                os.killpg(self.pid, signal.SIGKILL)
        return self.end()

    def ask_to_end(self) -> None:
        """Have the keeper end everything, without waiting for it."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()

    def end(self) -> Ended:
        """End everything and wait until it is gone.  Harmless when it has ended.

        Raises:
            LeftBehind: something cannot even be killed.
        """
        if self._ended is None:
            asked = time.monotonic()
            self.ask_to_end()
            self._ended = self._last_word(asked)
        return self._ended

    def _last_word(self, asked: float) -> Ended:
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
        said: dict[str, Any] = json.loads(last)
        if said.get("left"):
            raise LeftBehind(self.name, said["left"])
        return Ended(
            exit_code=said.get("exit_code"),
            killed=tuple(said.get("killed", ())),
            seconds=time.monotonic() - asked,
        )

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return tail(self.log, lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


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
