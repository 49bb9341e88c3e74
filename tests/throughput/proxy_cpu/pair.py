"""Two proxies: each at a port of its own, or both at one port that the kernel shares out.

The second is what a ``--workers 2`` would do (``SO_REUSEPORT``).  What is compared is the processor
time of both for a streamed request, and how evenly connections are spread over them: a kept
connection stays where the kernel put it.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pdconn.tools.lab.ports import free_ports
from pdconn.tools.output.table import table
from tests.throughput.proxy_cost.processes import started
from tests.throughput.proxy_cpu.raw_client import ask_all, request
from tests.throughput.proxy_cpu.routers import RawFleet, RunningRouter, our_router, raw_fleet

CONNECTIONS, STREAMS = 32, 96

# Sets the option on every socket that the proxy binds; its admin pages have ports of their own.
_SHARING = """
import socket, sys
from pdconn.tools.cli.main import main

class Sharing(socket.socket):
    def bind(self, address):
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().bind(address)

socket.socket = Sharing
sys.exit(main())
"""


@dataclass(frozen=True)
class PairRow:
    """Two proxies: processor time of both a stream, and the busier one's share of that."""

    name: str
    ms: float
    busier: float
    worst_busier: float


@contextmanager
def _apart(fleet: RawFleet, place: Path) -> Iterator[list[RunningRouter]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                our_router(
                    f"apart-{one}", fleet, place, policy="round-robin", looks_up=False, tree=None
                )
            )
            for one in range(2)
        ]


@contextmanager
def _sharing(fleet: RawFleet, place: Path) -> Iterator[list[RunningRouter]]:
    port, *admin_ports = free_ports(3)
    with ExitStack() as stack:
        running = []
        for number, admin in enumerate(admin_ports):
            command = [sys.executable, "-c", _SHARING, "proxy", "--policy", "round-robin"]
            command += ["--port", str(port), "--admin-port", str(admin)]
            command += ["--prefill", fleet.prefill, "--decode", fleet.decode]
            process = stack.enter_context(started(f"shared-{number}", command, admin, place))
            running.append(RunningRouter(port, {"": (process.pid,)}))
        yield running


def measure_pairs(rounds: int, place: Path) -> list[PairRow]:
    """Both ways in turn; each round has new connections."""
    rng = random.Random(1)
    with raw_fleet(place, 1) as fleet, ExitStack() as stack:
        ways = {
            "a port each": stack.enter_context(_apart(fleet, place)),
            "one port, `SO_REUSEPORT`": stack.enter_context(_sharing(fleet, place)),
        }
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, pair in ways.items():
                found = _run(pair, rng)
                if number > 0:
                    seen[name].append(found)
    return [
        PairRow(
            name,
            median(ms for ms, _ in found),
            median(share for _, share in found),
            max(share for _, share in found),
        )
        for name, found in seen.items()
    ]


def _run(pair: Sequence[RunningRouter], rng: random.Random) -> tuple[float, float]:
    messages = [request(1000, streams=True, rng=rng) for _ in range(8)]
    before_s = [one.used_s()[""] for one in pair]
    ports = [one.port for one in pair]
    asyncio.run(ask_all(ports, messages, number=STREAMS, at_once=CONNECTIONS, streams=True))
    took_s = [one.used_s()[""] - was_s for one, was_s in zip(pair, before_s, strict=True)]
    return 1000 * sum(took_s) / STREAMS, max(took_s) / sum(took_s)


def pairs_shown(rows: Sequence[PairRow]) -> str:
    """The table."""
    headings = ["two proxies", "both, ms\na stream", "the busier's\nshare", "its most"]
    cells = [[row.name, f"{row.ms:.2f}", f"{row.busier:.0%}", f"{row.worst_busier:.0%}"]
             for row in rows]  # fmt: skip
    return table(headings, cells)
