"""Requests as bytes, on a connection that sends what no client library would."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.fakes.deployment import Deployment
from tests.fakes.fake_engine import MODEL

PATH = "/v1/completions"
GOOD = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
MIB = 1 << 20


@asynccontextmanager
async def raw(
    d: Deployment, url: str | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that sends what no client library would."""
    port = int((url or d.proxy.url).rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def head(length: int, *headers: str) -> bytes:
    lines = (f"POST {PATH} HTTP/1.1", "Host: x", f"Content-Length: {length}", *headers, "", "")
    return "\r\n".join(lines).encode("latin-1")


async def answer_to(d: Deployment, sent: bytes, url: str | None = None) -> bytes:
    """Everything that the proxy answers until it closes."""
    async with raw(d, url) as (reader, writer):
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), 20.0)
