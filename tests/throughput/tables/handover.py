"""Tables of what engines do: handover, what `verify` costs there, what the demo moves."""

from __future__ import annotations

from tests.throughput.tables.markdown import digits, ms, spaced, table
from tests.throughput.tables.node import Node
from tests.throughput.tables.record import Record

_WHO = {
    "alone": "one engine alone",
    "in-tree": "vLLM's in-tree NixlConnector",
    "pdconn": "**pdconn**",
}


def handover(record: Record) -> str:
    """Both ways to give out cores side by side, and the ratios that we asked for."""
    both = [record.result("reserved"), record.result("apart")]
    headings = ["", "tokens", "prefill", "vLLM's own binding, one core reserved", "prefill",
                "one core each"]  # fmt: skip
    rows = []
    for row in both[0]["measured"].rows:
        name, tokens = row["contestant"].text, row["tokens"].whole
        cells = [_WHO.get(name, name), spaced(tokens)]
        for one in both:
            cells += _median_and_worst(one["measured"].the(contestant=name, tokens=tokens))
        rows.append(cells)
    return f"{table(headings, rows)}\n\n{_ratios(both)}"


def _median_and_worst(row: Node) -> list[str]:
    prefill_s, failed = row["prefill_median_s"].number, row["failed"].whole
    taken = f"{ms(row['median_s'].number)}, {ms(row['worst_s'].number)}"
    return [ms(prefill_s) if prefill_s else "", taken + (f", {failed} failed" if failed else "")]


def _ratios(both: list[Node]) -> str:
    rows = []
    for row in both[0]["ratios"].rows:
        other = both[1]["ratios"].the(claim=row["claim"].text)
        seen = [digits(one["ratio"].number, 2) for one in (row, other)]
        rows.append([row["claim"].text, *seen, f"{row['bound'].number:g}"])
    return table(["ratio", "reserved", "one core each", "we asked for at most"], rows)


def verify(record: Record) -> str:
    """The handover's median and worst with and without checksums, by prompt length."""
    measured = record.result("handover")["measured"]
    lengths = sorted({row["tokens"].whole for row in measured.rows if _is_ours(row)})
    rows = []
    for how, name in (
        ("off", "pdconn"),
        ("sample", "pdconn-sample"),
        ("always", "pdconn-always"),
    ):
        found = [measured.the(contestant=name, tokens=length) for length in lengths]
        taken = [f"{ms(row['median_s'].number)}, {ms(row['worst_s'].number)}" for row in found]
        rows.append([f"`{how}`", *taken])
    return table(["`verify`", *(f"{spaced(length)} tokens, ms" for length in lengths)], rows)


def _is_ours(row: Node) -> bool:
    return row["contestant"].text == "pdconn"


def demo(record: Record) -> str:
    """What moved for the longer prompts of the demo, in the order they were asked."""
    headings = ["prompt tokens", "full attention, MB", "windows, MB", "not moved: windows",
                "not moved: prefix hits", "descriptors"]  # fmt: skip
    fields = ("full_bytes", "window_bytes", "saved_by_window_bytes", "saved_by_hits_bytes")
    rows = []
    for row in record.result("demo").rows:
        tokens = row["prompt_tokens"].whole
        if tokens < 200:
            continue
        moved = [f"{row[field].number / 1e6:.3f}" for field in fields]
        again = ", asked before" if row["saved_by_hits_bytes"].whole else ""
        rows.append([f"{spaced(tokens)}{again}", *moved, str(row["descriptors"].whole)])
    return table(headings, rows)
