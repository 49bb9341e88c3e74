"""Chunks of a streamed answer on their way to the client, over plain sockets on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_server import running_proxy
from tests.fakes.event_loop import in_loop

EVENT = b'data: {"choices": [{"text": "a token"}]}\n\n'
LAST = b"data: [DONE]\n\n"
_TICKET = b'{"kv_transfer_params": {"do_remote_prefill": true, "pdconn": {}}}'
_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class PlainEngine:
    """Prefill and decode at one port: what decode sends, one write after another when told.

    For None it closes the connection.
    """

    def __init__(self, writes: list[bytes | None]) -> None:
        self._writes = writes
        self.go_on = asyncio.Semaphore(0)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [line for line in head.split(b"\r\n") if b"Content-Length" in line]
                body = await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                if b"do_remote_decode" in body:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(_TICKET))
                    writer.write(b"Content-Type: application/json\r\n\r\n" + _TICKET)
                elif not body:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                else:
                    for data in self._writes:
                        await self.go_on.acquire()
                        if data is None:
                            writer.close()
                            return
                        writer.write(data)
        writer.close()


@asynccontextmanager
async def streaming(
    writes: list[bytes | None],
) -> AsyncIterator[tuple[PlainEngine, asyncio.StreamReader]]:
    """The engine, and a client that has asked for a stream."""
    engine = PlainEngine(writes)
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    config = ProxyConfig.from_options([url], [url], port=0, policy="round-robin")
    async with running_proxy(config) as proxy:
        port = int(proxy.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"model": "m", "prompt": [1], "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b" % (
            len(body), body,
        ))  # fmt: skip
        yield engine, reader
        writer.close()
    server.close()


async def next_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:-2]


@in_loop
async def test_chunks_that_arrive_together_leave_together() -> None:
    """Nothing waits for others: each of the client's chunks is what one write had."""
    writes: list[bytes | None] = [
        _STREAM + chunk(EVENT),
        chunk(EVENT) * 10,
        chunk(EVENT),
        chunk(LAST) + chunk(b""),
    ]
    async with streaming(writes) as (engine, reader), asyncio.timeout(20.0):
        engine.go_on.release()
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"chunked" in head
        assert await next_chunk(reader) == EVENT
        seen = []
        for _ in range(3):
            engine.go_on.release()
            seen.append(await next_chunk(reader))
        assert seen == [EVENT * 10, EVENT, LAST]
        assert await next_chunk(reader) == b"", "the last one"


@pytest.mark.parametrize("is_cut_off", [True, False])
@in_loop
async def test_a_client_is_told_the_end_of_a_whole_stream_only(is_cut_off: bool) -> None:
    """An engine may break in the middle of a chunk, after chunks that passed at once."""
    writes: list[bytes | None] = [_STREAM + chunk(EVENT), chunk(EVENT) + b"ff\r\ndata", None]
    if not is_cut_off:
        writes = [_STREAM + chunk(EVENT), chunk(EVENT), chunk(b"")]
    async with streaming(writes) as (engine, reader), asyncio.timeout(20.0):
        engine.go_on.release()
        await reader.readuntil(b"\r\n\r\n")
        assert await next_chunk(reader) == EVENT
        engine.go_on.release()
        assert await next_chunk(reader) == EVENT + (b"data" if is_cut_off else b"")
        engine.go_on.release()
        if is_cut_off:
            with pytest.raises(asyncio.IncompleteReadError) as cut_off:
                await next_chunk(reader)
            assert cut_off.value.partial == b""
        else:
            assert await next_chunk(reader) == b"", "the control"
