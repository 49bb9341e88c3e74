"""Cost of a pull for the threads of a decode engine, and for a Python thread beside them.

    python -m tests.throughput.pull_cost --json pull_cost.json

A lender without a model, in a process of its own, lends prompts, and a real puller pulls them
over real sockets and NIXL at a steady rate into memory of the same geometry.  Beside it a
*model* takes steps on the thread that posts to the puller: by turns it computes in plain
Python, and hashes with the interpreter's lock released, as a model's kernels do.  Phases with
and without pulls alternate, and the model has a core of its own where there are two.

held
    processor time of the puller's and the reader's thread, but for what lets go of the lock:
    what NIXL's bindings do without it (checking a READ's descriptors, posting it, which copies,
    and looking after it), and the system calls ``send``, ``recv`` and ``epoll_wait``.  The
    stopwatch around those is in it.
lost
    the time that a model's steps take beyond those of phases without pulls, for each pull.
    It has everything in it: waits for the lock, wake-ups, and what the model's own thread posts
    and collects.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pdconn.planning.plan import Need
from pdconn.protocol.messages import Described, RankGeometry
from pdconn.protocol.ticket import BlockList, Ticket, parse_ticket
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller
from pdconn.tools.output.table import table
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    build_kv_cache_references,
)
from tests.fakes.layouts import layout_memory
from tests.throughput.engines.partner import LendingPartner, Memory
from tests.throughput.engines.threads import cpu_clock
from tests.throughput.pull_cost.watch import UNLOCKED, Watch, watching

THREADS = ("pdconn-puller", "pdconn-reader")
GROUPS, LAYERS, WINDOW, HEADS, BLOCK, TOKEN_NBYTES = 3, 2, 64, 4, 32, 256
_PYTHON_LOOPS, _HASHED, _PARTS = 400, bytes(1 << 15), 60
_GIVE_UP_S = 10.0


def shape(layout: str, num_blocks: int) -> Described:
    """Two sliding-window groups and a full one, as ``tests.throughput.itl``'s model has them."""
    groups = []
    for number in range(GROUPS):
        is_full = number == GROUPS - 1
        memory = layout_memory(
            layout,
            base=1 << 21,
            num_blocks=num_blocks,
            layers=[f"{number}.{layer}" for layer in range(LAYERS)],
            num_heads=HEADS,
            block_tokens=BLOCK,
            token_nbytes=TOKEN_NBYTES,
        )
        kind = AttentionKind.FULL if is_full else AttentionKind.SLIDING_WINDOW
        groups.append(GroupMemory(kind, None if is_full else WINDOW, BLOCK, memory))
    references: KVCacheReferences = build_kv_cache_references(groups)
    return Described(4, "model", "boot", {"model": "none"}, (RankGeometry(0, 0, b"", references),))


# The lender's process


def lend(like: Described) -> None:
    """For each line on standard input, tokens and a count, lend so many such prompts."""
    with LendingPartner(like) as partner:
        print("ready", flush=True)
        for line in sys.stdin:
            tokens, count = map(int, line.split())
            print(json.dumps([partner.lend([1] * tokens) for _ in range(count)]), flush=True)


@contextlib.contextmanager
def lender(options: argparse.Namespace) -> Iterator[Callable[[int], list[Ticket]]]:
    """A lending process; what is yielded lends so many prompts."""
    command = [sys.executable, "-m", "tests.throughput.pull_cost", "--lend", *sys.argv[1:]]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        given, said = child.stdin, child.stdout
        assert given is not None
        assert said is not None
        if said.readline() != "ready\n":
            raise RuntimeError("the lender did not start")

        def ask(count: int) -> list[Ticket]:
            given.write(f"{options.prompt} {count}\n")
            given.flush()
            return [parse_ticket(params) for params in json.loads(said.readline())]

        yield ask
        given.close()


# The reader's process


