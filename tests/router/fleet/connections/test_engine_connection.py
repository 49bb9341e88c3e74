"""One connection to an engine: answers however they are split, and engines that break HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from multidict import CIMultiDict

from pdconn.router.fleet.connections.engine_connection import (
    MOST_BUFFERED_NBYTES,
    MOST_HEAD_NBYTES,
    EngineConnection,
    EngineResponse,
)
from pdconn.router.fleet.engine_client import ConnectionLost, EngineClient
from tests.fakes.event_loop import in_loop, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_ASKED = b"GET / HTTP/1.1\r\n\r\n"


class LoopTransport(asyncio.Transport):
    """Stands for the event loop's: what was written, and whether it is read and open."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self._is_read = True
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_reading(self) -> bool:
        return self._is_read

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self._is_read = False

    def resume_reading(self) -> None:
        self._is_read = True


class Asked:
    """A connection on which a request was sent, and whether it can serve another one."""

    def __init__(self) -> None:
        self.kept: list[EngineConnection] = []
        self.transport = LoopTransport()
        self.connection = EngineConnection(self.kept.append, lambda connection: None)
        self.connection.connection_made(self.transport)
        self.asking = asyncio.create_task(self.connection.ask(_ASKED, None))

    async def feed(self, data: bytes, step: int | None = None) -> None:
        """The engine sends these bytes, in pieces of ``step``."""
        await asyncio.sleep(0)  # the request is written
        step = step or len(data)
        for at in range(0, len(data), step):
            if not self.transport.is_closed:
                self.connection.data_received(data[at : at + step])

    async def whole(self) -> bytes:
        """The whole body."""
        response = await self.asking
        pieces = []
        while piece := await response.readany():
            pieces.append(piece)
        return b"".join(pieces)


