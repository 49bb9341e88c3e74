"""The measured tables of ``docs/benchmarks.md``: measure, write them, or check them.

    python -m tests.throughput.measured --list
    python -m tests.throughput.measured --run waterfall planning
    python -m tests.throughput.measured --check

A benchmark that cannot run here, or fails, leaves its result and its table as they were.  Exit
status: 0, or 1 if a benchmark failed or a table is not what its result says.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.throughput.measured.book import Book
from tests.throughput.measured.catalog import BENCHMARKS, Benchmark
from tests.throughput.measured.record import TablesError, UnknownBenchmark
from tests.throughput.measured.run import measured

ROOT = Path(__file__).parents[3]
BOOK = Book(ROOT / "docs/benchmarks.md", ROOT / "tests/throughput/results", BENCHMARKS)
LOGS = ROOT / ".work/bench"


def main(arguments: Sequence[str] | None = None, book: Book = BOOK, logs: Path = LOGS) -> int:
    """Run the command line."""
    options = _options(arguments)
    try:
        if options.list:
            return _list(book)
        if options.check:
            return _complain(book.faults())
        failed = [] if options.run is None else run(book, options.run, logs)
        book.render()
        return _complain([*failed, *book.faults()])
    except TablesError as error:
        return _complain([str(error)])
    except KeyboardInterrupt:
        return _complain(["interrupted; what was measured before is kept: --render writes it"])


def run(book: Book, names: Sequence[str], logs: Path) -> list[str]:
    """Measure ``names``, or all, and keep the results; return what failed, in words.

    Raises:
        UnknownBenchmark: no benchmark has that name; nothing was run.
    """
    for name in names:
        if name not in book.benchmarks:
            raise UnknownBenchmark(name, list(book.benchmarks))
    wanted = [book.benchmarks[name] for name in dict.fromkeys(names or book.benchmarks)]
    failed = []
    for number, benchmark in enumerate(wanted, 1):
        progress = _BenchmarkProgress(
            f"{number} of {len(wanted)}: {benchmark.name}", benchmark.minutes
        )
        try:
            book.keep(measured(benchmark, logs, progress.say))
            how = "measured"
        except TablesError as error:
            failed.append(f"{benchmark.name}: {error}")
            how = "not measured, left as it was"
        progress.end(how)
    return failed


def _list(book: Book) -> int:
    records = book.records()
    for one in book.benchmarks.values():
        when = records[one.name].measured_at[:10] if one.name in records else "never measured"
        print(f"{one.name:<12} {_about(one):>12}  {when:<14}  {_missing(one)}".rstrip())
        for command in one.commands:
            print(f"    {command.line}")
    return 0


def _missing(one: Benchmark) -> str:
    words = [need.words for need in one.needs if not need.met()]
    return f"not here: needs {', '.join(words)}" if words else ""


def _about(one: Benchmark) -> str:
    return f"about {one.minutes:g} min"


def _complain(words: Sequence[str]) -> int:
    for each in words:
        print(each, file=sys.stderr)
    return 1 if words else 0


class _BenchmarkProgress:
    """Progress: one line of a terminal, rewritten; without a terminal, a line at each end."""

    def __init__(self, what: str, minutes: float, now: Callable[[], float] = time.monotonic):
        self._what, self._minutes, self._now = what, minutes, now
        self._began = now()
        self._shown = sys.stderr.isatty()
        print(f"{what}, about {minutes:g} min", file=sys.stderr, flush=True)

    def say(self, words: str) -> None:
        """Show the last line that a benchmark printed."""
        if self._shown:
            line = f"  {self._elapsed()} of about {self._minutes:g} min  {words}"
            columns = shutil.get_terminal_size().columns
            print(f"\r\033[K{line[: columns - 1]}", end="", file=sys.stderr, flush=True)

    def end(self, how: str) -> None:
        """Print how it went, and how long it took."""
        clear = "\r\033[K" if self._shown else ""
        print(f"{clear}{self._what}: {how}, {self._elapsed()}", file=sys.stderr, flush=True)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(round(self._now() - self._began), 60)
        return f"{minutes}:{seconds:02}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--run", nargs="*", metavar="NAME", help="measure these, or all, then as --render"
    )
    what.add_argument("--render", action="store_true", help="write the tables of what is there")
    what.add_argument("--check", action="store_true", help="1 if a table is not what was measured")
    what.add_argument("--list", action="store_true", help="the benchmarks, and what they run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
