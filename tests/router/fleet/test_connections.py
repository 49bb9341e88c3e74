"""Connections to engines that break: idle ones, those of dead hosts, and those of busy ones."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import (
    ConnectionLost,
    Delivery,
    EngineClient,
    IdleConnectionLost,
)
from pdconn.router.fleet.engine_sockets import Acknowledged, EngineSockets, acknowledged
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, FakeEngine

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LONG = b"x" * (8 << 20)


class Closing:
    """A server that closes a connection under the request of ``breaks``, counted on it from 0."""

    def __init__(self, breaks: Callable[[int, int], bool]) -> None:
        self._breaks = breaks
        self.num_connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, self.num_connections = self.num_connections, self.num_connections + 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for number in range(1000):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line[15:])
                        for line in head.lower().split(b"\r\n")
                        if line[:15] == _LENGTH
                    ),
                    0,
                )
                self.requests.append(head + await reader.readexactly(length))
                if self._breaks(connection, number):
                    break
                writer.write(OK)
                await writer.drain()
        writer.close()


_LENGTH = b"content-length:"


@asynccontextmanager
async def serving(server: Closing) -> AsyncIterator[tuple[EngineClient, str]]:
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    client = EngineClient(connect_timeout_s=5.0)
    try:
        yield client, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        await client.close()
        listening.close()


async def post(client: EngineClient, url: str, body: bytes = b"{}", **options: bool) -> bytes:
    async with await client.post_body(url, "/", body, CIMultiDict(), **options) as answer:
        return await answer.read_rest()


# Kept connections


@pytest.mark.parametrize("body", [b"{}", LONG], ids=["short", "long"])
@in_loop
async def test_a_request_on_a_connection_that_its_server_closes_is_sent_once_more(body):
    """It marked the engine as down: vLLM closes what is idle for longer than it likes."""
    server = Closing(lambda connection, number: connection == 0 and number == 1)
    async with serving(server) as (client, url):
        for _ in range(3):
            assert await post(client, url, body) == b"ok"
    assert [len(sent) - sent.index(b"\r\n\r\n") - 4 for sent in server.requests] == [len(body)] * 4


@in_loop
async def test_a_page_is_asked_for_once_more_too_whatever_is_in_the_pool():
    server = Closing(lambda connection, number: connection < 4 and number == 1)
    async with serving(server) as (client, url):

        async def get() -> int:
            async with await client.get_page(url, "/", CIMultiDict()) as answer:
                await answer.read_rest()
                return answer.status

        assert await asyncio.gather(*(get() for _ in range(4))) == [200] * 4
        assert await get() == 200


@in_loop
async def test_a_new_connection_that_breaks_has_failed():
    """The control: nothing is known of what the engine did with the request."""
    server = Closing(lambda connection, number: True)
    async with serving(server) as (client, url):
        with pytest.raises(ConnectionLost) as lost:
            await post(client, url)
        assert not isinstance(lost.value, IdleConnectionLost)
    assert len(server.requests) == 1


@in_loop
async def test_what_must_not_be_seen_twice_is_not_sent_twice():
    server = Closing(lambda connection, number: number == 1)
    async with serving(server) as (client, url):
        assert await post(client, url) == b"ok"
        with pytest.raises(IdleConnectionLost):
            await post(client, url, may_repeat=False)
    assert len(server.requests) == 2


@in_loop
async def test_an_engine_that_has_gone_meanwhile_may_have_seen_the_request():
    """A ticket in it is spent: the second connection, which failed, says nothing of the first."""
    server = Closing(lambda connection, number: number == 1)
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = EngineClient(connect_timeout_s=5.0)
    try:
        assert await post(client, url) == b"ok"
        listening.close()
        delivery = Delivery()
        with pytest.raises(ConnectionLost):
            await client.post_body(url, "/", b"{}", CIMultiDict(), delivery)
        assert delivery.begun
    finally:
        await client.close()


@in_loop
async def test_engines_that_close_idle_connections_early_are_up_and_asked():
    """Each second request on a connection meets the moment in which the server closes it."""
    served = set()

    async def close_second(engine: FakeEngine, seen, http):
        if http.transport in served:
            http.transport.abort()
            return web.Response()
        served.add(http.transport)
        return await engine.answer(seen, http)

    async with deployment() as d:
        engines = (d.prefill[0], d.decode[0])
        for engine in engines:
            engine.script = close_second
        for _ in range(12):
            assert (await d.complete()).body == ANSWER
        seen = sum(len(engine.seen) for engine in engines)
        assert seen > 2 * 12, "some had to be sent twice"
        assert d.metric("engine_up", role="decode", engine=d.decode[0].url) == 1
        assert d.metric("engine_up", role="prefill", engine=d.prefill[0].url) == 1
        assert d.metric("retries_total", role="prefill", engine=d.prefill[0].url) == 0


# Hosts


def test_a_host_is_dead_that_answers_nothing_of_what_is_repeated():
    assert Acknowledged(silent_s=15.0, repeats=6).is_dead(15.0)
    assert not Acknowledged(silent_s=14.9, repeats=6).is_dead(15.0)
    assert not Acknowledged(silent_s=60.0, repeats=0).is_dead(15.0), "nothing was sent"
    assert not Acknowledged(silent_s=60.0, repeats=1).is_dead(15.0), "one is on its way"


def test_the_kernels_time_out_is_not_set():
    """It fires when a live engine reads nothing for a while, and no option separates the two."""

    async def opened() -> int:
        made = EngineSockets()
        sock = made.open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ()))
        try:
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        finally:
            sock.close()
            await made.close()

    assert asyncio.run(opened()) == 0


@in_loop
async def test_an_engine_that_does_not_read_is_not_dead():
    """Six bodies of 60 MB took all four engines down: each was busy for 15 s, and read nothing."""
    go_on = asyncio.Event()

    async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(LONG))
        writer.write(OK)
        writer.close()

    listening = await asyncio.start_server(busy, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = EngineClient(connect_timeout_s=5.0)
    made = client._sockets
    made._limit_s = made._sweep_s = 0.2
    try:
        asking = asyncio.create_task(post(client, url, LONG))
        await until(lambda: made._open)
        await asyncio.sleep(2.0)  # its window is full, and the kernel asks for room
        [sock] = made._open
        seen = acknowledged(sock)
        assert seen is not None
        assert seen.repeats < 2
        assert seen.waiting_nbytes > 0
        assert 0 < seen.nbytes < len(LONG)
        assert not asking.done()
        go_on.set()
        assert await asking == b"ok"
    finally:
        await client.close()
        listening.close()


@in_loop
async def test_an_engine_that_reads_nothing_for_minutes_hangs(caplog):
    """Its bodies would be kept for as long as it hangs, also those of clients that left."""
    hung = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hung.wait()
        writer.close()

    listening = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = EngineClient(connect_timeout_s=5.0)
    client._sockets._hung_s, client._sockets._sweep_s = 0.5, 0.1
    try:
        with pytest.raises(ConnectionLost):
            await post(client, url, LONG)
        assert "reads nothing" in caplog.text
    finally:
        hung.set()
        await client.close()
        listening.close()
