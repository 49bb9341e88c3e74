"""Traffic for the page: four engines that take their time, and clients that stream.

Prefill takes longer the more tokens a prompt has, decode a little for its first token and more for
the rest.  Every tenth prompt decode serves alone, and a few clients leave early.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from tests.fakes.fake_engine import MODEL, FakeEngine, Seen
from tests.fakes.routed import PROMPT, Fleet, fleet, other_prompt

PROMPTS = 6
_PREFILL_S_PER_TOKEN = 0.0004


async def _take_time(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    """A script: an engine that needs time for what it does."""
    prompt = seen.body.get("prompt") or []
    if seen.params.get("do_remote_decode"):
        await asyncio.sleep(0.02 + _PREFILL_S_PER_TOKEN * len(prompt))
    elif seen.params.get("do_remote_prefill"):
        await asyncio.sleep(0.03)
    else:
        await asyncio.sleep(0.02 + 2 * _PREFILL_S_PER_TOKEN * len(prompt))
    return await engine.answer(seen, http)


@dataclass
class Traffic:
    """Clients of a fleet, ``rate`` new requests a second."""

    fleet: Fleet
    rate: float = 6.0
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    sent: int = 0

    async def send(self, num_requests: int) -> None:
        """Send requests and read their answers; returns when all are over."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_requests):
                group.create_task(self._one())
                await asyncio.sleep(self.chance.expovariate(self.rate))

    async def _one(self) -> None:
        self.sent += 1
        number, made = self.sent, self.fleet
        self._set_loads(number)
        prompt = [*_prompt(number % PROMPTS), *range(self.chance.randrange(1, 400))]
        body = {"model": MODEL, "prompt": prompt, "stream": True}
        if number % 10 == 0:
            body["n"] = 2  # decode serves several answers alone
        headers = {"X-Request-Id": f"chat-{number:05}"}
        url = made.url("/v1/completions")
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(0.15 if number % 25 == 0 else 30):
                async with made.client.post(url, json=body, headers=headers) as reply:
                    await reply.read()

    def _set_loads(self, number: int) -> None:
        """What the engines' own metrics say: waves, so that the lines differ."""
        for place, engine in enumerate((*self.fleet.prefill, *self.fleet.decode)):
            wave = 0.5 + 0.45 * math.sin(number / 40 + 1.3 * place)
            engine.metrics_page = (
                f"vllm:num_requests_running {int(12 * wave)}\n"
                f"vllm:num_requests_waiting {max(0, int(14 * wave) - 8)}\n"
                f"vllm:kv_cache_usage_perc {0.15 + 0.7 * wave:.3f}\n"
                f"vllm:prefix_cache_queries_total {100 * number}\n"
                f"vllm:prefix_cache_hits_total {40 * number}\n"
            )


def _prompt(number: int) -> list[int]:
    return PROMPT if number == 0 else other_prompt(number)


@asynccontextmanager
async def traffic(num_prefill: int = 2, num_decode: int = 2) -> AsyncIterator[Traffic]:
    """A fleet whose caches are partly filled, and clients for it."""
    async with fleet(num_prefill, num_decode, drain_timeout_s=5.0, alone_below=16) as made:
        for place, engine in enumerate((*made.prefill, *made.decode)):
            engine.script = _take_time
            engine.chunk_pause_s = 0.02
            engine.num_chunks = 12
            pod = made.pod(engine)
            pod.publisher.clock = time.time
            for number in range(place % 2, PROMPTS, 2 + place):
                await pod.store(_prompt(number))
        await made.events_applied()
        yield Traffic(made)
