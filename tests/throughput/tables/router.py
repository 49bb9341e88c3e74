"""Tables of the router: traces by policy, scoring and events, what it adds to a request."""

from __future__ import annotations

from tests.throughput.tables.markdown import digits, percent, spaced, table
from tests.throughput.tables.node import Node
from tests.throughput.tables.record import Record

_LAGS = ("median_ms", "p95_ms", "worst_ms")


def trace(record: Record) -> str:
    """Each policy over engines that are fake but for their caches."""
    headings = ["policy", "by decode alone", "cached on prefill", "tokens computed, of all",
                "predicted = reported", "TTFT median, p95"]  # fmt: skip
    rows = []
    for row in record.result("trace").rows:
        agreed = row["agreement"].value
        rows.append(
            [
                row["policy"].text,
                _alone(row),
                percent(row["prefill_cached"].number),
                f"{spaced(row['computed'].whole)}, {percent(row['computed_share'].number)}",
                "" if agreed is None else f"{percent(row['agreement'].number)} of requests",
                _ttft(row),
            ]
        )
    return table(headings, rows)


def real_trace(record: Record) -> str:
    """Each policy over real engines."""
    headings = ["policy", "by decode alone", "computed by prefill", "by decode",
                "TTFT median, p95", "wrong"]  # fmt: skip
    rows = [
        [
            row["policy"].text,
            _alone(row),
            f"{spaced(row['prefill_computed'].whole)} tokens",
            spaced(row["decode_computed"].whole),
            _ttft(row),
            str(row["wrong"].whole),
        ]
        for row in record.result("trace").rows
    ]
    return table(headings, rows)


def _alone(row: Node) -> str:
    return f"{row['alone'].whole} of {row['requests'].whole}"


def _ttft(row: Node) -> str:
    return f"{row['ttft_ms'].number:.0f}, {row['ttft_p95_ms'].number:.0f} ms"


def routing(record: Record) -> str:
    """Scores beside a list scan, then what has nothing to stand beside."""
    rows = []
    for row in record.result("routing").rows:
        scan = row["scan"].value
        beside = "" if scan is None else _with_unit(row["scan"].number, row["unit"].text)
        rows.append([row["what"].text, _with_unit(row["ours"].number, row["unit"].text), beside])
    return table(["", "router", "list scan"], rows)


def _with_unit(value: float, unit: str) -> str:
    if unit == "us":
        return f"{digits(value)} µs" if value < 1000 else f"{digits(value / 1000)} ms"
    return f"{digits(value)} {unit}"


def proxy_cost(record: Record) -> str:
    """Every way through a router beside the direct one, and how stale its index is."""
    cost = record.result("cost")
    headings = ["", "tokens/s beside direct", "first token, ms later", "of the rounds"]
    rows = []
    for row in cost["cost"].rows:
        if row["decided_ms"].value is None:  # the direct ways
            continue
        low, high = (node.number for node in row["spread_ms"].rows)
        added = f"{row['added_ms'].number:.1f}"
        rows.append(
            [row["name"].text, f"{row['ratio'].number:.3f}", added, f"{low:.1f} to {high:.1f}"]
        )
    lags = [
        [row["name"].text, *(f"{row[name].number:.1f}" for name in _LAGS)]
        for row in cost["lag"].rows
    ]
    heads = ["from an engine's event to the index", "median, ms", "p95", "worst"]
    return f"{table(headings, rows)}\n\n{table(heads, lags)}"
