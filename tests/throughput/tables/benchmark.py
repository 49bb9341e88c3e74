"""A benchmark as the registry has it: what is run, and how its JSON becomes a table."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.throughput.tables.markdown import made_by
from tests.throughput.tables.needs import Need
from tests.throughput.tables.record import Record

_PROGRAMS = {
    "python": (sys.executable,),
    "pdconn": (sys.executable, "-m", "pdconn.cli.main"),
}


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
class Benchmark:
    """One measured table.

    Attributes:
        name: of its markers and its result.
        minutes: about how long all commands take on two cores.
        table: the record as Markdown, without the line that says what made it.
        drop: fields of its JSON that the record does without, at any depth: samples.
        packages: whose versions are said under the table, beside Python's.
        needs: what a machine must have.
    """

    name: str
    commands: tuple[Command, ...]
    minutes: float
    table: Callable[[Record], str]
    drop: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()

    def markdown(self, record: Record) -> str:
        """The table and the line under it.

        Raises:
            MissingField: the record lacks what the table shows.
        """
        return f"{self.table(record)}\n\n{made_by(record, self.packages)}\n"
