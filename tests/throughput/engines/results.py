"""Measurements of a handover run, their table, and the ratios that must hold."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.throughput.engines.contestants import ALONE, ANSWER_TOKENS, PUSHING, Taken

BASELINE, TUNED = "in-tree", "in-tree-tuned"
RIVALS = frozenset({BASELINE, TUNED, *PUSHING})
"""Contestants that are not ours."""


@dataclass(frozen=True)
class Verdict:
    """A ratio and the most it may be.  True if it holds."""

    claim: str
    ratio: float
    bound: float

    def __bool__(self) -> bool:
        return self.ratio <= self.bound

    def __str__(self) -> str:
        return f"{'holds' if self else 'FAILS'}  {self.ratio:7.3f} <= {self.bound:<5g} {self.claim}"


@dataclass
class Results:
    """All measurements in seconds, by contestant and prompt length.

    ``disturbed`` counts the turns that count although others took much of the machine.
    """

    first: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    prefill: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    between: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    failed: dict[tuple[str, int], int] = field(default_factory=dict)
    mismatches: int = 0
    disturbed: int = 0

    def add(self, name: str, length: int, taken: Taken | None) -> None:
        """Note one prompt's way through a contestant; None if it got no answer."""
        key = (name, length)
        if taken is None:
            self.failed[key] = self.failed.get(key, 0) + 1
            return
        timed = taken.timed
        self.first.setdefault(key, []).append(taken.first_s)
        self.prefill.setdefault(key, []).append(taken.prefill_s)
        between = (timed.last_token_s - timed.first_token_s) / (ANSWER_TOKENS - 1)
        self.between.setdefault(key, []).append(between)

    def median(self, name: str, length: int) -> float:
        """Of the time to the first token."""
        return statistics.median(self.first[name, length])

    def worst(self, name: str, length: int) -> float:
        """Of the time to the first token."""
        return max(self.first[name, length])

    def table(self) -> str:
        """For people, in milliseconds."""
        head = ("tokens", "median", "worst", "prefill", "per token", "failed")
        rows = [" " * 14 + "".join(f"{word:>11}" for word in head)]
        for name, length in self.first:
            numbers = [
                self.median(name, length),
                self.worst(name, length),
                statistics.median(self.prefill[name, length]),
                statistics.median(self.between[name, length]),
            ]
            cells = "".join(f"{1000 * number:>11.1f}" for number in numbers)
            rows.append(f"{name:<14}{length:>11}{cells}{self.failed.get((name, length), 0):>11}")
        rows.append(
            f"wrong answers: {self.mismatches}; turns that others disturbed: {self.disturbed}"
        )
        return "\n".join(rows)

    def as_json(self, verdict: Sequence[Verdict]) -> dict[str, Any]:
        """Every measurement, and what follows from them."""
        measured = [
            {
                "contestant": name,
                "tokens": length,
                "median_s": self.median(name, length),
                "failed": self.failed.get((name, length), 0),
                "worst_s": self.worst(name, length),
                "prefill_median_s": statistics.median(self.prefill[name, length]),
                "first_s": self.first[name, length],
                "prefill_s": self.prefill[name, length],
                "between_tokens_s": self.between[name, length],
            }
            for name, length in self.first
        ]
        return {
            "measured": measured,
            "mismatches": self.mismatches,
            "disturbed": self.disturbed,
            "ratios": [{**asdict(each), "holds": bool(each)} for each in verdict],
        }


def verdicts(results: Results, connectors: Sequence[str]) -> list[Verdict]:
    """What our handover is to show, against the in-tree connector and an engine alone."""
    lengths = sorted({length for name, length in results.first if name != ALONE})
    found = []
    for name in connectors:
        if name in RIVALS:
            continue
        longest = lengths[-1]
        prefill = results.median(ALONE, longest)
        claim = f"{name}, {longest} tokens: median handover / full prefill"
        found.append(Verdict(claim, results.median(name, longest) / prefill, 0.15))
        for length in lengths:
            if BASELINE in connectors:
                found += _beside_the_plain_one(results, name, length)
            if TUNED in connectors:
                found += _beside_the_tuned_one(results, name, length)
    return found


def _beside_the_plain_one(results: Results, name: str, length: int) -> list[Verdict]:
    ours, theirs = f"{name}, {length} tokens", results.median(BASELINE, length)
    return [
        Verdict(f"{ours}: median / in-tree median", results.median(name, length) / theirs, 0.1),
        Verdict(f"{ours}: worst / in-tree median", results.worst(name, length) / theirs, 1.0),
    ]


def _beside_the_tuned_one(results: Results, name: str, length: int) -> list[Verdict]:
    ours, theirs = f"{name}, {length} tokens", results.median(TUNED, length)
    worst = results.worst(name, length) / results.worst(TUNED, length)
    return [
        Verdict(f"{ours}: median / tuned median", results.median(name, length) / theirs, 0.7),
        Verdict(f"{ours}: worst / tuned worst", worst, 1.0),
    ]
