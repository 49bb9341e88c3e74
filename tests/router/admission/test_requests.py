"""What one client sends is bounded in bytes, time and fields, and costs a line of log at most."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import logging
import re
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from pdconn.router.errors import BadBody
from pdconn.router.openai.requests import MAX_FIELDS, Direct, Route, parse_body
from tests.fakes.fake_engine import (
    ANSWER,
    MODEL,
    Deployment,
    FakeEngine,
    Seen,
    deployment,
    hang,
    in_loop,
    until,
)

PATH = "/v1/completions"
GOOD = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
MIB = 1 << 20


@asynccontextmanager
async def raw(d: Deployment) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that sends what no client library would."""
    port = int(d.proxy.url.rsplit(":", 1)[1])
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


async def answer_to(d: Deployment, sent: bytes) -> bytes:
    """Everything that the proxy answers until it closes."""
    async with raw(d) as (reader, writer):
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), 20.0)


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
    async with deployment(stall_timeout_s=1.2) as d, raw(d) as (reader, writer):
        writer.write(head(len(body), "Connection: close"))
        for start in range(0, len(body), MIB):
            writer.write(body[start : start + MIB])
            await writer.drain()
            await asyncio.sleep(0.4)
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


# Fields


def fields(count: int) -> bytes:
    return json.dumps({"prompt": "x"} | {f"k{i}": 1 for i in range(count - 1)}).encode()


def test_an_object_has_so_many_fields_and_no_more() -> None:
    assert len(parse_body(Route.COMPLETIONS, fields(MAX_FIELDS)).fields) == MAX_FIELDS
    with pytest.raises(BadBody, match=f"at most {MAX_FIELDS} fields"):
        parse_body(Route.COMPLETIONS, fields(MAX_FIELDS + 1))


