"""Two checkouts, one benchmark after the other in turns: is the new one as fast as the old?

    python -m tests.throughput.measured.compare --old DIR planning waterfall lender_load --rounds 3

Each benchmark runs as a process of its own in either checkout, old and new alternating, so
that a machine which slows down slows both.  A figure is the median over the rounds; its
ratio is new by old, below 1 where the new one is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, float]


@dataclass(frozen=True)
class Benchmark:
    """Arguments of a benchmark, and the figures in its JSON; smaller is better in each."""

    arguments: tuple[str, ...]
    figures: Callable[[Any], Figures]


def _planning(document: Any) -> Figures:
    return {f"{row['what']} (ms)": row["median_ms"] for row in document["rows"]}


def _waterfall(document: Any) -> Figures:
    stages = {f"{one['stage']} (ms)": 1e3 * one["median_s"] for one in document["stages"]}
    return {"all but the read (ms)": 1e3 * document["overhead_s"], **stages}


def _lender_load(document: Any) -> Figures:
    summary = document["summary"]
    return {
        "lender's share of a core (%)": 100 * summary["lender_cpu"],
        "least of the phases (%)": 100 * summary["lender_cpu_least"],
        "step beside load, by step alone": summary["step_p50_ratio"],
    }


def _engine_thread(document: Any) -> Figures:
    return {
        f"{side['name']}, {figure} of a step (ms)": side["all_steps"][key]
        for side in document["sides"]
        for figure, key in (("mean", "mean"), ("median", "p50"), ("p99", "p99"))
    }


def _handover(document: Any) -> Figures:
    return {
        f"{one['tokens']} tokens, {name} (ms)": 1e3 * one[key]
        for one in document["measured"]
        if one["contestant"] == "pdconn"
        for name, key in (("median", "median_s"), ("worst", "worst_s"))
    }


def _proxy_cost(document: Any) -> Figures:
    return {f"{way['name']}, first token (ms)": way["first_ms"] for way in document["cost"]}


BENCHMARKS: Mapping[str, Benchmark] = {
    "planning": Benchmark((), _planning),
    "waterfall": Benchmark((), _waterfall),
    "lender_load": Benchmark(("--rounds", "5"), _lender_load),
    "engine_thread": Benchmark((), _engine_thread),
    "handover": Benchmark(("--connectors", "pdconn", "--cores", "apart"), _handover),
    "proxy_cost": Benchmark(("--rounds", "2"), _proxy_cost),
}


@dataclass(frozen=True)
class Row:
    """One figure of one benchmark: every round's value in either checkout."""

    benchmark: str
    figure: str
    old: tuple[float, ...]
    new: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        """Median of new by median of old; None where the old one is 0."""
        before = statistics.median(self.old)
        return statistics.median(self.new) / before if before else None


def run(name: str, root: Path) -> Figures:
    """The figures of benchmark ``name`` in the checkout ``root``.

    Raises:
        CalledProcessError: the benchmark failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        words = [sys.executable, "-m", f"tests.throughput.{name}", "--json", str(out)]
        subprocess.run(
            [*words, *BENCHMARKS[name].arguments],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return BENCHMARKS[name].figures(json.loads(out.read_text(encoding="utf-8")))


def compare(name: str, old: Path, new: Path, rounds: int) -> list[Row]:
    """Every figure of a benchmark, from ``rounds`` runs in each checkout."""
    taken: dict[Path, list[Figures]] = {old: [], new: []}
    for number in range(rounds):
        for root in (old, new) if number % 2 == 0 else (new, old):
            print(f"{name}, round {number + 1} of {rounds}: {root}", file=sys.stderr)
            taken[root].append(run(name, root))
    return [
        Row(name, figure, *(tuple(each[figure] for each in taken[root]) for root in (old, new)))
        for figure in taken[old][0]
    ]


def render(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = ["| benchmark | figure | old | new | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        cells = (_spread(row.old), _spread(row.new), ratio)
        lines.append(f"| {row.benchmark} | {row.figure} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    median = statistics.median(values)
    return f"{median:.3g} ({min(values):.3g} to {max(values):.3g})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both checkouts, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("benchmarks", nargs="+", choices=list(BENCHMARKS), help="what to run")
    add("--old", type=Path, required=True, help="the checkout to compare with")
    add("--new", type=Path, default=Path(__file__).parents[3], help="this one by default")
    add("--rounds", type=int, default=3, help="runs in each checkout (%(default)s)")
    add("--json", type=Path, help="where to write every round's figures")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for name in options.benchmarks:
        rows += compare(name, options.old.resolve(), options.new.resolve(), options.rounds)
    print(render(rows))
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
