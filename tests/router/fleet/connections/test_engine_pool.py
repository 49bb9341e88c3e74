"""Kept connections: the last one used first, none for longer than a server keeps it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdconn.router.fleet.connections.engine_pool import EnginePool, Origin, origin_of
from tests.fakes.event_loop import in_loop, until

_ASK = b"GET / HTTP/1.1\r\n\r\n"


def open_socket(address: tuple[object, ...]) -> socket.socket:
    return socket.socket(*address[:3])  # type: ignore[arg-type]


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.readline():
        if await reader.readline() == b"\r\n":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    writer.close()


@asynccontextmanager
async def pool_of(keep_s: float) -> AsyncIterator[tuple[EnginePool, Origin]]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = EnginePool(open_socket, 5.0, keep_s)
    try:
        yield pool, origin_of(f"http://localhost:{server.sockets[0].getsockname()[1]}")
    finally:
        await pool.close()
        server.close()


@in_loop
async def test_the_last_connection_used_is_taken_first() -> None:
    """So that of many connections, after a peak, those that are not needed grow old."""
    async with pool_of(keep_s=60.0) as (pool, origin):
        first, second = [await pool.open_connection(origin) for _ in range(2)]
        for connection in (first, second):
            await connection.ask(_ASK, None)
        assert [pool.take_kept(origin) for _ in range(3)] == [second, first, None]
        assert (first.num_requests, second.num_requests) == (1, 1)


@in_loop
async def test_a_connection_that_was_idle_for_too_long_is_closed_and_not_taken() -> None:
    async with pool_of(keep_s=0.05) as (pool, origin):
        connection = await pool.open_connection(origin)
        await connection.ask(_ASK, None)
        assert connection.is_open, "the control"
        await until(lambda: not connection.is_open)
        assert pool.take_kept(origin) is None


@in_loop
async def test_a_name_whose_server_has_gone_is_looked_up_again() -> None:
    async with pool_of(keep_s=60.0) as (pool, origin):
        await pool.open_connection(origin)
        assert pool._addresses
        gone = Origin(False, origin.host, 1, "gone", "")
        pool._addresses[gone.host, gone.port] = (
            asyncio.get_running_loop().time(),
            [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))],
        )
        with pytest.raises(ConnectionRefusedError):
            await pool.open_connection(gone)
        assert list(pool._addresses) == [(origin.host, origin.port)]


@pytest.mark.parametrize(
    ("engine", "origin"),
    [
        ("http://e", Origin(False, "e", 80, "e", "")),
        ("https://e:443/a", Origin(True, "e", 443, "e", "/a")),
        ("http://[::1]:8000", Origin(False, "::1", 8000, "[::1]:8000", "")),
    ],
)
def test_an_origin_of_a_url(engine: str, origin: Origin) -> None:
    assert origin_of(engine) == origin
