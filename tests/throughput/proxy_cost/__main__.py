"""Cost of the router for a request: tokens per second, the first token; and age of its events.

    python -m tests.throughput.proxy_cost --json proxy_cost.json
    python -m tests.throughput.proxy_cost --check

32 streams of 50 tokens per second are requested from an engine directly and through routers, in
turn.
Engines (``stream_engine``), routers (``pdconn proxy``) and clients are processes of their own.
Streams begin spread over two seconds, so that the first token is measured under load and not in
a queue of 32.  Engines answer at once, so a first token's time is the cost of the request.

    one hop      a body that prefill cannot serve (``echo``), beside the same body sent to decode
    two hops     prefill, then decode, beside a client that sends both requests itself

``look-up`` means that prefill publishes events, so each prompt of 1000 tokens is hashed and
scored; half of it is cached.  Lag is the time from the timestamp of an engine's batch until
``PrefixCaches.apply_batch`` has returned in the router, when the batch counts in scores.  A probe
in the router's own process measures it, in an idle router and with the same 32 streams.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pdconn.tools.output.table import table
from tests.throughput.proxy_cost.cost import ADDED_MS, RATIO, Row, measure
from tests.throughput.proxy_cost.lag import LAG_MS, Lag, lags, probe


def shown(rows: Sequence[Row], lag_rows: Sequence[Lag]) -> str:
    """Both tables."""
    headings = [
        "", "tokens/s\na stream", f"ratio\n>= {RATIO}", "first\nms", "p95\nms",
        f"added ms\n< {ADDED_MS:g}", "of runs\nms", "deciding\nms", "others\ntook", "",
    ]  # fmt: skip
    cells = [
        [
            row.name, f"{row.tokens_per_s:.2f}", f"{row.ratio:.3f}", f"{row.first_ms:.2f}",
            f"{row.first_p95_ms:.2f}", f"{row.added_ms:.2f}",
            f"{row.spread_ms[0]:.2f} to {row.spread_ms[1]:.2f}",
            "" if row.decided_ms is None else f"{row.decided_ms:.2f}",
            f"{row.others:.0%}",
            "holds" if row.holds else "FAILS",
        ]
        for row in rows
    ]  # fmt: skip
    heads = ["event to index", "batches", f"median ms\n< {LAG_MS:g}", "p95\nms", "worst\nms", ""]
    lag_cells = [
        [
            lag.name, str(lag.batches), f"{lag.median_ms:.2f}", f"{lag.p95_ms:.2f}",
            f"{lag.worst_ms:.2f}", "holds" if lag.holds else "FAILS",
        ]
        for lag in lag_rows
    ]  # fmt: skip
    return f"{table(headings, cells)}\n\n{table(heads, lag_cells)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; with ``--check`` 1 when a bound is missed."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--probe"]:
        probe(int(words[1]), words[2], words[3], Path(words[4]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--check", action="store_true", help="1 when a bound is missed")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        lag_rows = lags(place, seconds=6.0)
        rows = measure(args.rounds, place)
    print(shown(rows, lag_rows))
    if args.json:
        document = {
            "cost": [{**asdict(row), "holds": row.holds} for row in rows],
            "lag": [{**asdict(lag), "holds": lag.holds} for lag in lag_rows],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    holds = all(row.holds for row in rows) and all(lag.holds for lag in lag_rows)
    return 1 if args.check and not holds else 0


if __name__ == "__main__":
    sys.exit(main())