@pytest.mark.parametrize("inside", ["body", "vllm_xargs", "the same name"])
def test_a_body_of_760_000_keys_costs_no_more_memory_than_one_of_256(inside: str) -> None:
    """Else 13 MB of keys become 150 MB of objects, and the event loop waits for them."""
    keys = b",".join(b'"k%d":1' % (0 if inside == "the same name" else i) for i in range(760_000))
    body = b'{"prompt":"x",' + (b'"vllm_xargs":{' + keys + b"}" if "x" in inside else keys) + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(BadBody):
            parse_body(Route.COMPLETIONS, body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MIB


@pytest.mark.parametrize("blank", [b"", b" " * 2_000_000])
def test_many_prompts_are_not_counted_one_by_one(blank: bytes) -> None:
    """A list of 2 million prompts is several as soon as it has two."""
    body = b'{"prompt": [' + blank + b'"a"' + b',"a"' * 2_000_000 + b"]}"
    tracemalloc.start()
    try:
        assert parse_body(Route.COMPLETIONS, body).direct is Direct.SEVERAL_PROMPTS
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MIB


@pytest.mark.parametrize("value", ["full", "incremental"])
@in_loop
async def test_a_client_may_not_choose_what_engines_report(value: str) -> None:
    """``kv_cache_report_mode: full`` makes an engine report blocks twice, and remove them once."""
    async with deployment() as d:
        reply = await d.complete(vllm_xargs={"kv_cache_report_mode": value})
        assert (reply.status, reply.error["param"]) == (400, "vllm_xargs")
        assert "kv_cache_report_mode" in reply.error["message"]
        assert not d.prefill[0].seen
        reply = await d.complete(vllm_xargs={"ngramsize": 3})
        assert "did you mean 'ngram_size'?" in reply.error["message"]
        assert (await d.complete(vllm_xargs={"ngram_size": 3})).status == 200


@in_loop
async def test_an_operator_may_allow_more_names() -> None:
    async with deployment(allow_xargs=("my_processor",)) as d:
        assert (await d.complete(vllm_xargs={"my_processor": 1})).status == 200
        assert d.decode[0].seen[0].body["vllm_xargs"] == {"my_processor": 1}
        assert (await d.complete(vllm_xargs={"mine": 1})).status == 400


# Headers


@in_loop
async def test_a_client_cannot_choose_a_data_parallel_rank() -> None:
    """Else it can load one rank, or name one that an engine does not have."""
    async with deployment() as d:
        headers = {"X-data-parallel-rank": "1", "X-Own": "kept"}
        async with d.client.post(d.url(PATH), data=GOOD, headers=headers) as reply:
            assert reply.status == 200
        for engine in (d.prefill[0], d.decode[0]):
            assert "X-data-parallel-rank" not in engine.seen[0].headers
            assert engine.seen[0].headers["X-Own"] == "kept"


@in_loop
async def test_a_second_connection_header_is_honoured() -> None:
    async with deployment() as d:
        named = ("Connection: close", "Connection: X-Hop", "X-Hop: 1", "X-End: 2")
        assert (await answer_to(d, head(len(GOOD), *named) + GOOD)).startswith(b"HTTP/1.1 200 ")
        seen = d.prefill[0].seen[0].headers
        assert ("X-Hop" in seen, seen["X-End"]) == (False, "2")


OWN = "[0-9a-f]{32}"


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ("chat 7/~!", "chat 7/~!"),
        ("x" * 128, "x" * 128),
        ("x" * 129, OWN),
        ("x" * 600, OWN),
        ("a\u200bb".encode().decode("latin-1"), OWN),
        ("\u00e9", OWN),
        ("a\tb", OWN),
        ("", OWN),
    ],
)
@in_loop
async def test_a_request_id_is_printable_ascii_or_the_routers(sent: str, taken: str) -> None:
    """Prefill would lend what decode then refuses: 500, and blocks pinned for a lease."""
    async with deployment() as d:
        answer = await answer_to(
            d, head(len(GOOD), "Connection: close", f"X-Request-Id: {sent}") + GOOD
        )
        assert answer.startswith(b"HTTP/1.1 200 ")
        ids = {engine.seen[0].headers["X-Request-Id"] for engine in (*d.prefill, *d.decode)}
        [used] = ids
        assert re.fullmatch(OWN, used) if taken == OWN else used == taken
        assert f"X-Request-Id: {used}\r\n".encode() in answer


@in_loop
async def test_of_two_request_ids_neither_is_taken() -> None:
    async with deployment() as d:
        await answer_to(
            d, head(len(GOOD), "Connection: close", "X-Request-Id: a", "X-Request-Id: b") + GOOD
        )
        assert re.fullmatch(OWN, d.prefill[0].seen[0].headers["X-Request-Id"])


@pytest.mark.parametrize(
    "sent",
    [
        head(len(GOOD), "Connection: close", "Content-Encoding: gzip") + GOOD,
        b"POST /v1/completions HTTP/1.1\r\nHo st: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
    ids=["gzip", "header", "length", "tls", "long"],
)
@in_loop
async def test_malformed_requests_cost_a_line_of_log_at_most(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Else each costs a traceback of 30 lines, and a client fills the disk."""
    caplog.set_level(logging.WARNING)
    async with deployment() as d:
        for _ in range(5):
            answer = await answer_to(d, sent)
            assert re.match(rb"HTTP/1\.[01] 4\d\d ", answer)
        assert (await d.complete()).body == ANSWER
    assert not [record for record in caplog.records if record.exc_info]
    lines = [line for record in caplog.records for line in record.getMessage().splitlines()]
    assert len(lines) <= 2, lines
    assert all(len(line) < 500 and line.startswith("pdconn: ") for line in lines)


@in_loop
async def test_a_bug_still_costs_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    async with deployment() as d:
        monkeypatch.setattr("pdconn.router.app.parse_body", None)
        assert (await d.send(PATH, GOOD)).status == 500
    assert [record for record in caplog.records if record.exc_info]


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