@dataclass
class Phase:
    """One phase.

    Attributes:
        pulls: how many were received.
        cpu_us: of each thread and watched function, for each pull.
        calls: of watched functions, for each pull.
        steps_ms: of the model.
        took_ms: of each pull, from posting to being reported.
    """

    pulls: int
    cpu_us: dict[str, float]
    calls: dict[str, float]
    steps_ms: list[float]
    took_ms: list[float] = field(default_factory=list)


class Model:
    """Takes steps on a thread that posts to the puller, and collects once a step."""

    def __init__(self, puller: Puller, memory: Memory, options: argparse.Namespace) -> None:
        self._puller, self._memory, self._options = puller, memory, options
        self._number = 0
        self._sent: dict[str, float] = {}
        self.posts = Watch()
        self._post_both = self.posts.around(self._post)
        self._collect = self.posts.around(puller.take_results)

    def run(self, tickets: Sequence[Ticket], seconds: float) -> tuple[list[float], list[float]]:
        """Step for so long, pulling ``tickets`` evenly; returns what steps and pulls took, ms."""
        ready = [(ticket, self._need(ticket)) for ticket in reversed(tickets)]
        steps: list[float] = []
        took: list[float] = []
        each = seconds / (len(tickets) + 1)
        began = time.perf_counter()
        due = began + each
        while (now := time.perf_counter()) < began + seconds or self._sent:
            if now > began + seconds + _GIVE_UP_S:
                raise RuntimeError(f"{len(self._sent)} pulls did not end")
            if ready and now >= due:
                self._post_both(*ready.pop())
                due += each
            self._compute()
            results = self._collect()
            ended = time.perf_counter()
            steps.append(1e3 * (ended - now))
            for failed in results.failed:
                raise RuntimeError(f"{failed.request}: {failed.reason}")
            took += [1e3 * (ended - self._sent.pop(record.request)) for record in results.records]
        return steps, took

    def _compute(self) -> None:
        """Twenty microseconds of Python, forty without the lock, and so on."""
        for _ in range(self._options.parts):
            total = 0
            for number in range(_PYTHON_LOOPS):
                total += number & 3
            hashlib.sha1(_HASHED).digest()

    def _need(self, ticket: Ticket) -> Need:
        lists = tuple(
            BlockList(lent.first, ours.ids[-len(lent.ids) :])
            for lent, ours in zip(ticket.blocks, self._memory.lists(ticket.num_tokens), strict=True)
        )
        return Need.for_range(0, ticket.num_tokens - 1, lists)

    def _post(self, ticket: Ticket, need: Need) -> None:
        self._number += 1
        request = f"r{self._number}"
        self._sent[request] = time.perf_counter()
        self._puller.post_command(ClaimTicket(request, f"model/{request}", ticket))
        self._puller.post_command(ReadBlocks(request, need))


def measure(options: argparse.Namespace) -> list[Phase]:
    """Phases without and with pulls, in turns, after one that does not count."""
    like = shape(options.layout, options.blocks)
    memory = Memory(like, "reader")
    me = Rank("reader", 0, 1, 0, memory.references, memory.traits)
    with watching(memory.transport) as watches, lender(options) as ask:
        puller = Puller(me, memory.transport)
        try:
            _pin()
            clocks = {name: cpu_clock(name) for name in THREADS}
            model = Model(puller, memory, options)
            watches["engine: post, collect"] = model.posts
            model.run(ask(20), 1.0)
            return [
                _phase(model, ask(round(options.rate * options.seconds)) if number % 2 else [],
                       clocks, watches, options.seconds)
                for number in range(2 * options.rounds)
            ]  # fmt: skip
        finally:
            puller.close()
            memory.close()


def _phase(
    model: Model,
    tickets: list[Ticket],
    clocks: dict[str, int],
    watches: dict[str, Watch],
    seconds: float,
) -> Phase:
    for watch in watches.values():
        watch.calls, watch.cpu_s = 0, 0.0
    before = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
    steps, took = model.run(tickets, seconds)
    cpu = {name: time.clock_gettime(clock) - before[name] for name, clock in clocks.items()}
    cpu |= {name: watch.cpu_s for name, watch in watches.items()}
    count = max(1, len(tickets))
    return Phase(
        len(tickets),
        {name: 1e6 * spent / count for name, spent in cpu.items()},
        {name: watch.calls / count for name, watch in watches.items()},
        steps,
        took,
    )


