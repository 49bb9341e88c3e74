"""Tables of moving bytes: the transfer beside one READ, a pull's stages, a lender's load."""

from __future__ import annotations

from tests.throughput.tables.markdown import ms, percent, spaced, table
from tests.throughput.tables.node import Node
from tests.throughput.tables.record import Record

_PATHS = {
    "shm-huge": "CMA, huge pages",
    "shm": "CMA, 4 KiB pages",
    "tcp": "TCP on loopback",
}
_LINES = ("pdconn", "layered", "raw", "memcpy")


def transfer(record: Record) -> str:
    """Throughput by path and block size, and what pulls at once do to each other."""
    headings = ["path", "KiB a block", "pdconn", "layer by layer", "single READ", "memcpy"]
    rows = []
    for case in record.result("blocks")["cases"].rows:
        lines = {name: case["lines"].the(line=name) for name in _LINES}
        ours = lines["pdconn"]
        gbps = {name: _gbps(one) for name, one in lines.items()}
        rows.append(
            [
                _path(case),
                _block_kib(case, ours),
                f"**{gbps['pdconn']}**, {_of_raw(ours)}",
                f"{gbps['layered']}, {_of_raw(lines['layered'])}",
                gbps["raw"],
                gbps["memcpy"],
            ]
        )
    return f"{table(headings, rows)}\n\n{_at_once(record.result('at_once'))}"


def _at_once(document: Node) -> str:
    headings = ["pulls at once", "path", "together, of one pull's throughput",
                "slowest, of the median's time"]  # fmt: skip
    rows = []
    for case in document["cases"].rows:
        ours = case["lines"].the(line="pdconn")
        seen = [f"{ours[field].number:.2f}" for field in ("of_alone", "slowest_pull")]
        rows.append([str(case["requests"].whole), _path(case), *seen])
    return table(headings, rows)


def _path(case: Node) -> str:
    name = case["path"].text
    return _PATHS.get(name, name)


def _block_kib(case: Node, line: Node) -> str:
    """Of a model whose layers all keep all tokens; decode recomputes the last one."""
    blocks = -(-(case["prompt_tokens"].whole - 1) // case["block_tokens"].whole)
    return spaced(round(line["nbytes"].number / blocks / 1024))


def _gbps(line: Node) -> str:
    gbps = line["bytes_per_s"].number / 1e9
    return f"{gbps:.2f}" if gbps < 10 else f"{gbps:.1f}"


def _of_raw(line: Node) -> str:
    return f"{line['of_raw'].number:.2f}"


def mooncake(record: Record) -> str:
    """Throughput beside Mooncake's transfer engine, by block size."""
    headings = ["path", "KiB a block", "pdconn", "single READ", "Mooncake, over TCP",
                "pdconn, times Mooncake"]  # fmt: skip
    rows = []
    for case in record.result("mooncake")["cases"].rows:
        lines = {name: case["lines"].the(line=name) for name in ("pdconn", "raw", "mooncake")}
        ours, theirs = (lines[name]["bytes_per_s"].number for name in ("pdconn", "mooncake"))
        gbps = [_gbps(one) for one in lines.values()]
        kib = _block_kib(case, lines["pdconn"])
        rows.append([_path(case), kib, *gbps, f"**{ours / theirs:.2f}**"])
    return table(headings, rows)


def waterfall(record: Record) -> str:
    """The stages of one pull, and all of them but the read."""
    pull = record.result("pull")
    rows = [
        [row["stage"].text, ms(row["median_s"].number), ms(row["worst_s"].number)]
        for row in pull["stages"].rows
    ]
    rows.append(["**all but the read**", f"**{ms(pull['overhead_s'].number)}**", ""])
    settings = pull["settings"]
    what = (
        f"{settings['model'].text}, {spaced(settings['prompt'].whole)} tokens, "
        f"{pull['nbytes'].number / 1e6:.0f} MB"
    )
    return table([what, "median, ms", "worst, ms"], rows)


def lender_load(record: Record) -> str:
    """The lender's thread and its scheduler's steps, with readers and without."""
    loads = [record.result(name) for name in ("in_all", "each")]
    rows = [["no readers", percent(loads[0]["summary"]["lender_cpu_idle"].number), "1"]]
    for load in loads:
        summary = load["summary"]
        steps = [f"{summary[f'step_{part}_ratio'].number:.2f}" for part in ("p50", "p99")]
        rate = load["rate"].number
        said = f"{spaced(round(rate))} claims, renewals and dones a second each"
        who = f"{load['readers'].whole} readers, {said}: {spaced(round(3 * rate))} messages"
        cpu = [percent(summary[field].number) for field in ("lender_cpu", "lender_cpu_least")]
        rows.append([who, ", ".join(cpu), ", ".join(steps)])
    headings = ["", "the lender's thread, of a core: median, least",
                "the scheduler's steps, times: median, p99"]  # fmt: skip
    return table(headings, rows)


_WARMTHS = {
    "cold": "cold",
    "connected": "connected, nothing read ahead",
    "warmed": "**`warm_peers`**",
    "elsewhere": "`warm_peers` names somebody else",
}


def warm(record: Record) -> str:
    """What the first pull from a lender takes beyond the next one."""
    medians = record.result("warm")["medians"]
    paths = list(dict.fromkeys(row["path"].text for row in medians.rows))
    rows = []
    for kind, words in _WARMTHS.items():
        over = [medians.the(path=path, kind=kind)["overhead_s"].number for path in paths]
        rows.append([words, *(f"{round(1e3 * each, 1) + 0.0:.1f}" for each in over)])
    return table(["first pull beyond the next, ms", *(_PATHS.get(p, p) for p in paths)], rows)


def ucx_backend(record: Record) -> str:
    """The UCX backend beside NIXL, by block size."""
    rows = []
    for size in record.result("ucx")["sizes"].rows:
        gbps = [f"{size[name].number:.2f}" for name in ("nixl", "ucx")]
        low, high = (f"{size[name].number:.2f}" for name in ("low", "high"))
        ratio = f"**{size['ratio'].number:.2f}**, {low} to {high}"
        rows.append([spaced(size["block_kib"].whole), *gbps, ratio])
    return table(["KiB a block, TCP", "NIXL, GB/s", "UCX, GB/s", "UCX of NIXL"], rows)
