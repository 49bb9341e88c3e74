"""The gRPC port of a picker, asked without a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from pdconn.router.picker import picker_server
from pdconn.router.picker.ext_proc import BUFFERED, METHOD, ProcessingRequest, ProcessingResponse
from pdconn.router.picker.picker_server import running_picker
from tests.fakes.deployment import Deployment, deployment
from tests.fakes.event_loop import in_loop, until


def head(path: bytes = b"/v1/completions", method: bytes = b"POST", *, ends: bool = False) -> Any:
    """The first message of a call."""
    message = ProcessingRequest()
    message.request_headers.end_of_stream = ends
    for name, value in ((":path", path), (":method", method)):
        one = message.request_headers.headers.headers.add()
        one.key, one.raw_value = name, value
    message.protocol_config.request_body_mode = BUFFERED
    return message


@asynccontextmanager
async def calling(port: int) -> AsyncIterator[Any]:
    """What begins calls at a port."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.stream_stream(
            METHOD,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )


def port_of(d: Deployment) -> int:
    return int(d.proxy.url.rpartition(":")[2])


@in_loop
async def test_a_path_of_other_bytes_than_utf_8_is_refused() -> None:
    async with deployment(running=running_picker) as d, calling(port_of(d)) as begin:
        call = begin()
        await call.write(head(b"/v1/\xff\xfe", b"GET", ends=True))
        answer = await call.read()
        assert answer.immediate_response.status.code == 404
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


class Wire:
    """A relay of a connection, which can be cut so that neither end learns of it."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._is_cut = False
        self._pumps: list[asyncio.Task[None]] = []

    def cut(self) -> None:
        self._is_cut = True

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._to)
        both = ((reader, there[1]), (there[0], writer))
        self._pumps += [asyncio.create_task(self._pump(*ends)) for ends in both]
        await asyncio.wait(self._pumps)
        for one in (there[1], writer):
            one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self._is_cut:
                writer.write(data)
        if not self._is_cut:
            writer.close()


@pytest.mark.parametrize("is_cut", [True, False])
@in_loop
async def test_a_gateway_that_vanishes_keeps_no_place(
    monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    """The control: one that is silent, but there, keeps its own."""
    monkeypatch.setattr(picker_server, "KEEPALIVE_S", 0.5)
    async with deployment(running=running_picker) as d:
        wire = Wire(port_of(d))
        relay = await asyncio.start_server(wire.join, "127.0.0.1", 0)
        async with relay, calling(relay.sockets[0].getsockname()[1]) as begin:
            call = begin()
            await call.write(head())
            await call.read()
            assert d.metric("inflight_requests") == 1
            if is_cut:
                wire.cut()
                await until(lambda: d.metric("inflight_requests") == 0)
            else:
                await asyncio.sleep(3)  # several probes
                assert d.metric("inflight_requests") == 1
            call.cancel()
