"""Clients that hold connections without a request, and clients that just want an answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from tests.fakes.fake_engine import ANSWER, MODEL

PAUSE_S = 0.2
"""Between two bytes of a slow client, and before a closed one connects again."""

PAUSES_S = (PAUSE_S, 5 * PAUSE_S, 25 * PAUSE_S)
"""For one try after the other.  A busy machine slows good clients and not those that only wait, so
a crowd that is fair on a quiet machine may push every good client out of its place."""

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n"

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends nothing."""
    await reader.read()


async def slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends its head line by line, without end."""
    writer.write(HEAD)
    await _trickle(reader, writer, b"X-A: 1\r\n")


async def slow_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends its head, and its body byte by byte."""
    writer.write(HEAD + b'\r\n{"prompt": "')
    await _trickle(reader, writer, b"x")


async def _trickle(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: bytes
) -> None:
    """Send a piece again and again, until the other side closes."""
    ended = asyncio.create_task(reader.read())
    try:
        while not ended.done():
            writer.write(piece)
            await asyncio.wait([ended], timeout=PAUSE_S)
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)


async def half_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends half a head, and then nothing."""
    writer.write(HEAD)
    await reader.read()


async def half_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begins a TLS handshake, and sends nothing more."""
    writer.write(b"\x16\x03\x01\x02\x00")
    await reader.read()


@asynccontextmanager
async def crowd(
    port: int, *kinds: tuple[Client, int], pause_s: float = PAUSE_S
) -> AsyncIterator[list[int]]:
    """So many clients of each kind, which connect again about ``pause_s`` after they are closed.

    Yields the number of connections that were made, as the only element of a list.
    """
    made = [0]

    async def again(client: Client) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                made[0] += 1
                try:
                    await client(reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(random.uniform(0.0, 2 * pause_s))  # else they come all at once

    tasks = [asyncio.create_task(again(kind)) for kind, count in kinds for _ in range(count)]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Served:
    """What good clients met: seconds of each answer, and every failure."""

    took_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def slowest_s(self) -> float:
        return max(self.took_s)

    @property
    def median_s(self) -> float:
        return sorted(self.took_s)[len(self.took_s) // 2]


async def good_clients(
    url: str, count: int, for_s: float, tls: ssl.SSLContext | None = None
) -> Served:
    """``count`` clients that ask one thing after another, each over a connection of its own."""
    served, until_s = Served(), time.monotonic() + for_s

    async def ask() -> None:
        connector = aiohttp.TCPConnector(force_close=True, ssl=tls or True)
        async with aiohttp.ClientSession(connector=connector) as session:
            while time.monotonic() < until_s:
                began = time.monotonic()
                try:
                    async with session.post(
                        f"{url}/v1/completions", json={"model": MODEL, "prompt": "hi"}
                    ) as reply:
                        body = await reply.read()
                        if (reply.status, body) != (200, ANSWER):
                            served.failed.append(f"{reply.status} {body[:200]!r}")
                except aiohttp.ClientError as error:
                    served.failed.append(repr(error))
                served.took_s.append(time.monotonic() - began)

    await asyncio.gather(*(ask() for _ in range(count)))
    return served
