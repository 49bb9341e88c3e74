"""Tables of what one process computes: plans, checksums."""

from __future__ import annotations

from tests.throughput.tables.markdown import digits, spaced, table
from tests.throughput.tables.node import Node
from tests.throughput.tables.record import Record

_LAYOUTS = {"BLNHC": "tokens before heads (BLNHC)"}


def planning(record: Record) -> str:
    """Time of plans and templates, and the peak memory of plans in two caches."""
    document = record.result("planning")
    rows = [
        [row["what"].text, spaced(row["runs"].whole), digits(row["median_ms"].number),
         digits(row["worst_ms"].number)]
        for row in document["rows"].rows
    ]  # fmt: skip
    small, large = (node.whole for node in document["caches"].rows)
    peaks = [
        [row["what"].text, spaced(row["runs"].whole), _mb(row["small_nbytes"]),
         _mb(row["large_nbytes"])]
        for row in document["memory"].rows
    ]  # fmt: skip
    heads = [f"peak MB, cache of {spaced(blocks)} blocks" for blocks in (small, large)]
    return (
        f"{table(['', 'runs', 'median ms', 'worst ms'], rows)}\n\n"
        f"{table(['', 'runs', *heads], peaks)}"
    )


def _mb(node: Node) -> str:
    return digits(node.number / 1e6)


def checksums(record: Record) -> str:
    """What a core gathers and hashes in a second, by layout, at prefill and at decode."""
    measured = record.result("checksums")["rows"]
    layouts = list(dict.fromkeys(row["layout"].text for row in measured.rows))
    kinds = dict.fromkeys((row["verify"].text, row["block_tokens"].whole) for row in measured.rows)
    rows = []
    for verify, block in kinds:
        found = [
            measured.the(layout=layout, verify=verify, block_tokens=block) for layout in layouts
        ]
        cells = [
            f"{digits(row['lender_gbps'].number, 2)}, {digits(row['reader_gbps'].number, 2)}"
            for row in found
        ]
        rows.append([f"`{verify}`", str(block), *cells])
    heads = [f"{_LAYOUTS.get(layout, layout)}, GB/s" for layout in layouts]
    return table(["`verify`", "tokens a block", *heads], rows)
