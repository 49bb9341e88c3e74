"""Every way to ask, in turns, and what each adds to the direct one."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pdconn.tools.lab.proxy import running_proxy
from pdconn.tools.lab.quiet import Neighbours
from tests.throughput.proxy_cost.processes import Fleet, engines
from tests.throughput.proxy_cost.streams import Taken, Way, take

RATIO, ADDED_MS = 0.95, 3.0
QUIET, TRIES = 0.25, 2
"""Largest share of the machine for other processes in a run; most runs to get below it."""


@dataclass(frozen=True)
class Row:
    """One way beside the direct one.

    Attributes:
        added_ms: median of the rounds, of the difference between the medians of both.
        spread_ms: least and most of these.
        others: the most of the machine that others took of a run.
        decided_ms: of ``first_ms`` what the router says that deciding took; None without one.
    """

    name: str
    tokens_per_s: float
    ratio: float
    first_ms: float
    first_p95_ms: float
    added_ms: float
    spread_ms: tuple[float, float]
    others: float
    decided_ms: float | None

    @property
    def holds(self) -> bool:
        """Whether our bounds are kept."""
        return self.ratio >= RATIO and self.added_ms < ADDED_MS


def ways(fleet: Fleet, place: Path, stack: ExitStack) -> list[Way]:
    """Every way to ask; starts the routers."""
    both = fleet.prefill
    found = [
        Way("direct", fleet.decode, True),
        Way("direct, asking both", fleet.decode, False, first=both),
    ]
    for name, word, policy in (
        ("round-robin", fleet.prefill, "round-robin"),
        ("prefix, no events", fleet.prefill, "prefix"),
        ("prefix, look-up", fleet.with_events, "prefix"),
    ):
        directory = place / policy / word.partition(",")[1]
        directory.mkdir(parents=True, exist_ok=True)
        proxy = running_proxy([word], [fleet.decode], directory, args=("--policy", policy))
        url = stack.enter_context(proxy)
        found.append(Way(f"{name}: one hop", url, True, beside="direct"))
        found.append(Way(f"{name}: two hops", url, False, beside="direct, asking both"))
    return found


def measure(rounds: int, place: Path) -> list[Row]:
    """Every way in turn, ``rounds`` times."""
    rng = random.Random(1)
    runs: dict[str, list[Taken]] = {}
    with engines(place) as fleet, ExitStack() as stack:
        all_ways = ways(fleet, place, stack)
        time.sleep(1.0)  # replays
        for number in range(rounds):
            for way in all_ways:
                runs.setdefault(way.name, []).append(_quietly(way, rng, f"{number + 1}: "))
    return [_row(way, runs) for way in all_ways]


def _quietly(way: Way, rng: random.Random, round_name: str) -> Taken:
    """A run of little disturbance, or else the least disturbed of ``TRIES``."""
    tried: list[Taken] = []
    while len(tried) < TRIES and not any(run.others <= QUIET for run in tried):
        neighbours = Neighbours([os.getpid()])
        run = asyncio.run(take(way, rng))
        run.others = neighbours.share()
        tried.append(run)
        say = f"{round_name}{way.name}; others took {run.others:.0%} of the machine"
        print(say, file=sys.stderr, flush=True)
    return min(tried, key=lambda run: run.others)


def _row(way: Way, runs: dict[str, list[Taken]]) -> Row:
    mine, theirs = runs[way.name], runs[way.beside or way.name]
    firsts = sorted(s for run in mine for s in run.firsts_s)
    added = [
        1000 * (statistics.median(m.firsts_s) - statistics.median(t.firsts_s))
        for m, t in zip(mine, theirs, strict=True)
    ]
    decided = [run.decided_ms for run in mine if run.decided_ms is not None]
    rates = [statistics.median(run.tokens_per_s for run in all_runs) for all_runs in (mine, theirs)]
    return Row(
        way.name,
        rates[0],
        rates[0] / rates[1],
        1000 * statistics.median(firsts),
        1000 * firsts[int(0.95 * len(firsts))],
        statistics.median(added),
        (min(added), max(added)),
        max(run.others for run in mine),
        statistics.median(decided) if decided else None,
    )
