"""The tables of a benchmark, from a small result; what tests of every theme share."""

from __future__ import annotations

from tests.throughput.measured.catalog import BENCHMARKS
from tests.throughput.measured.record import Record, Run
from tests.throughput.render import markdown


def record(name: str, **results: object) -> Record:
    runs = {run: Run("python", 1.0, result) for run, result in results.items()}
    return Record(name, "2026-01-02", {}, {}, runs)


def made(name: str, **results: object) -> list[str]:
    """The lines of a benchmark's tables; an empty one between two tables."""
    text = markdown(BENCHMARKS[name], record(name, **results))
    return lines(text[text.index("\n|") :])


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
