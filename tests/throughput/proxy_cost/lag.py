"""From an engine's timestamp of its events to the router's index of them."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pdconn.tools.lab.ports import LOCALHOST, free_ports
from tests.throughput.proxy_cost.processes import Fleet, engines, listening
from tests.throughput.proxy_cost.streams import STREAMS, Way, take

LAG_MS = 5.0
EVENTS_PER_S = 50.0


@dataclass(frozen=True)
class Lag:
    """From an engine's stamp to the index, in milliseconds."""

    name: str
    batches: int
    median_ms: float
    p95_ms: float
    worst_ms: float

    @property
    def holds(self) -> bool:
        """Whether our bound is kept."""
        return self.median_ms < LAG_MS


def lags(place: Path, seconds: float) -> list[Lag]:
    """With nothing else to do, and with all streams."""
    rows = []
    with engines(place) as fleet:
        for name, busy in (("idle", False), (f"{STREAMS} streams", True)):
            (port,) = free_ports(1)
            out = place / f"lags-{busy}.json"
            words = ("--probe", port, fleet.with_events, fleet.decode, out)
            with listening("probe", "tests.throughput.proxy_cost", words, port, place):
                time.sleep(1.0)
                asyncio.run(_publish(fleet, f"http://{LOCALHOST}:{port}", seconds, busy))
            found = sorted(1000 * lag_s for lag_s in json.loads(out.read_text(encoding="utf-8")))
            rows.append(
                Lag(
                    name,
                    len(found),
                    statistics.median(found),
                    found[int(0.95 * len(found))],
                    found[-1],
                )
            )
    return rows


async def _publish(fleet: Fleet, url: str, seconds: float, busy: bool) -> None:
    pace = json.dumps({"per_s": EVENTS_PER_S, "for_s": seconds}).encode()
    async with aiohttp.ClientSession() as session:
        publishing = asyncio.create_task(session.post(f"{fleet.prefill}/publish", data=pace))
        if busy:
            await take(Way("probe", url, False), random.Random(2))
        (await publishing).close()
        await asyncio.sleep(0.3)


def probe(port: int, prefill: str, decode: str, out: Path) -> None:
    """A router that notes how old each batch is once it has been applied."""
    from pdconn.router.events.caches import PrefixCaches
    from pdconn.router.events.subscriber import EventSource
    from pdconn.router.prefix.kv_events import Batch
    from pdconn.router.proxy_config import ProxyConfig
    from pdconn.router.router_server import running_proxy as in_this_process
    from pdconn.tools.cli.proxy.router_command import loop_factory

    seen: list[float] = []
    began, apply = time.time(), PrefixCaches.apply_batch

    def noted(self: PrefixCaches, source: EventSource, batch: Batch) -> None:
        apply(self, source, batch)
        if batch.ts >= began:  # replayed ones are older
            seen.append(time.time() - batch.ts)

    PrefixCaches.apply_batch = noted  # type: ignore[method-assign]

    async def serve() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        async with in_this_process(ProxyConfig.from_options([prefill], [decode], port=port)):
            await stop.wait()
            out.write_text(json.dumps(seen), encoding="utf-8")

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())
