"""Servers of the same handlers: the picker's, and grpcio's, which says what is right."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc.aio

from pdconn.router.picker.rpc.call import CallFailed
from pdconn.router.picker.rpc.gateway_connection import CallRules
from pdconn.router.picker.rpc.rpc_server import RpcServer

MOST_NBYTES = 8 << 20
SERVICE = "pdconn.Test"


class Side(Protocol):
    """What a handler needs of a call."""

    async def read(self) -> bytes | None: ...

    async def write(self, *messages: bytes) -> None: ...


Handlers = Mapping[str, Callable[[Any], Awaitable[None]]]


class _GrpcioSide:
    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> bytes | None:
        message = await self._context.read()
        return None if message is grpc.aio.EOF else message

    async def write(self, *messages: bytes) -> None:
        for message in messages:
            await self._context.write(message)


@asynccontextmanager
async def serving_by_grpcio(handlers: Handlers) -> AsyncIterator[int]:
    """A server of grpcio; gives its port."""

    def method(handler: Callable[[Any], Awaitable[None]]) -> Any:
        async def run(requests: object, context: Any) -> None:
            try:
                await handler(_GrpcioSide(context))
            except CallFailed as error:
                code = next(one for one in grpc.StatusCode if one.value[0] == error.status)
                await context.abort(code, str(error))

        return grpc.stream_stream_rpc_method_handler(run)

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MOST_NBYTES)])
    methods = {name: method(handler) for name, handler in handlers.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@asynccontextmanager
async def listening(
    handlers: Handlers, keepalive_s: float = 20.0, others: Handlers | None = None
) -> AsyncIterator[Any]:
    """The picker's server and its port; ``others``: handlers by their whole path."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    paths = {f"/{SERVICE}/{name}": handler for name, handler in handlers.items()}
    paths |= others or {}
    server = RpcServer(CallRules(paths, MOST_NBYTES, keepalive_s), sock)
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0)


@asynccontextmanager
async def serving(
    handlers: Handlers, keepalive_s: float = 20.0, others: Handlers | None = None
) -> AsyncIterator[int]:
    """The picker's server; gives its port."""
    async with listening(handlers, keepalive_s, others) as (_, port):
        yield port


@asynccontextmanager
async def channel_to(port: int, **options: Any) -> AsyncIterator[Any]:
    """A client of grpcio."""
    most = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", most, **options) as channel:
        yield channel


def begin(channel: Any, name: str, **options: Any) -> Any:
    """Begin a call of a method."""
    return channel.stream_stream(f"/{SERVICE}/{name}")(**options)


async def ended(call: Any) -> tuple[Any, str]:
    """The status of a call, and what it says."""
    async with asyncio.timeout(20):
        return await call.code(), await call.details()
