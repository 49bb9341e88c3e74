"""Streams that ask in one way: an engine directly, or a router, and what each took."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from pdconn.tools.lab.proxy import admin_url
from tests.fakes.stream_engine import KNOWN

STREAMS, TOKENS, PROMPT_TOKENS = 32, 200, 1000
SPREAD_S = 2.0


@dataclass(frozen=True)
class Way:
    """A way to ask: where, with which body, and what it is compared with.

    Attributes:
        first: a prefill engine that the client asks itself before.
    """

    name: str
    url: str
    direct: bool
    first: str | None = None
    beside: str | None = None


@dataclass
class Taken:
    """What the streams of one way took, in seconds, and what others took of the machine.

    ``decided_ms``: what the router says that deciding took, the median.
    """

    firsts_s: list[float] = field(default_factory=list)
    streams_s: list[float] = field(default_factory=list)
    others: float = 0.0
    decided_ms: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of a stream, from asking to its last token."""
        return TOKENS * len(self.streams_s) / sum(self.streams_s)


async def take(way: Way, rng: random.Random) -> Taken:
    """All streams of one way, once."""
    taken = Taken()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        prompts = [
            KNOWN + [rng.randrange(50_000) for _ in range(PROMPT_TOKENS - len(KNOWN))]
            for _ in range(STREAMS)
        ]
        await asyncio.gather(*(_warm(way, session) for _ in range(STREAMS)))
        delays = (SPREAD_S * number / STREAMS for number in range(STREAMS))
        await asyncio.gather(
            *(_stream(way, session, p, d, taken) for p, d in zip(prompts, delays, strict=True))
        )
        if way.beside is not None:
            async with session.get(f"{admin_url(way.url)}/debug/state") as response:
                decisions = (await response.json())["decisions"][:STREAMS]
            taken.decided_ms = statistics.median(one["decision_ms"] for one in decisions)
    return taken


def _body(way: Way, prompt: Sequence[int], num_tokens: int) -> bytes:
    fields: dict[str, object] = {"model": "m", "prompt": prompt, "max_tokens": num_tokens}
    fields |= {"stream": True, **({"echo": True} if way.direct else {})}
    return json.dumps(fields).encode()


async def _warm(way: Way, session: aiohttp.ClientSession) -> None:
    """Connections are made before anything is timed."""
    async with session.post(f"{way.url}/v1/completions", data=_body(way, [1, 2], 2)) as response:
        await response.read()
    if way.first is not None:
        await _ask_first(way.first, session, [1, 2])


async def _ask_first(url: str, session: aiohttp.ClientSession, prompt: Sequence[int]) -> None:
    fields = {"model": "m", "prompt": prompt, "kv_transfer_params": {"do_remote_decode": True}}
    body = json.dumps({**fields, "max_tokens": 1}).encode()
    async with session.post(f"{url}/v1/completions", data=body) as response:
        await response.read()


async def _stream(
    way: Way, session: aiohttp.ClientSession, prompt: Sequence[int], delay_s: float, taken: Taken
) -> None:
    body = _body(way, prompt, TOKENS)
    await asyncio.sleep(delay_s)
    began = time.perf_counter()
    if way.first is not None:
        await _ask_first(way.first, session, prompt)
    tokens, first_s = 0, 0.0
    async with session.post(f"{way.url}/v1/completions", data=body) as response:
        response.raise_for_status()
        async for chunk in response.content.iter_any():
            first_s = first_s or time.perf_counter() - began
            tokens += chunk.count(b"token")
    assert tokens == TOKENS, f"{way.name}: {tokens} of {TOKENS} tokens"
    taken.firsts_s.append(first_s)
    taken.streams_s.append(time.perf_counter() - began)
