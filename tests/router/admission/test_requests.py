"""What one client sends, and leaves unread, is bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import socket
import time

import aiohttp
import pytest
from aiohttp import web

from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, MODEL, FakeEngine, Seen, hang
from tests.router.admission.raw_requests import GOOD, MIB, PATH, answer_to, head, raw

# Bodies


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "GZIP, identity"])
@in_loop
async def test_a_compressed_body_is_refused_unread(coding: str) -> None:
    """Else 50 KB of a client become 50 MB in the proxy."""
    async with deployment() as d:
        headers = {"Content-Encoding": coding}
        packed = gzip.compress(GOOD)
        async with d.client.post(d.url(PATH), data=packed, headers=headers) as reply:
            assert (reply.status, reply.headers["Accept-Encoding"]) == (415, "identity")
            assert (await reply.json())["error"]["param"] == "Content-Encoding"
        assert not d.prefill[0].seen
        assert d.outcome("refused") == 1
        plain = {"Content-Encoding": "identity"}
        async with d.client.post(d.url(PATH), data=GOOD, headers=plain) as reply:
            assert reply.status == 200


@in_loop
async def test_a_body_that_does_not_arrive_is_answered_408() -> None:
    async with deployment(stall_timeout_s=0.4) as d:
        began = time.monotonic()
        answer = await answer_to(d, head(1000, "Connection: close") + b'{"prompt": "')
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"RequestTimeoutError" in answer
        assert time.monotonic() - began >= 0.4
        assert d.metric("connections_dropped_total", reason="timed_out") == 1
        assert (await d.complete()).body == ANSWER


@in_loop
async def test_a_byte_at_a_time_buys_no_time() -> None:
    async with deployment(stall_timeout_s=0.4) as d, raw(d) as (reader, writer):
        writer.write(head(1000, "Connection: close") + b'{"prompt": "')
        answered = asyncio.create_task(reader.readline())
        num_sent = 0
        while not answered.done() and num_sent < 900:
            writer.write(b"x")
            num_sent += 1
            await asyncio.wait([answered], timeout=0.02)
        assert num_sent < 900
        assert (await answered).startswith(b"HTTP/1.1 408 ")


@in_loop
async def test_a_long_body_that_keeps_pace_is_served() -> None:
    """The control: it takes far longer than the time-out, and every piece is in time."""
    body = json.dumps({"model": MODEL, "prompt": "x" * 6 * MIB}).encode()
    async with deployment(stall_timeout_s=2.5) as d, raw(d) as (reader, writer):
        writer.write(head(len(body), "Connection: close"))
        for start in range(0, len(body), MIB):
            writer.write(body[start : start + MIB])
            await writer.drain()
            await asyncio.sleep(0.5)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


@in_loop
async def test_half_a_head_is_closed_in_time_and_an_idle_connection_is_not() -> None:
    async with deployment(stall_timeout_s=0.4) as d, raw(d) as (idle, idle_writer):
        idle_writer.write(head(len(GOOD)) + GOOD)
        assert (await idle.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        async with raw(d) as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHo")
            assert await asyncio.wait_for(reader.read(), 10.0) == b""
        await asyncio.sleep(1.0)
        idle_writer.write(head(len(GOOD), "Connection: close") + GOOD)
        assert b"HTTP/1.1 200 " in await idle.read()
        # Half of a second head on a connection that had a whole one is the same.
        async with raw(d) as (reader, writer):
            writer.write(head(len(GOOD)) + GOOD)
            await reader.readuntil(ANSWER)
            writer.write(b"POST /v1/com")
            assert await asyncio.wait_for(reader.read(), 10.0) == b""
        assert d.metric("connections_dropped_total", reason="timed_out") == 2


async def endless(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    """A script: an answer without end."""
    response = web.StreamResponse()
    await response.prepare(http)
    while True:
        await response.write(b"x" * 65536)


@in_loop
async def test_a_client_that_does_not_read_its_answer_is_closed() -> None:
    """Else it holds two file descriptors and an engine's request for as long as it likes."""
    async with deployment(stall_timeout_s=0.5) as d:
        d.decode[0].script = endless
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", int(d.proxy.url.rsplit(":", 1)[1])))
            sock.sendall(head(len(GOOD)) + GOOD)
            await until(lambda: d.metric("connections_dropped_total", reason="timed_out") == 1)
            await until(lambda: d.outcome("client_left") == 1)
            await until(lambda: d.decode[0].aborted)


# The common budget


def of_mib(mib: float, **fields: object) -> io.BytesIO:
    body = {"model": MODEL, "prompt": "x" * int(mib * MIB), **fields}
    return io.BytesIO(json.dumps(body).encode())


@in_loop
async def test_all_bodies_together_are_bounded_and_their_bytes_come_back() -> None:
    """503 with Retry-After beyond that; a body counts until its answer begins."""
    async with deployment(max_body_mib=2, max_bodies_mib=2) as d:
        d.prefill[0].admitting.clear()
        first = asyncio.create_task(d.send(PATH, of_mib(1.2)))
        await until(lambda: d.prefill[0].seen)
        assert 1.2 * MIB < d.metric("body_bytes") < 1.3 * MIB
        reply = await d.send(PATH, of_mib(1.2))
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert reply.error["type"] == "ServiceUnavailableError"
        assert (await d.send(PATH, b'{"prompt": ')).status == 400  # a small one still fits
        d.prefill[0].admitting.set()
        assert (await first).status == 200
        assert d.metric("body_bytes") == 0
        assert (await d.send(PATH, of_mib(1.2))).status == 200
        assert d.outcome("busy") == 1


@in_loop
async def test_an_answer_that_streams_for_long_holds_no_body() -> None:
    async with deployment(max_body_mib=2, max_bodies_mib=2) as d:
        d.decode[0].num_chunks, d.decode[0].chunk_pause_s = 1000, 0.05
        async with d.client.post(d.url(PATH), data=of_mib(1, stream=True)) as reply:
            await reply.content.readany()
            assert d.metric("body_bytes") == 0


@in_loop
async def test_the_bytes_of_a_client_that_left_come_back_once_nothing_uses_them() -> None:
    async with deployment() as d:
        d.decode[0].admitting.clear()
        writer = await d.open(prompt="x" * MIB)
        await until(lambda: d.decode[0].seen)
        writer.transport.abort()
        await until(lambda: d.outcome("client_left") == 1)
        assert d.metric("body_bytes") > MIB  # its ticket is being returned
        d.decode[0].admitting.set()
        await until(lambda: d.metric("body_bytes") == 0)


@in_loop
async def test_requests_in_flight_are_bounded() -> None:
    async with deployment(max_requests=2) as d:
        d.decode[0].admitting.clear()
        running = [asyncio.create_task(d.complete()) for _ in range(2)]
        await until(lambda: len(d.decode[0].seen) == 2)
        reply = await d.complete()
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        d.decode[0].admitting.set()
        assert {one.status for one in await asyncio.gather(*running)} == {200}
        assert (await d.complete()).status == 200


# Engines


@in_loop
async def test_a_connection_that_is_served_is_not_closed_for_others() -> None:
    """It neither stalls nor idles while an engine computes, however long that takes."""
    async with deployment(stall_timeout_s=0.3, drain_timeout_s=0.1) as d:
        d.decode[0].script = hang
        asking = asyncio.create_task(d.complete())
        await until(lambda: d.decode[0].seen)
        await asyncio.sleep(1.5)
        assert not asking.done()
        assert d.metric("connections_dropped_total", reason="timed_out") == 0
        d.decode[0].script = None
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
            await asking