def _pin() -> None:
    """The model gets the first core, everything else the second."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    main = threading.main_thread().native_id
    children = Path(f"/proc/self/task/{main}/children").read_text(encoding="utf-8").split()
    for process in ("self", *children):
        for thread in map(int, os.listdir(f"/proc/{process}/task")):
            os.sched_setaffinity(thread, cores[:1] if thread == main else cores[1:2])


# Results


def summary(phases: Sequence[Phase]) -> dict[str, Any]:
    """Medians over the phases with pulls; microseconds for each pull."""
    busy, quiet = ([p for p in phases if bool(p.pulls) is pulls] for pulls in (True, False))
    cpu = {name: statistics.median(p.cpu_us[name] for p in busy) for name in busy[0].cpu_us}
    held = [
        sum(p.cpu_us[name] for name in THREADS) - sum(p.cpu_us[name] for name in UNLOCKED)
        for p in busy
    ]
    lost = []
    for without, with_pulls in zip(quiet, busy, strict=True):
        usual = statistics.mean(without.steps_ms)
        lost.append(1e3 * (sum(with_pulls.steps_ms) - usual * len(with_pulls.steps_ms))
                    / with_pulls.pulls)  # fmt: skip
    pooled = {
        name: sorted(ms for p in of for ms in p.steps_ms)
        for name, of in (("quiet", quiet), ("busy", busy))
    }
    steps = {
        f"{name}_{part}_ms": pooled[name][int(len(pooled[name]) * at)]
        for name in pooled
        for part, at in (("p50", 0.5), ("p99", 0.99))
    }
    took = sorted(ms for p in busy for ms in p.took_ms)
    parts = [
        {"what": name, "us": us, "calls": statistics.median(p.calls.get(name, 0) for p in busy)}
        for name, us in cpu.items()
    ]
    return {
        "held_us": statistics.median(held),
        "held_least_us": min(held),
        "lost_us": statistics.median(lost),
        "lost_least_us": min(lost),
        "pull_p50_ms": took[len(took) // 2],
        "pull_p99_ms": took[int(0.99 * len(took))],
        "parts": parts,
        **steps,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON."""
    options = _options(arguments)
    if options.lend:
        lend(shape(options.layout, options.blocks))
        return 0
    phases = measure(options)
    found = summary(phases)
    rows = [[part["what"], f"{part['us']:.0f}", f"{part['calls']:.1f}"] for part in found["parts"]]
    print(table(["of each pull", "us", "calls"], rows))
    print(
        f"held {found['held_us']:.0f} us a pull (least {found['held_least_us']:.0f}), "
        f"lost {found['lost_us']:.0f} us (least {found['lost_least_us']:.0f}); "
        f"a pull takes {found['pull_p50_ms']:.2f} ms, p99 {found['pull_p99_ms']:.2f}; steps "
        + ", ".join(f"{key} {found[key]:.2f}" for key in found if key[:4] in ("quie", "busy"))
    )
    if options.json is not None:
        document = {
            "cores": os.cpu_count(),
            "summary": found,
            "phases": [asdict(phase) for phase in phases],
        }
        options.json.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rate", type=float, default=20.0, help="pulls a second (%(default)s)")
    add("--seconds", type=float, default=3.0, help="of a phase (%(default)s)")
    add("--rounds", type=int, default=5, help="phases of each kind (%(default)s)")
    add("--prompt", type=int, default=1025, help="tokens of a prompt (%(default)s)")
    add("--parts", type=int, default=_PARTS, help="of a step of the model (%(default)s)")
    add("--layout", default="BHLNC", help="memory order (%(default)s)")
    add("--blocks", type=int, default=8192, help="of both caches (%(default)s)")
    add("--lend", action="store_true", help=argparse.SUPPRESS)
    add("--json", type=Path, help="where to write all measurements")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
