"""What an entry of the catalog says: a benchmark, its commands, its tables, what it needs."""

from __future__ import annotations

import ctypes
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

_PROGRAMS = {
    "python": (sys.executable,),
    "pdconn": (sys.executable, "-m", "pdconn.tools.cli.main"),
}


@dataclass(frozen=True, slots=True)
class Need:
    """What a machine must have: ``words`` for people; ``met`` looks."""

    words: str
    met: Callable[[], bool]


def package(module: str) -> Need:
    """A Python package that can be imported as ``module``."""
    return Need(f"the package {module}", lambda: find_spec(module) is not None)


def library(file: str) -> Need:
    """A shared library that the loader finds, such as ``libibverbs.so.1``."""

    def loads() -> bool:
        try:
            ctypes.CDLL(file)
        except OSError:
            return False
        return True

    return Need(file, loads)


@dataclass(frozen=True, slots=True)
class Command:
    """One program of a benchmark, as a user would type it; ``--json FILE`` is added.

    ``name`` is what its result is called in the record.
    """

    name: str
    line: str

    def argv(self, out: Path) -> list[str]:
        """How it is started, its JSON going to ``out``."""
        program, *words = shlex.split(self.line)
        return [*_PROGRAMS[program], *words, "--json", str(out)]


@dataclass(frozen=True)
class Table:
    """A row for each item below ``rows`` in each of ``runs``; see ``tests.throughput.render``.

    Beside its own fields a row has ``run``, the name of its run.

    Attributes:
        columns: heading -> cell, both templates; a heading's fields are the first run's.
        names: texts of the result -> words for them.
    """

    runs: tuple[str, ...]
    rows: str
    columns: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """One measured place of the page.

    Attributes:
        name: of its markers and its result file.
        question, configuration: a sentence each, Markdown.
        minutes: about how long all commands take on two cores.
        drop: fields of its JSON that the record does without, at any depth: samples.
        packages: whose versions are written beside Python's.
        needs: what a machine must have.
    """

    name: str
    question: str
    configuration: str
    commands: tuple[Command, ...]
    minutes: float
    tables: tuple[Table, ...]
    drop: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
