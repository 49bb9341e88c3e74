"""The gRPC port of a picker, asked without a gateway."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdconn.router.labels import CallRefused
from pdconn.router.picker import picker_server
from pdconn.router.picker.ext_proc import (
    BUFFERED,
    METHOD,
    SERVICE,
    ProcessingRequest,
    ProcessingResponse,
)
from pdconn.router.picker.picker_server import running_picker
from tests.fakes.credentials import Authority
from tests.fakes.deployment import Deployment, deployment
from tests.fakes.event_loop import in_loop, until
from tests.router.picker.gateway import config_over


def head(path: bytes = b"/v1/completions", method: bytes = b"POST", *, ends: bool = False) -> Any:
    """The first message of a call."""
    message = ProcessingRequest()
    message.request_headers.end_of_stream = ends
    for name, value in ((":path", path), (":method", method)):
        one = message.request_headers.headers.headers.add()
        one.key, one.raw_value = name, value
    message.protocol_config.request_body_mode = BUFFERED
    return message


def body(raw: bytes = b'{"prompt": "x"}') -> Any:
    """The message about a whole body."""
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = raw, True
    return message


@asynccontextmanager
async def calling(port: int, *, raw: bool = False) -> AsyncIterator[Any]:
    """What begins calls at a port; ``raw``: messages are bytes."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.stream_stream(
            METHOD,
            request_serializer=None if raw else ProcessingRequest.SerializeToString,
            response_deserializer=None if raw else ProcessingResponse.FromString,
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


@in_loop
async def test_what_is_no_message_ends_its_call_with_a_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with deployment(running=running_picker) as d, calling(port_of(d), raw=True) as begin:
        call = begin()
        await call.write(b"\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await call.details()).startswith("a message of a gateway: ")
    assert all(one.exc_info is None for one in caplog.records)


@in_loop
async def test_a_body_that_no_message_may_hold_is_refused_by_its_length() -> None:
    """The control: one that a message holds."""
    async with (
        deployment(running=running_picker, max_body_mib=1) as d,
        calling(port_of(d)) as begin,
    ):
        for nbytes in (1 << 20, 3 << 20):
            call = begin()
            await call.write(head())
            await call.read()
            body = ProcessingRequest()
            body.request_body.body = b" " * nbytes
            body.request_body.end_of_stream = True
            await call.write(body)
            answer = (await call.read()).immediate_response
            assert answer.status.code == (413 if nbytes > 1 << 20 else 400)
            assert json.loads(answer.body)["error"]["code"] == answer.status.code
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK


@in_loop
async def test_gateways_connect_by_tls_and_a_reload_takes_new_files(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    files = authority.sign("picker", "127.0.0.1")
    trusted = Path(authority.file).read_bytes()
    settings = {"tls_cert": files.cert, "tls_key": files.key}
    async with deployment(running=running_picker, **settings) as d:

        async def shown() -> str:
            """The certificate, once a request was refused over its connection."""
            credentials = grpc.ssl_channel_credentials(trusted)
            async with grpc.aio.secure_channel(f"127.0.0.1:{port_of(d)}", credentials) as channel:
                call = channel.stream_stream(METHOD)()
                await call.write(head(b"/nowhere", b"GET", ends=True).SerializeToString())
                answer = ProcessingResponse.FromString(await call.read())
                assert answer.immediate_response.status.code == 404
                await call.done_writing()
            address = "127.0.0.1", port_of(d)
            return await asyncio.to_thread(ssl.get_server_certificate, address)

        def protocol() -> str | None:
            context = ssl.create_default_context(cafile=authority.file)
            context.set_alpn_protocols(["http/1.1", "h2"])
            with (
                socket.create_connection(("127.0.0.1", port_of(d))) as sock,
                context.wrap_socket(sock, server_hostname="127.0.0.1") as tls,
            ):
                return tls.selected_alpn_protocol()

        assert d.proxy.url.startswith("grpcs://")
        first = await shown()
        assert await asyncio.to_thread(protocol) == "h2"
        authority.sign("picker", "127.0.0.1")
        assert await d.proxy.reload() == ()
        assert await shown() != first
        assert await asyncio.to_thread(protocol) == "h2"


@in_loop
async def test_its_health_is_that_of_readyz_by_the_names_of_endpoint_pickers() -> None:
    """Liveness is no matter of engines."""
    serving = health_pb2.HealthCheckResponse.SERVING
    async with deployment() as d, AsyncExitStack() as stack:
        picker = await stack.enter_async_context(running_picker(config_over(d)))
        channel = grpc.aio.insecure_channel(picker.url.removeprefix("grpc://"))
        async with channel:

            async def healths() -> dict[str, bool]:
                ask, named = health_pb2_grpc.HealthStub(channel).Check, {}
                for name in ("", SERVICE, "readiness", "liveness"):
                    answer = await ask(health_pb2.HealthCheckRequest(service=name))
                    named[name] = answer.status == serving
                return named

            alive = {"": True, SERVICE: True, "readiness": True, "liveness": True}
            assert await healths() == alive
            await d.decode[0].stop()
            is_ready = True
            async with asyncio.timeout(10):
                while is_ready:
                    is_ready = (await healths())["readiness"]
            unready = {"": False, SERVICE: False, "readiness": False, "liveness": True}
            assert await healths() == unready


def answered(status: bytes | None) -> Any:
    """The message about the head of an answer."""
    message = ProcessingRequest()
    message.response_headers.SetInParent()
    if status is not None:
        one = message.response_headers.headers.headers.add()
        one.key, one.raw_value = ":status", status
    return message


@pytest.mark.parametrize("status", [b"", b"2xx", b"\xff\xfe", b"-20", b"20000", None])
@in_loop
async def test_a_status_that_is_none_ends_the_call_with_one_line(
    caplog: pytest.LogCaptureFixture, status: bytes | None
) -> None:
    async with deployment(running=running_picker) as d, calling(port_of(d)) as begin:
        call = begin()
        for message in (head(), body()):
            await call.write(message)
            await call.read()
        await call.write(answered(status))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert ":status" in await call.details()
        await until(lambda: d.outcome("gateway_error") == 1)
        assert d.metric("gateway_calls_refused_total", reason="malformed") == 1
        await until(lambda: d.metric("unused_tickets_total", outcome="returned") == 1)
        warned = [one for one in caplog.records if one.levelname != "INFO"]
        assert [one.exc_info for one in warned if ":status" in one.getMessage()] == [None]
        # The control.
        call = begin()
        for message in (head(), body(), answered(b"200")):
            await call.write(message)
            await call.read()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        await until(lambda: d.outcome("ok") == 1)


@pytest.mark.parametrize("is_first", [True, False])
@in_loop
async def test_bytes_that_are_no_message_end_the_call_with_one_line(
    caplog: pytest.LogCaptureFixture, is_first: bool
) -> None:
    async with (
        deployment(running=running_picker) as d,
        grpc.aio.insecure_channel(f"127.0.0.1:{port_of(d)}") as channel,
    ):
        call = channel.stream_stream(METHOD)()  # of bytes
        if not is_first:
            await call.write(head().SerializeToString())
            await call.read()
        await call.write(b"\xff\xff no protobuf")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert d.metric("gateway_calls_refused_total", reason="malformed") == 1
        assert d.outcome("gateway_error") == (0 if is_first else 1)
        assert not any(one.exc_info for one in caplog.records)
        assert sum("call ended" in one.getMessage() for one in caplog.records) == 1
        await until(lambda: d.metric("inflight_requests") == 0)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.NoCompression])
