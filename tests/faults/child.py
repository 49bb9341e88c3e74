"""A child process that takes commands as lines of JSON, and answers each with a line.

parent ── {"do": "open", ...} ──► standard input
       ◄── @{"port": 4711} ────── standard output; other lines are prints
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Child:
    """The parent's side of ``python -m module``; close it."""

    def __init__(self, module: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def ask(self, **order: Any) -> Any:
        """Have one order carried out.

        Raises:
            AssertionError: the process ended instead of answering.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise AssertionError(f"the child ended with {self.process.wait()}")

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def serve(commands: dict[str, Callable[..., Any]]) -> None:
    """The child's side: run commands by name until standard input ends."""
    for line in sys.stdin:
        arguments = json.loads(line)
        answer = commands[arguments.pop("do")](**arguments)
        print("@" + json.dumps(answer), flush=True)
