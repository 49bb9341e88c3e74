"""Requests a second of one router, and what a request takes at half of them.

The proxy, and a picker with its Envoy, get requests of 1000 tokens as fast as 16 connections ask
them; then at half of the slower one's rate, beside a client that asks prefill and decode itself.
Router, engines and client share the machine's cores.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from pdconn.tools.output.table import table
from tests.router.picker.gateway import BUFFERED
from tests.throughput.proxy_cpu.raw_client import Connection, ask_all, request
from tests.throughput.proxy_cpu.routers import RawFleet, our_router, raw_fleet

AT_ONCE, REQUESTS, PACED_S = 16, 1200, 4.0

Ask = Callable[[bytes], Awaitable[object]]


@dataclass
class KneeRow:
    """What each round took: requests a second, and seconds a request at half of the knee."""

    name: str
    ports: tuple[int, ...]
    is_router: bool = True
    rates: list[float] = field(default_factory=list)
    p50_s: list[float] = field(default_factory=list)
    p99_s: list[float] = field(default_factory=list)


def _messages() -> list[bytes]:
    rng = random.Random(2)
    return [request(1000, streams=False, rng=rng) for _ in range(8)]


async def paced(ports: tuple[int, ...], rate: float) -> list[float]:
    """Seconds that requests take, one after the other at ``rate`` a second.

    With two ports each request is asked of both, one after the other.
    """
    loop, messages, free, took = asyncio.get_running_loop(), _messages(), [], []

    async def connect() -> list[Connection]:
        made = [await loop.create_connection(Connection, "127.0.0.1", one) for one in ports]
        return [connection for _, connection in made]

    async def ask(number: int, due_s: float) -> None:
        route = free.pop() if free else await connect()
        for connection in route:
            await connection.ask(messages[number % len(messages)])
        took.append(time.perf_counter() - due_s)
        free.append(route)

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * PACED_S)):
            due_s = began_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(ask(number, due_s))
    for route in free:
        for connection in route:
            connection.close()
    return took


def measure_knee(rounds: int, place: Path) -> list[KneeRow]:
    """Every router in turn, after one round that is not counted."""
    with raw_fleet(place, 1) as fleet, ExitStack() as stack:
        rows = [KneeRow("two legs by the client", _ports(fleet), is_router=False)]
        for name, mode in (("pdconn proxy", None), ("Envoy + pdconn picker", BUFFERED)):
            router = stack.enter_context(
                our_router(
                    name.split()[-1], fleet, place, policy="round-robin", looks_up=False,
                    tree=None, mode=mode,
                )
            )  # fmt: skip
            rows.append(KneeRow(name, (router.port,)))
        for number in range(rounds + 1):
            for row in rows[1:]:
                asking = ask_all(
                    row.ports, _messages(), number=REQUESTS, at_once=AT_ONCE, streams=False
                )
                taken = asyncio.run(asking)
                if number:
                    row.rates.append(taken.requests / taken.seconds)
        half = min(median(row.rates) for row in rows[1:]) / 2
        for number in range(rounds + 1):
            for row in rows:
                took = asyncio.run(paced(row.ports, half))
                if number:
                    row.p50_s.append(median(took))
                    row.p99_s.append(quantiles(took, n=100)[98])
        return rows


def _ports(fleet: RawFleet) -> tuple[int, int]:
    prefill, decode = (int(url.rpartition(":")[2]) for url in (fleet.prefill, fleet.decode))
    return prefill, decode


def knee_shown(rows: list[KneeRow]) -> str:
    """The table; what is added is beside the client that asks both engines itself."""
    p50_s, p99_s = (median(one) for one in (rows[0].p50_s, rows[0].p99_s))
    cells = [
        [
            row.name,
            f"{median(row.rates):.0f}" if row.is_router else "",
            f"{1000 * median(row.p50_s):.2f}",
            f"{1000 * median(row.p99_s):.2f}",
            f"{1000 * (median(row.p50_s) - p50_s):.2f}",
            f"{1000 * (median(row.p99_s) - p99_s):.2f}",
        ]
        for row in rows
    ]
    headings = ["", "requests/s", "at half\np50, ms", "p99, ms", "added\np50, ms", "p99, ms"]
    return table(headings, cells)
