"""Where the time of one pull goes, stage by stage, over real sockets and real NIXL.

    python -m tests.throughput.waterfall --json waterfall.json

A lender in one process lends the blocks of a long prompt of a hybrid model, a puller in
another claims and reads them.  The stages, from the engine's first call for a request to its
last::

    claim     first call -> lease granted       (the peer was greeted before)
    plan      runs known, as far as it took longer than the claim
    read      the backend's own account of moving the bytes
    rest      hand-over between threads, preparing the read, noticing its end
    report    received -> the engine has collected it
    free      -> the lender's engine has its blocks back

``claim`` and ``plan`` .. ``report`` follow each other; ``free`` runs beside ``report``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdconn.lender.server import Lender
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.ticket import Ticket
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller
from pdconn.tools.bench.transfer.arena import BenchMemory
from pdconn.tools.bench.transfer.paths import PATHS
from pdconn.tools.bench.transfer.workload import Workload, extent, placed
from pdconn.tools.lab.ports import LOCALHOST
from pdconn.tools.output.table import table
from pdconn.tools.plan.engine_shape import parse_engine
from pdconn.tools.plan.shapes import built_in

TRAITS = {"model": "waterfall"}
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Waterfall:
    """One pull; seconds.  ``all_s`` is from the first word to the collected report."""

    claim_s: float
    plan_s: float
    read_s: float
    rest_s: float
    report_s: float
    free_s: float
    all_s: float
    nbytes: int
    descriptors: int

    @property
    def overhead_s(self) -> float:
        """Everything but the read, the lender's freeing included."""
        return self.all_s - self.read_s + max(0.0, self.free_s - self.report_s)


def workload_of(options: argparse.Namespace) -> Workload:
    model = built_in(options.model)
    engine = parse_engine(f"layout={options.layout},block={options.block}", model)
    return Workload(engine, engine, options.prompt, options.ids)


def ticket_of(workload: Workload, port: int, request: str) -> Ticket:
    lists = workload.lent[0].lists
    return Ticket(
        "prefill", "boot", request, LOCALHOST, port, workload.prompt_tokens, "prompt", lists
    )


# The lender's process


def lend(options: argparse.Namespace) -> None:
    """Lend each request named on standard input; say when it is lent and when it is free."""
    workload, path = workload_of(options), PATHS[options.path]
    [described] = workload.theirs()
    with (
        BenchMemory(extent(described), huge_pages=path.huge_pages) as arena,
        path.open_transport("waterfall-prefill") as transport,
    ):
        transport.register([arena.memory])
        rank = RankGeometry(0, 0, transport.address(), placed(described, arena.memory))
        lender = Lender(Welcome.in_our_version("prefill", "boot", TRAITS, (rank,)), LOCALHOST, 0)
        print(lender.port, flush=True)
        for line in sys.stdin:
            request = line.strip()
            ticket = ticket_of(workload, lender.port, request)
            lender.lend(request, ticket.digest(), PATIENCE_S)
            print(request, flush=True)
            while not (freed := lender.take_freed()):
                time.sleep(0.0001)
            print(json.dumps([freed[0].why, time.monotonic()]), flush=True)
        lender.close()


# The puller's process


def measure(options: argparse.Namespace) -> list[Waterfall]:
    """Pull ``options.times`` times, after two that are not counted."""
    workload, path = workload_of(options), PATHS[options.path]
    command = [sys.executable, "-m", "tests.throughput.waterfall", "--lend"]
    for name in ("model", "layout", "block", "prompt", "ids", "path"):
        command += [f"--{name}", str(getattr(options, name))]
    ours = workload.ours()
    with (
        BenchMemory(extent(ours), huge_pages=path.huge_pages) as arena,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
    ):
        assert child.stdout is not None
        assert child.stdin is not None
        port = int(child.stdout.readline())
        transport = path.open_transport("waterfall-decode")
        transport.register([arena.memory])
        me = Rank("decode", 0, 1, 0, placed(ours, arena.memory), TRAITS)
        puller = Puller(me, transport)
        try:
            taken = [
                pull_once(workload, puller, port, child, f"r{n}") for n in range(options.times + 2)
            ]
        finally:
            puller.close()
            child.stdin.close()
    return taken[2:]


