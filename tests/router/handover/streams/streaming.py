"""A deployment whose decode engines follow prefill, and what was asked of its engines."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from pdconn.router.metric_table import EarlyStart
from tests.fakes.deployment import Deployment, deployment
from tests.fakes.event_loop import until
from tests.fakes.fake_engine import ANSWER, MODEL, FakeEngine, Seen, hang

WORDS = "the engine's own words"


def streaming(num_prefill: int = 1, num_decode: int = 1, **settings: Any) -> Any:
    """A deployment with streams."""
    return deployment(num_prefill, num_decode, **{"streams": "on", **settings})


def starts(d: Deployment) -> dict[EarlyStart, int]:
    """How requests that were to be handed over began at decode."""
    counted = {one: d.metric("streams_total", start=one.value) for one in EarlyStart}
    return {one: int(count) for one, count in counted.items() if count}


def asked(engine: FakeEngine) -> list[Seen]:
    """What it was asked, without tickets that it was to return."""
    return [seen for seen in engine.seen if seen.body["model"] == MODEL]


def returned(d: Deployment) -> float:
    return d.metric("unused_tickets_total", outcome="returned")


async def teach(d: Deployment) -> None:
    """Each prefill engine issues a ticket."""
    for _ in d.prefill:
        assert (await d.complete()).body == ANSWER
    for engine in (*d.prefill, *d.decode):
        engine.seen.clear()
    d.leases.followed.clear()


async def ask_early(d: Deployment, **body: Any) -> asyncio.Task[Any]:
    """A request whose prefill computes, and that decode follows."""
    for engine in d.prefill:
        engine.computes.clear()
    asking = asyncio.create_task(d.complete(**body))
    await until(lambda: d.leases.followed)
    return asking


def let_compute(d: Deployment) -> None:
    for engine in d.prefill:
        engine.computes.set()


async def hang_after_following(
    engine: FakeEngine, seen: Seen, http: web.Request
) -> web.StreamResponse:
    """Decode computes for long, whatever comes of its stream; without one it answers."""
    if seen.stream is None:
        return await engine.answer(seen, http)
    engine.leases.followed.append(seen.stream)
    return await hang(engine, seen, http)
