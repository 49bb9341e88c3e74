"""Tables of what users of engines notice: the serving bench, and engines beside pulls."""

from __future__ import annotations

from tests.throughput.tables.markdown import digits, ms, table
from tests.throughput.tables.node import Node
from tests.throughput.tables.record import Record

_NAMES = {
    "pdconn": "**pdconn**",
    "in-tree": "vLLM's in-tree NixlConnector",
    "single": "one engine alone",
}
_KINDS = {
    "quiet": "none",
    "cached": "`cached`: answered from decode's own cache",
    "instant": "`instant`: wait as for a pull, and nothing is pulled",
    "pulled": "pulled",
}


def serve(record: Record) -> str:
    """What each contestant's requests saw, medians and 99th percentiles."""
    headings = ["ms", "TTFT", "ITL", "handover", "within bounds", "goodput, requests/s", "wrong"]
    rows = []
    for one in record.result("serve")["contestants"].rows:
        name = one["contestant"].text
        rows.append(
            [
                _NAMES.get(name, name),
                *(_spread(one[field]) for field in ("ttft", "itl", "handover")),
                f"{one['met'].whole} of {one['requests'].whole}",
                f"{one['goodput_per_s'].number:.2f}",
                str(one["wrong"].whole),
            ]
        )
    return table(headings, rows)


def _spread(node: Node) -> str:
    if node.value is None:
        return ""
    return f"{ms(node['p50_s'].number)}, {ms(node['p99_s'].number)}"


def engine_thread(record: Record) -> str:
    """Milliseconds of connector work on the engine's thread, a step."""
    rows = []
    for side in record.result("thread")["sides"].rows:
        steps = side["all_steps"]
        took = [digits(steps[field].number) for field in ("mean", "p50", "p99", "worst")]
        beyond = digits(side["per_request"].number)
        rows.append([side["name"].text, f"{side['in_flight'].number:g}", *took, beyond])
    return table(
        ["ms a step", "in flight", "mean", "median", "p99", "worst", "a request, beyond that"], rows
    )


def itl(record: Record) -> str:
    """Time between tokens of running requests, by what comes in beside them."""
    kinds = record.result("itl")["kinds"]
    rows = []
    for kind in kinds.rows:
        name = kind["kind"].text
        times = [digits(kind[field].number) for field in ("p50", "p99")]
        rows.append([_KINDS.get(name, name), f"{kind['per_s'].number:.1f}", *times])
    pulled = kinds.the(kind="pulled")
    for under in ("instant", "cached"):
        other = kinds.the(kind=under)
        of = [f"{pulled[part].number / other[part].number:.3f}" for part in ("p50", "p99")]
        rows.append([f"pulled, times {under}", "", *(f"**{each}**" for each in of)])
    return table(["requests beside the streams", "a second", "p50, ms", "p99, ms"], rows)