def pull_once(
    workload: Workload, puller: Puller, port: int, child: subprocess.Popen[str], request: str
) -> Waterfall:
    """Have the child lend ``request``, and pull it.

    Raises:
        RuntimeError: it was not pulled.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(request + "\n")
    child.stdin.flush()
    assert child.stdout.readline().strip() == request
    ticket, [need] = ticket_of(workload, port, request), workload.needs()
    began = time.monotonic()
    puller.post_command(ClaimTicket(request, f"here/{request}", ticket))
    puller.post_command(ReadBlocks(request, need))
    while not (outcome := puller.take_results()).records:
        if outcome.failed or time.monotonic() - began > PATIENCE_S:
            raise RuntimeError(f"not pulled: {outcome.failed}")
        puller.wait_for_report(0.05)
    ended = time.monotonic()
    why, freed = json.loads(child.stdout.readline())
    if why != "read":
        raise RuntimeError(f"the lease ended otherwise: {why}")
    [record] = outcome.records
    read = max(record.post_s, record.transfer_s)
    counted = max(record.claim_s, 0.0) + record.plan_wait_s + read
    received = began + record.total_s
    return Waterfall(
        record.claim_s,
        record.plan_wait_s,
        read,
        record.total_s - counted,
        ended - received,
        freed - received,
        ended - began,
        record.moved.nbytes,
        record.num_descriptors,
    )


@dataclass(frozen=True)
class Stage:
    """One stage over all pulls; seconds."""

    stage: str
    median_s: float
    worst_s: float


def stages(taken: Sequence[Waterfall]) -> list[Stage]:
    """Every stage, in the order in which they come."""
    found = []
    for name in ("claim", "plan", "read", "rest", "report", "free"):
        seconds = [getattr(each, f"{name}_s") for each in taken]
        found.append(Stage(name, statistics.median(seconds), max(seconds)))
    return found


def render(found: Sequence[Stage]) -> str:
    """Medians as a table with bars."""
    small = max(one.median_s for one in found if one.stage != "read")
    rows = []
    for one in found:
        bar = "..." if one.stage == "read" else "#" * max(1, round(30 * one.median_s / small))
        rows.append([one.stage, f"{1e3 * one.median_s:.3f}", f"{1e3 * one.worst_s:.3f}", bar])
    return table(["stage", "median\nms", "worst\nms", ""], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="gpt-oss-20b", help="a built-in shape (%(default)s)")
    add("--layout", default="BLHNC", help="memory order of both engines (%(default)s)")
    add("--block", type=int, default=16, help="tokens per block (%(default)s)")
    add("--prompt", type=int, default=32_768, help="tokens (%(default)s)")
    add("--ids", default="random", help="order of block ids (%(default)s)")
    add("--path", default="shm-huge", help=f"one of {', '.join(PATHS)} (%(default)s)")
    add("--times", type=int, default=15, help="pulls (%(default)s)")
    add("--json", type=Path, help="where to write all measurements")
    add("--lend", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.lend:
        lend(options)
        return 0
    taken = measure(options)
    print(render(stages(taken)))
    overhead = statistics.median(each.overhead_s for each in taken)
    first = taken[0]
    print(
        f"{options.prompt:,} tokens, {first.nbytes / 1e6:,.1f} MB in {first.descriptors:,} "
        f"descriptors: all but the read takes {1e3 * overhead:.2f} ms"
    )
    if options.json is not None:
        names = ("model", "layout", "block", "prompt", "ids", "path")
        document = {
            "settings": {name: getattr(options, name) for name in names},
            "nbytes": first.nbytes,
            "descriptors": first.descriptors,
            "overhead_s": overhead,
            "stages": [asdict(one) for one in stages(taken)],
            "pulls": [asdict(each) for each in taken],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
