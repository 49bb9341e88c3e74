"""What a gateway sends about one request, and how slowly, behind a real Envoy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.deployment import Deployment, deployment, leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import MODEL
from tests.router.picker.gateway import MODES, PIECES, Filter, behind_envoy


async def begin_body(d: Deployment, head: bytes, part: bytes) -> tuple[Any, asyncio.StreamWriter]:
    """A client that sends a head and a part of its body."""
    port = int(d.proxy.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n" + part)
    return reader, writer


SLOW = {
    "length": (b"Content-Length: 900", b"{"),
    "chunked": (b"Transfer-Encoding: chunked", b"1\r\n{\r\n"),
}


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_a_body_that_does_not_come_is_refused_as_by_the_proxy(mode: str, name: str) -> None:
    """A body that the gateway collects has the time of the slowest one of its length."""
    settings = {"stall_timeout_s": 0.3, "max_body_mib": 0.25, "max_requests": 1}
    async with deployment(running=behind_envoy(Filter(mode)), **settings) as d:
        reader, writer = await begin_body(d, *SLOW[name])
        async with asyncio.timeout(10):
            assert (await reader.readline()).split()[1] == b"408"
        await until(lambda: d.metric("inflight_requests") == 0)
        assert d.outcome("refused") == 1
        assert (await d.complete()).status == 200  # the place is free
        await leave(writer)


@in_loop
async def test_a_body_that_makes_progress_is_not_refused() -> None:
    """The control: longer than one stall takes in all, and never that long without progress."""
    async with deployment(running=behind_envoy(Filter(PIECES)), stall_timeout_s=1.5) as d:
        text = json.dumps({"model": MODEL, "prompt": "x" * (900 << 10)}).encode()
        reader, writer = await begin_body(d, b"Content-Length: %d" % len(text), b"")
        for start in range(0, len(text), 300 << 10):
            writer.write(text[start : start + (300 << 10)])
            await asyncio.sleep(0.7)
        async with asyncio.timeout(10):
            assert (await reader.readline()).split()[1] == b"200"
        await leave(writer)


async def chunked(nbytes: int) -> AsyncIterator[bytes]:
    """A body whose length is not announced."""
    yield b'{"model": "m", "prompt": "'
    for _ in range(nbytes // (1 << 16)):
        yield b"x" * (1 << 16)
    yield b'"}'


@pytest.mark.parametrize("fails_open", [False, True])
@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_a_long_body_without_a_length_gets_the_routers_413(
    mode: str, fails_open: bool
) -> None:
    """Also one that is much longer; a gateway that fails open would let it pass unchecked."""
    shape = Filter(mode, fails_open=fails_open)
    async with deployment(running=behind_envoy(shape), max_body_mib=1) as d:
        for mib in (2, 20):
            reply = await d.send("/v1/completions", chunked(mib << 20))
            assert (reply.status, reply.error["param"]) == (413, "body")
        assert not any(engine.seen for engine in (*d.prefill, *d.decode))
        assert d.outcome("refused") == 2
        assert not d.metric("body_bytes")
