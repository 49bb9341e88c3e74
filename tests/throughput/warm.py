"""Time of the first pull from a lender beyond that of the next one, cold and warmed.

Every turn starts a new lender and a new puller (sockets, threads, NIXL), pulls one request
and then the same again.  The first pull of a cold puller includes the greeting, connecting
NIXL and the endpoint that UCX sets up with the first read::

    cold        without warm_peers
    connected   warm_peers without a page to read into: greeted and connected
    warmed      warm_peers: a page was read, too
    elsewhere   warm_peers names a port without a lender: as cold

The kinds alternate in rounds, so that drift of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pdconn.lender.server import Lender
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.ticket import Ticket
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller
from pdconn.puller.warmup import Place, WarmUp
from pdconn.tools.bench.transfer.arena import BenchMemory
from pdconn.tools.bench.transfer.paths import PATHS
from pdconn.tools.bench.transfer.workload import Workload, extent, placed
from pdconn.tools.lab.ports import LOCALHOST, free_ports
from pdconn.tools.output.table import table
from pdconn.tools.plan.engine_shape import parse_engine
from pdconn.tools.plan.shapes import built_in
from registration.scratch import Scratch
from tests.threads.inside import num_warm
from transport import HOST

KINDS = ("cold", "connected", "warmed", "elsewhere")
TRAITS = {"model": "warm"}
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Turn:
    """The first and the next pull of one boot, in seconds."""

    path: str
    kind: str
    first_s: float
    next_s: float

    @property
    def overhead_s(self) -> float:
        """What the first pull took longer."""
        return self.first_s - self.next_s


def workload_of(prompt: int) -> Workload:
    model = built_in("gpt-oss-20b")
    engine = parse_engine("layout=BLHNC,block=16", model)
    return Workload(engine, engine, prompt, "random")


def ticket_of(workload: Workload, port: int, boot: str, request: str) -> Ticket:
    lists = workload.lent[0].lists
    tokens = workload.prompt_tokens
    return Ticket("prefill", boot, request, LOCALHOST, port, tokens, "prompt", lists)


# The lender's process


def lend(prompt: int) -> None:
    """For each line ``path boot``: end the boot before, begin that, lend two requests."""
    workload = workload_of(prompt)
    [described] = workload.theirs()
    with BenchMemory(extent(described), huge_pages=False) as arena:
        references = placed(described, arena.memory)
        line = sys.stdin.readline()
        while line:
            path, boot = line.split()
            with PATHS[path].open_transport(f"warm-prefill-{boot}") as transport:
                transport.register([arena.memory])
                rank = RankGeometry(0, 0, transport.address(), references)
                welcome = Welcome.in_our_version("prefill", boot, TRAITS, (rank,))
                with closing(Lender(welcome, LOCALHOST, 0)) as lender:
                    for request in ("first", "next"):
                        ticket = ticket_of(workload, lender.port, boot, request)
                        lender.lend(request, ticket.digest(), PATIENCE_S)
                    print(lender.port, flush=True)
                    line = sys.stdin.readline()


# The puller's process


class Lending:
    """The other process."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self._boots = 0

    def boot(self, path: str) -> tuple[int, str]:
        """A new lender; its port and incarnation."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._boots += 1
        self._child.stdin.write(f"{path} boot{self._boots}\n")
        self._child.stdin.flush()
        return int(self._child.stdout.readline()), f"boot{self._boots}"


@contextmanager
def lending(prompt: int) -> Iterator[Lending]:
    """A lender's process, gone at the end."""
    command = [sys.executable, "-m", "tests.throughput.warm", "--lend", "--prompt", str(prompt)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield Lending(child)
        assert child.stdin is not None
        child.stdin.close()


def measure(
    paths: Sequence[str], rounds: int, prompt: int, kinds: Sequence[str] = KINDS
) -> list[Turn]:
    """Each kind over each path once a round; a round before is not counted."""
    workload = workload_of(prompt)
    ours = workload.ours()
    taken = []
    with BenchMemory(extent(ours), huge_pages=False) as arena, lending(prompt) as lender:
        me = Rank("decode", 0, 1, 0, placed(ours, arena.memory), TRAITS)
        for number in range(rounds + 1):
            for path in paths:
                for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                    turn = _turn(workload, me, arena, lender, path=path, kind=kind)
                    if number:
                        taken.append(turn)
    return taken


def _turn(
    workload: Workload, me: Rank, arena: BenchMemory, lender: Lending, *, path: str, kind: str
) -> Turn:
    port, boot = lender.boot(path)
    transport = PATHS[path].open_transport(f"warm-decode-{boot}")
    scratch = Scratch.on(HOST)
    transport.register([arena.memory, scratch.memory])
    with closing(Puller(me, transport, warm_up=_warm_up(kind, port, scratch))) as puller:
        give_up = time.monotonic() + PATIENCE_S
        while kind in ("connected", "warmed") and not num_warm(puller):
            if time.monotonic() > give_up:
                raise RuntimeError(f"not warm after {PATIENCE_S:g} s")
            time.sleep(0.005)
        first, then = (
            _pull(workload, puller, ticket_of(workload, port, boot, request))
            for request in ("first", "next")
        )
    return Turn(path, kind, first, then)


def _warm_up(kind: str, port: int, scratch: Scratch) -> WarmUp:
    if kind == "cold":
        return WarmUp()
    place = Place(LOCALHOST, port if kind != "elsewhere" else free_ports(1)[0])
    return WarmUp((place,), None if kind == "connected" else scratch.memory)


def _pull(workload: Workload, puller: Puller, ticket: Ticket) -> float:
    [need] = workload.needs()
    began = time.monotonic()
    puller.post_command(ClaimTicket(ticket.request_id, f"here/{ticket.request_id}", ticket))
    puller.post_command(ReadBlocks(ticket.request_id, need))
    while not (outcome := puller.take_results()).records:
        if outcome.failed or time.monotonic() - began > PATIENCE_S:
            raise RuntimeError(f"not pulled: {outcome.failed}")
        puller.wait_for_report(0.05)
    return time.monotonic() - began


def median(taken: Sequence[Turn], path: str, kind: str) -> float:
    """Of the overhead of the first pull, in seconds."""
    return statistics.median(
        turn.overhead_s for turn in taken if (turn.path, turn.kind) == (path, kind)
    )


def medians(taken: Sequence[Turn]) -> list[dict[str, object]]:
    """The overhead of the first pull in seconds, by path and kind."""
    cases = dict.fromkeys((turn.path, turn.kind) for turn in taken)
    return [
        {"path": path, "kind": kind, "overhead_s": median(taken, path, kind)}
        for path, kind in cases
    ]


def render(taken: Sequence[Turn]) -> str:
    """A row per path and kind, in milliseconds."""
    rows = []
    for path, kind in dict.fromkeys((turn.path, turn.kind) for turn in taken):
        turns = [turn for turn in taken if (turn.path, turn.kind) == (path, kind)]
        overhead = median(taken, path, kind)
        rows.append([
            path,
            kind,
            f"{1e3 * statistics.median(turn.first_s for turn in turns):.1f}",
            f"{1e3 * statistics.median(turn.next_s for turn in turns):.1f}",
            f"{1e3 * overhead:.1f}",
            f"{1e3 * max(turn.overhead_s for turn in turns):.1f}",
            f"{overhead / median(taken, path, 'cold'):.2f}",
        ])  # fmt: skip
    head = ["path", "", "first\nms", "next\nms", "overhead\nms", "worst\nms", "of cold"]
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--path", default="tcp,shm", help=f"some of {', '.join(PATHS)} (%(default)s)")
    add("--prompt", type=int, default=256, help="tokens (%(default)s)")
    add("--rounds", type=int, default=7, help="turns of each kind (%(default)s)")
    add("--json", type=Path, help="where to write all measurements")
    add("--lend", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.lend:
        lend(options.prompt)
        return 0
    taken = measure(options.path.split(","), options.rounds, options.prompt)
    print(render(sorted(taken, key=lambda turn: (turn.path, KINDS.index(turn.kind)))))
    if options.json is not None:
        turns = [{**asdict(turn), "overhead_s": turn.overhead_s} for turn in taken]
        document = {"medians": medians(taken), "turns": turns}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
