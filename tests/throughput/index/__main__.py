"""Our index beside Dynamo's: the same events and look-ups, one core each.

    PDCONN_DYNAMO_PYTHON=.rival/bin/python PDCONN_MOONCAKE_TRACE=conversation_trace.jsonl \\
        python -m tests.throughput.index --json index.json

The rival is ``ai-dynamo-runtime`` in an environment of its own (``pip install
ai-dynamo-runtime==1.6.1``), whose Python the variable names; without it only ours are measured.
Without a trace, one of ``examples/mooncake_trace.py`` is made.  Each index is a process pinned to
one core, in turns; the figures are medians of the rounds, of processor time with all threads.
``recording.py`` says how the trace becomes events, ``replay.py`` what is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from examples.mooncake_trace import requests as made_requests
from pdconn.tools.output.table import table
from pdconn.tools.plan.store.curve import TracedRequest
from pdconn.tools.plan.store.trace import TraceCounts, read_trace
from tests.throughput.index.recording import Fleet, Step, save, steps
from tests.throughput.mooncake.__main__ import TRACE_VARIABLE

RIVAL_VARIABLE = "PDCONN_DYNAMO_PYTHON"
"""Names the Python of an environment that has ``ai-dynamo-runtime``."""
ROOT = Path(__file__).parents[3]
NAMES = {
    "windows": "pdconn, full attention and windows",
    "full": "pdconn, full attention",
    "python-windows": "pdconn in Python, full attention and windows",
    "python-full": "pdconn in Python, full attention",
    "dynamo": "Dynamo, RadixTree",
    "dict": "a dictionary of sets, in Python",
}


@dataclass(frozen=True)
class Row:
    """The medians of one index over the rounds.

    Attributes:
        ops: blocks stored and removed.
        kops_s, kops_wall_s: thousands of these a second, of processor time and of the clock.
        p50_us, p99_us: of look-ups, of processor time; ``wall_`` of the clock.
        block_nbytes: growth of resident memory for each block held at the end.
        wrong: look-ups that found other than what the caches held.
        shorter: look-ups whose best match a window makes shorter.
    """

    name: str
    ops: int
    kops_s: float
    kops_wall_s: float
    p50_us: float
    p99_us: float
    wall_p50_us: float
    wall_p99_us: float
    block_nbytes: float
    look_ups: int
    wrong: int
    shorter: int


def requests_of(trace: Path | None, number: int) -> list[TracedRequest]:
    """The first requests of a trace, or of the generated one."""
    if trace is not None:
        with trace.open("rb") as file:
            return list(islice(read_trace(file, TraceCounts()), number))
    lines = (json.dumps(one).encode() for one in made_requests(number))
    return list(read_trace(lines, TraceCounts()))


def held_blocks(recorded: Sequence[Step], *, windows: bool) -> int:
    """Blocks that all pods hold at the end, each group's copy counted by itself."""
    groups = (0, 1) if windows else (0,)
    return sum(step.stored[group] - step.removed[group] for step in recorded for group in groups)


def replayed(name: str, file: Path, pods: int, core: int) -> dict[str, Any]:
    """One round of one index, in a process of its own.

    Raises:
        CalledProcessError: it failed, or did not see its last batch.
    """
    python = os.environ[RIVAL_VARIABLE] if name == "dynamo" else sys.executable
    script = ROOT / "tests/throughput/index/replay.py"
    done = subprocess.run(
        [python, str(script), name, str(file), str(pods), str(core)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def row_of(name: str, rounds: Sequence[dict[str, Any]], held: int) -> Row:
    """The medians of an index; ``held``: blocks held at the end."""
    first = rounds[0]

    def rate(key: str) -> float:
        return median(one["ops"] / one[key] / 1000 for one in rounds)

    def percentile(key: str, number: int) -> float:
        return median(1e6 * quantiles(one[key], n=100)[number - 1] for one in rounds)

    return Row(
        NAMES[name], first["ops"], rate("fill_s"), rate("fill_wall_s"),
        percentile("used_s", 50), percentile("used_s", 99),
        percentile("wall_s", 50), percentile("wall_s", 99),
        median(one["grown_nbytes"] for one in rounds) / held,
        len(first["used_s"]), first["wrong"], first["shorter"],
    )  # fmt: skip


def measure(recorded: Sequence[Step], fleet: Fleet, rounds: int, names: Sequence[str]) -> list[Row]:
    """Every index in turn, ``rounds`` times."""
    core = max(os.sched_getaffinity(0))
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "steps.pickle"
        save(recorded, file)
        for number in range(rounds):
            for name in names:
                print(f"{number + 1}: {name}", file=sys.stderr, flush=True)
                taken[name].append(replayed(name, file, fleet.pods, core))
    return [
        row_of(name, them, held_blocks(recorded, windows=name.endswith("windows")))
        for name, them in taken.items()
    ]


def shown(rows: Sequence[Row]) -> str:
    """The table."""
    headings = [
        "", "blocks\n1000/s", "wall\n1000/s", "look-up\np50, us", "p99\nus", "wall p50\nus",
        "wall p99\nus", "bytes\na block", "block\noperations", "wrong", "cut by\nwindows",
    ]  # fmt: skip
    cells = [
        [
            row.name, f"{row.kops_s:.0f}", f"{row.kops_wall_s:.0f}", f"{row.p50_us:.0f}",
            f"{row.p99_us:.0f}", f"{row.wall_p50_us:.0f}", f"{row.wall_p99_us:.0f}",
            f"{row.block_nbytes:.0f}", str(row.ops), f"{row.wrong} of {row.look_ups}",
            str(row.shorter),
        ]
        for row in rows
    ]  # fmt: skip
    return table(headings, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--trace", type=Path, default=os.environ.get(TRACE_VARIABLE), help="Mooncake's format")
    add("--requests", type=int, default=2000, help="of the trace (%(default)s)")
    add("--pods", type=int, default=16, help="prefill engines (%(default)s)")
    add("--blocks", type=int, default=20_000, help="of a pod's full attention (%(default)s)")
    add("--rounds", type=int, default=3, help="processes of each index (%(default)s)")
    add("--only", nargs="*", choices=list(NAMES), help="these indexes")
    add("--json", type=Path, help="write the rows here too")
    args = parser.parse_args(argv)
    fleet = Fleet(args.pods, args.blocks)
    recorded = list(steps(requests_of(args.trace, args.requests), fleet))
    names = [
        name for name in args.only or NAMES if name != "dynamo" or RIVAL_VARIABLE in os.environ
    ]
    rows = measure(recorded, fleet, args.rounds, names)
    print(shown(rows))
    if args.json:
        document = {"index": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
