"""A client that costs little: kept connections, each with one request at a time."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tests.throughput.proxy_cpu.raw_engines import CHUNKS, KNOWN
from tests.throughput.proxy_cpu.wire import is_whole


def request(prompt_tokens: int, *, streams: bool, rng: random.Random) -> bytes:
    """A request whose prompt's first half prefill holds, and whose other half is new."""
    half = prompt_tokens // 2
    prompt = KNOWN[:half] + [rng.randrange(50_000) for _ in range(prompt_tokens - half)]
    fields = {"model": "m", "prompt": prompt, "max_tokens": CHUNKS, "stream": streams}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: router\r\nAccept: */*\r\n"
        "Authorization: Bearer key\r\nContent-Type: application/json\r\n"
        f"User-Agent: client\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """Sends one request after another, and checks each answer."""

    def __init__(self) -> None:
        self._answered: asyncio.Future[bytes] | None = None
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        # The whole answer is looked at only where it may have ended.
        ended = data.endswith((b"0\r\n\r\n", b"}")) and is_whole(bytes(self._received))
        if ended and self._answered is not None and not self._answered.done():
            self._answered.set_result(bytes(self._received))
            self._received.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            seen = bytes(self._received[:300])
            self._answered.set_exception(ConnectionResetError(f"{exc} after {seen!r}"))

    async def ask(self, message: bytes) -> bytes:
        """The whole answer."""
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return await self._answered

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


@dataclass(frozen=True)
class Taken:
    """What a run took: its requests, and the seconds from its first to its last."""

    requests: int
    seconds: float


async def ask_all(
    ports: Sequence[int], messages: Sequence[bytes], *, number: int, at_once: int, streams: bool
) -> Taken:
    """Send ``number`` requests over ``at_once`` connections, and check every answer.

    ``ports``: connections are spread over them evenly.
    """
    loop = asyncio.get_running_loop()
    left = iter(range(number))

    async def run(port: int) -> None:
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        for one in left:
            answer = await connection.ask(messages[one % len(messages)])
            tokens = answer.count(b'" token"')
            assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
            assert tokens == (CHUNKS if streams else 0), answer[-300:]
        connection.close()

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for one in range(at_once):
            group.create_task(run(ports[one % len(ports)]))
    return Taken(number, time.perf_counter() - began_s)