ANSWERS = {
    "a length": (OK, b"ok"),
    "no body": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "chunks": (CHUNKED + b"3\r\nabc\r\n2;name=value\r\nde\r\n0\r\n\r\n", b"abcde"),
    "a trailer": (CHUNKED + b"1\r\na\r\n0\r\nX-Sum: 7\r\n\r\n", b"a"),
    "answers before it": (
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"ok",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("step", [1, 2, 7, None])
@in_loop
async def test_an_answer_is_the_same_however_it_is_split(name: str, step: int | None) -> None:
    answer, body = ANSWERS[name]
    asked = Asked()
    await asked.feed(answer, step)
    assert await asked.whole() == body
    assert asked.kept == [asked.connection], "it may serve another request"
    response = asked.asking.result()
    assert {"link", "x-sum"}.isdisjoint(name.lower() for name in response.headers)


@in_loop
async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    asked = Asked()
    await asked.feed(b"HTTP/1.1 200 OK\r\n\r\nall of it")
    response = await asked.asking
    assert not response.is_eof()
    asked.connection.eof_received()
    asked.connection.connection_lost(None)
    assert await asked.whole() == b"all of it"
    assert not asked.kept


@pytest.mark.parametrize("head", [b"Content-Length: 9\r\n", b"Transfer-Encoding: chunked\r\n"])
@in_loop
async def test_an_answer_with_one_is_cut_off_by_its_end(head: bytes) -> None:
    """The control of the test above."""
    asked = Asked()
    await asked.feed(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n4\r\nab")
    await asked.asking
    asked.connection.eof_received()
    asked.connection.connection_lost(None)
    with pytest.raises(ConnectionError):
        await asked.whole()
    assert not asked.kept


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"HTTP/1.1 200 OK\r\n",
        OK + OK,
        OK + b"\x00",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
    ids=["a head", "another answer", "no answer", "close", "HTTP/1.0"],
)
@in_loop
async def test_a_connection_that_may_not_stay_open_is_closed_after_the_answer(
    answer: bytes,
) -> None:
    asked = Asked()
    await asked.feed(answer)
    assert await asked.whole() == b"ok"
    assert not asked.kept
    assert asked.transport.is_closed


BROKEN = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "a length and chunks": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "no size of a chunk": CHUNKED + b"zz\r\n",
    "a long head": b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"x" * (2 * MOST_HEAD_NBYTES),
    "many answers before it": b"HTTP/1.1 100 Continue\r\n\r\n" * MOST_HEAD_NBYTES,
    "a long trailer": CHUNKED + b"0\r\n" + b"X-Long: " + b"x" * (2 * MOST_HEAD_NBYTES),
    "a long extension": CHUNKED + b"1;" + b"x" * (2 * MOST_HEAD_NBYTES),
}


@pytest.mark.parametrize("name", BROKEN)
@in_loop
async def test_an_engine_that_does_not_speak_http_fails_its_request(name: str) -> None:
    asked = Asked()
    await asked.feed(BROKEN[name], step=4096)
    with pytest.raises(ConnectionError):
        await asked.whole()
    assert asked.transport.is_closed
    assert not asked.kept


@in_loop
async def test_bytes_that_nothing_has_asked_for_close_the_connection() -> None:
    asked = Asked()
    await asked.feed(OK)
    assert await asked.whole() == b"ok"
    assert not asked.transport.is_closing(), "the control"
    asked.connection.data_received(OK)
    assert asked.transport.is_closing()
    assert not asked.connection.is_open


@in_loop
async def test_what_nothing_reads_stops_the_reading() -> None:
    asked = Asked()
    await asked.feed(CHUNKED)
    response = await asked.asking
    piece = b"%x\r\n%b\r\n" % (4096, b"x" * 4096)
    for _ in range(MOST_BUFFERED_NBYTES // 4096):
        asked.connection.data_received(piece)
    assert asked.transport.is_reading(), "the control: so much is buffered"
    asked.connection.data_received(piece)
    assert not asked.transport.is_reading()
    assert len(await response.readany()) == MOST_BUFFERED_NBYTES + 4096
    assert asked.transport.is_reading()


async def _passing(response: EngineResponse, sink: Callable[[bytes], bool]) -> asyncio.Task[None]:
    passing = asyncio.create_task(response.pass_to(sink))
    await asyncio.sleep(0)
    return passing


@in_loop
async def test_what_arrives_together_is_passed_on_together_and_at_once() -> None:
    asked, passed = Asked(), list[bytes]()
    await asked.feed(CHUNKED)
    response = await asked.asking

    def sink(data: bytes) -> bool:
        passed.append(data)
        return data != b"stop"

    passing = await _passing(response, sink)
    asked.connection.data_received(b"1\r\na\r\n2\r\nbc\r\n")
    assert passed == [b"abc"], "within the event loop's call"
    asked.connection.data_received(b"4\r\nstop\r\n")
    asked.connection.data_received(b"4\r\nmore\r\n")
    await passing
    assert passed == [b"abc", b"stop"]
    assert await response.readany() == b"more"
    passing = await _passing(response, sink)
    asked.connection.data_received(b"3\r\nend\r\n0\r\n\r\n")
    await passing
    assert passed == [b"abc", b"stop"], "the end is left to the reader"
    assert await response.readany() == b"end"
    assert await response.readany() == b""


@in_loop
async def test_passing_on_ends_where_reading_would_not_wait() -> None:
    """Without it the task would wait for bytes that came before, or for a broken connection."""
    asked = Asked()
    await asked.feed(CHUNKED + b"1\r\na\r\n")
    response = await asked.asking
    async with asyncio.timeout(5.0):
        await response.pass_to(lambda data: True)
        assert await response.readany() == b"a"
        passing = await _passing(response, lambda data: True)
        asked.connection.connection_lost(ConnectionResetError())
        await passing
        await response.pass_to(lambda data: True)
    with pytest.raises(ConnectionResetError):
        await response.readany()


# With a client

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def client_of(serve: Serve) -> AsyncIterator[tuple[EngineClient, str]]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = EngineClient(connect_timeout_s=5.0)
    try:
        yield client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await client.close()
        server.close()


async def _stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(CHUNKED)
    for number in range(200):
        writer.write(b"%x\r\n%b\r\n" % (1000, b"%04d" % number * 250))
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_stream_passes_whole_on_both_event_loops(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The proxy runs on uvloop, and on asyncio's loop where that is not installed."""

    async def passed() -> bytes:
        received = bytearray()

        def sink(data: bytes) -> bool:
            received.extend(data)
            return len(received) % 3 != 0  # back to the task now and then

        async with client_of(_stream) as (client, url), asyncio.timeout(30.0):
            answer = await client.get_page(url, "/", CIMultiDict())
            async with answer:
                while piece := await answer.next_chunk():
                    received.extend(piece)
                    await answer.pass_to(sink)
        return bytes(received)

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(passed()) == b"".join(b"%04d" % number * 250 for number in range(200))


async def _get(client: EngineClient, url: str) -> bytes:
    async with await client.get_page(url, "/", CIMultiDict()) as answer:
        return await answer.read_rest()


@in_loop
async def test_a_connection_serves_its_next_request_before_the_last_one_goes_on() -> None:
    """The next request takes the connection in the same step of the event loop.

    Its future was once dropped by the request before, which had not gone on yet.
    """
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(OK)
        writer.close()

    async def ask_some(client: EngineClient, url: str) -> None:
        for _ in range(25):
            assert await _get(client, url) == b"ok"

    async with client_of(serve) as (client, url), asyncio.timeout(30.0):
        await asyncio.gather(*(ask_some(client, url) for _ in range(8)))
    assert connections <= 8


@in_loop
async def test_a_request_that_is_cancelled_closes_its_connection() -> None:
    closed, asked = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with client_of(serve) as (client, url), asyncio.timeout(10.0):
        asking = asyncio.create_task(_get(client, url))
        await asked.wait()
        assert not closed.is_set(), "the control"
        asking.cancel()
        await closed.wait()


@in_loop
async def test_an_engine_that_answers_before_it_has_read_all_is_not_asked_again_there() -> None:
    """It may take the rest of the body for the next request."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
            await reader.read()
        writer.close()

    async with client_of(serve) as (client, url):
        for _ in range(2):
            body = b"x" * (8 << 20)
            async with await client.post_body(url, "/", body, CIMultiDict()) as answer:
                assert (answer.status, await answer.read_rest()) == (413, b"no")
        await until(lambda: len(heads) == 2)


@in_loop
async def test_a_header_that_would_add_a_line_is_not_sent() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("it was asked")

    async with client_of(serve) as (client, url):
        for name, value in (("A", "b\r\nC: d"), ("A\nB", "c"), ("A", "b\r")):
            with pytest.raises(ValueError, match="line break"):
                await client.get_page(url, "/", CIMultiDict({name: value}))
        with pytest.raises(ValueError, match="line break"):
            await client.get_page(url, "/ HTTP/1.1\r\nA: b\r\n", CIMultiDict())


@in_loop
async def test_an_answer_that_is_not_http_is_a_lost_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"hello\r\n\r\n")
        writer.close()

    async with client_of(serve) as (client, url):
        with pytest.raises(ConnectionLost, match="not HTTP"):
            await _get(client, url)
