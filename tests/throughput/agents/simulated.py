"""The same at the size of a real fleet: vLLM's own schedulers and caches, in virtual time.

    python -m tests.throughput.agents.simulated --json agents_simulated.json

40 sessions of 20 turns, 8000 tokens that grow by 400, pauses of 1 to 20 s, and a flood of one-off
prompts that fills prefill's caches about twice between two turns of a session.  Engines
(:mod:`tests.simulation.sessions.engine`) are vLLM's scheduler, block pool and KV events with what
our connector keeps; the router's decisions are its own.  Computing takes the time that ``pdconn
plan`` gives it, tokens over ``--prefill-rate``, and a pull its tokens over ``--pull-rate``.
With ``--windows 3 1024`` a fourth of the layers have full attention, and the others windows; a
cache is of as many bytes as without, and the router learns of the windows by the engines' events.

without         nothing is kept
keep            each turn says ``keep``
prefetch        nothing is kept; each prompt is prefetched ``--lead`` seconds before its turn
keep, prefetch  both
no pause        turns follow each other at once, beside the same flood
alone           the flood without sessions
hits anyway     nothing is kept, in caches ten times as large: the same load without kept blocks
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pdconn.tools.output.table import table
from pdconn.vllm.values import KeepShares
from tests.simulation.sessions.engine import CacheSize, Speed, Windows
from tests.simulation.sessions.fleet import Load, Shape
from tests.simulation.sessions.ways import ALONE, NO_PAUSE, ROOMY, WAYS, WITHOUT, Row, run_way

BLOCK = 128


def compared(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows, with their figures beside those of other ways; None where one is not there."""
    by_way = {row.way: row for row in rows}

    def beside(row: Row, way: str, name: str) -> float | None:
        ours, theirs = getattr(row, name), getattr(by_way.get(way), name, None)
        return None if ours is None or not theirs else ours / theirs

    return [
        {
            **asdict(row),
            "of_without": beside(row, WITHOUT, "first_ms"),
            "of_no_pause": beside(row, NO_PAUSE, "first_ms"),
            "flood_of_alone": beside(row, ALONE, "flood_per_s"),
            "flood_of_hits_anyway": beside(row, ROOMY, "flood_per_s"),
        }
        for row in rows
    ]


_COLUMNS = {
    "way": ("way", ""),
    "turns": ("later\nturns", ""),
    "hit": ("tokens\nhit", ".1%"),
    "first_ms": ("first token\nms", ".0f"),
    "first_p90_ms": ("p90\nms", ".0f"),
    "of_without": ("of\nwithout", ".2f"),
    "of_no_pause": ("of no\npause", ".2f"),
    "flood_per_s": ("flood\n1/s", ".1f"),
    "flood_of_alone": ("of flood\nalone", ".2f"),
    "flood_of_hits_anyway": ("of hits\nanyway", ".2f"),
    "flood_caches": ("flood,\ncaches", ".1f"),
    "broken": ("broken", ""),
    "told": ("told", ""),
    "moved": ("elsewhere", ""),
    "preempted": ("preempted", ""),
}


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    cells = [
        ["-" if row[name] is None else format(row[name], form) for name, (_, form) in
         _COLUMNS.items()] for row in rows
    ]  # fmt: skip
    return table([heading for heading, _ in _COLUMNS.values()], cells)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--first", type=int, default=8000, help="tokens of a first prompt")
    parser.add_argument("--growth", type=int, default=400, help="tokens of a turn, with its answer")
    parser.add_argument("--answer", type=int, default=100, help="tokens of an answer")
    parser.add_argument("--pause", type=float, nargs=2, default=(1.0, 20.0), help="seconds")
    parser.add_argument("--lead", type=float, default=2.0, help="seconds, of a prefetch")
    parser.add_argument("--flood", type=int, default=2, help="prompts under way, by prefill engine")
    parser.add_argument("--one-off", type=int, default=2048, help="tokens of a prompt of the flood")
    parser.add_argument("--prefill", type=int, default=12, help="engines")
    parser.add_argument("--decode", type=int, default=4, help="engines")
    parser.add_argument("--cache", type=int, default=128_000, help="tokens, of a prefill engine")
    parser.add_argument("--share", type=float, default=0.5, help="of a cache that may be kept")
    parser.add_argument(
        "--windows", type=int, nargs=2, default=(0, 1024), metavar=("GROUPS", "TOKENS"),
        help="groups of sliding windows, of as many layers each as full attention has",
    )  # fmt: skip
    parser.add_argument("--prefill-rate", type=float, default=25_000.0, help="tokens a second")
    parser.add_argument("--pull-rate", type=float, default=500_000.0, help="tokens a second")
    parser.add_argument("--jobs", type=int, default=2, help="ways at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    return parser.parse_args(argv)


def _run(way: str, shape: Shape, load: Load, lead_s: float, seed: int) -> Row:
    """One way, in a process of its own."""
    logging.disable(logging.WARNING)
    began = time.perf_counter()
    row = run_way(way, shape, load, lead_s, seed)
    print(f"{way}: {time.perf_counter() - began:.0f} s, {row}", file=sys.stderr, flush=True)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    options = _options(argv)
    shares = KeepShares(options.share, options.share)
    longest = options.first + options.turns * options.growth + BLOCK
    caches = [
        CacheSize(
            BLOCK, tokens // BLOCK, shares, longest=longest, windows=Windows(*options.windows)
        )
        for tokens in (options.cache, 3 * options.cache)
    ]
    speed = Speed(options.prefill_rate, options.pull_rate)
    shape = Shape(options.prefill, options.decode, *caches, speed)
    load = Load(
        options.sessions, options.turns, options.first, options.growth, options.answer,
        (options.pause[0], options.pause[1]), options.one_off, options.flood,
    )  # fmt: skip
    fixed = (shape, load, options.lead, options.seed)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        rows = [one.result() for one in [pool.submit(_run, way, *fixed) for way in options.ways]]
    beside = compared(rows)
    print(shown(beside))
    if options.json is not None:
        sizes = {name: value for name, value in vars(options).items() if name != "json"}
        document = {"settings": sizes, "rows": beside}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