@in_loop
async def test_a_compressed_message_ends_its_call_and_is_counted(compression: Any) -> None:
    """The control: the same message as it is."""
    is_read = compression is grpc.Compression.NoCompression
    async with deployment(running=running_picker) as d, calling(port_of(d)) as begin:
        call = begin(compression=compression)
        await call.write(head(b"/" + b"x" * 5000, ends=True))
        code = grpc.StatusCode.OK if is_read else grpc.StatusCode.INVALID_ARGUMENT
        if is_read:
            assert (await call.read()).immediate_response.status.code == 404
            await call.done_writing()
        assert await call.code() is code
        assert d.metric("gateway_calls_refused_total", reason="malformed") == (not is_read)


@pytest.mark.parametrize("begins", [True, False])
@in_loop
async def test_a_call_without_a_head_ends(begins: bool) -> None:
    async with (
        deployment(running=running_picker, stall_timeout_s=0.2) as d,
        calling(port_of(d)) as begin,
    ):
        call = begin()
        if begins:  # with what is none
            await call.write(body())
        code = grpc.StatusCode.INVALID_ARGUMENT if begins else grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.code() is code
        reason = CallRefused.MALFORMED if begins else CallRefused.SILENT
        assert d.metric("gateway_calls_refused_total", reason=reason.value) == 1


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


@pytest.mark.parametrize("fits", [True, False])
@in_loop
async def test_a_gateway_with_a_mode_that_no_picker_can_serve_is_counted(fits: bool) -> None:
    async with deployment(running=running_picker) as d, calling(port_of(d)) as begin:
        call, message = begin(), head(b"/nowhere", b"GET", ends=True)
        if not fits:
            message.protocol_config.request_body_mode = 1  # STREAMED
        await call.write(message)
        answer = await call.read()
        assert answer.immediate_response.status.code == (404 if fits else 500)
        unfit = d.metric("gateway_calls_refused_total", reason=CallRefused.UNFIT.value)
        assert unfit == (0 if fits else 1)
        call.cancel()
