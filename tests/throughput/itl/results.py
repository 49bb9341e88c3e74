"""Phases of a kind as one, the ratios of kinds, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdconn.tools.output.table import table
from tests.throughput.itl.phases import Phase

PAIRS = (
    ("pulled", "instant"),
    ("pulled", "cached"),
    ("pulled", "quiet"),
    ("lent", "cached"),
    ("cached", "quiet"),
)


@dataclass(frozen=True)
class Kind:
    """All phases of a kind: milliseconds between tokens, microseconds of processor time."""

    kind: str
    phases: int
    tokens: int
    per_s: float
    p50: float
    p99: float
    raw_p50: float
    raw_p99: float
    seen_p50: float
    seen_p99: float
    loop_us: float
    others_us: float


def quantile(values: Sequence[float], part: float) -> float:
    """Of at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def sum_up(kind: str, phases: Sequence[Phase]) -> Kind:
    """One kind's phases, pooled; processor time is for each step."""
    mine = [phase for phase in phases if phase.kind == kind]
    steps = [each for phase in mine for each in phase.steps]
    raw = [each for phase in mine for each in phase.raw]
    seen = [each for phase in mine for each in phase.seen]
    return Kind(
        kind,
        len(mine),
        len(steps),
        sum(phase.asked for phase in mine) / sum(phase.ended - phase.began for phase in mine),
        *(1e3 * quantile(of, part) for of in (steps, raw, seen) for part in (0.5, 0.99)),
        1e6 * sum(phase.loop_s for phase in mine) / len(steps),
        1e6 * sum(phase.others_s for phase in mine) / len(steps),
    )


def ratios(phases: Sequence[Phase], over: str, under: str, part: float) -> list[float]:
    """Of a quantile, round by round."""

    def of(kind: str) -> list[float]:
        return [quantile(phase.steps, part) for phase in phases if phase.kind == kind]

    return [a / b for a, b in zip(of(over), of(under), strict=True)]


def render(kinds: Sequence[Kind], phases: Sequence[Phase]) -> str:
    """A table of the kinds, and one of their ratios with the rounds' spread."""
    rows = [
        [
            kind.kind, f"{kind.per_s:.1f}", f"{kind.tokens:,}",
            *(f"{x:.2f}" for x in (kind.p50, kind.p99, kind.raw_p50, kind.raw_p99)),
            *(f"{x:.2f}" for x in (kind.seen_p50, kind.seen_p99)),
            f"{kind.loop_us:.0f}", f"{kind.others_us:.0f}",
        ]
        for kind in kinds
    ]  # fmt: skip
    headings = [
        "", "asked\na second", "tokens", "p50\nms", "p99\nms", "raw\np50", "raw\np99",
        "client\np50", "client\np99",
        "loop, us\na step", "others, us\na step",
    ]  # fmt: skip
    by_name = {kind.kind: kind for kind in kinds}
    lines = []
    for over, under in PAIRS:
        if over not in by_name or under not in by_name:
            continue
        a, b = by_name[over], by_name[under]
        for name, part, pooled in (("p50", 0.5, a.p50 / b.p50), ("p99", 0.99, a.p99 / b.p99)):
            rounds = ratios(phases, over, under, part)
            spread = [statistics.median(rounds), min(rounds), max(rounds)]
            lines.append(
                [f"{over} / {under}", name, f"{pooled:.3f}", *(f"{each:.3f}" for each in spread)]
            )
    ratio = table(["", "", "pooled", "median of\nrounds", "least", "most"], lines)
    return f"{table(headings, rows)}\n\n{ratio}"
