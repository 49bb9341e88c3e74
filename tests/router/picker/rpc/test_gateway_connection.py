"""HTTP/2 under the calls: room on both sides, bytes that are no HTTP/2, floods, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
from h2.settings import SettingCodes

from pdconn.router.picker.rpc.call import MOST_QUEUED_NBYTES
from pdconn.router.picker.rpc.gateway_connection import _STREAM_NBYTES, MOST_CALLS
from tests.fakes.event_loop import in_loop, until
from tests.router.picker.rpc.servers import (
    SERVICE,
    begin,
    channel_to,
    ended,
    listening,
    serving,
)
from tests.router.picker.rpc.test_calls import Waiting, echo

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class RawClient:
    """A client of h2 that sends what a test wants, and counts what it gets."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.events: list[h2.events.Event] = []
        self.nbytes = 0
        self._reader, self._writer = reader, writer
        self._pings = 0

    def begin(self, name: str) -> int:
        stream = self.http.get_next_available_stream_id()
        headers = {":method": "POST", ":scheme": "http", ":authority": "x"}
        headers |= {
            ":path": f"/{SERVICE}/{name}",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        self.http.send_headers(stream, list(headers.items()))
        return stream

    def send_all(self, stream: int, data: bytes) -> int:
        """Send as much as there is room for; returns how much."""
        sent = 0
        while sent < len(data):
            room = min(self.http.local_flow_control_window(stream), 16_384, len(data) - sent)
            if room == 0:
                break
            self.http.send_data(stream, data[sent : sent + room])
            sent += room
        return sent

    async def round_trip(self) -> None:
        """Send, and read until the server has taken all of it."""
        self._pings += 1
        told = self._pings.to_bytes(8, "big")
        self.http.ping(told)
        self._writer.write(self.http.data_to_send())
        while not any(
            isinstance(one, h2.events.PingAckReceived) and one.ping_data == told
            for one in self.events
        ):
            await self.read()

    async def read(self) -> bytes:
        data = await asyncio.wait_for(self._reader.read(1 << 16), 20)
        # Reading goes on without a pause at the end, so a test that waited would never give up.
        assert data, "the server closed the connection"
        for event in self.http.receive_data(data):
            self.events.append(event)
            if isinstance(event, h2.events.DataReceived):
                self.nbytes += len(event.data or b"")
        self._writer.write(self.http.data_to_send())
        return data


@asynccontextmanager
async def raw_client(port: int, *, hasty: bool = False) -> AsyncIterator[RawClient]:
    """A client of h2; a hasty one has not yet heard of the server's settings."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = RawClient(reader, writer)
    client.http.initiate_connection()
    if not hasty:
        await client.round_trip()
    try:
        yield client
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


@in_loop
async def test_a_client_may_send_no_more_than_is_read() -> None:
    """The control: once the messages are read, all of the rest has room."""
    go_on, read = asyncio.Event(), 0

    async def late(call: Any) -> None:
        nonlocal read
        await go_on.wait()
        while (message := await call.read()) is not None:
            read += len(message)

    messages = framed(b"x" * 50_000) * 200
    async with serving({"Late": late}) as port, raw_client(port) as client:
        stream, sent = client.begin("Late"), 0
        for _ in range(20):
            sent += client.send_all(stream, messages[sent:])
            await client.round_trip()
        assert _STREAM_NBYTES <= sent <= _STREAM_NBYTES + MOST_QUEUED_NBYTES + 100_000
        go_on.set()
        while sent < len(messages):
            sent += client.send_all(stream, messages[sent:])
            await client.round_trip()
        client.http.end_stream(stream)
        await client.round_trip()
        await until(lambda: read == 200 * 50_000)


@in_loop
async def test_what_ended_calls_have_not_read_is_room_for_others() -> None:
    """Else calls that end early would use up the connection's room for all."""

    async def first_only(call: Any) -> None:
        await call.read()

    async with serving({"First": first_only, "Echo": echo}) as port, raw_client(port) as client:
        before = client.http.outbound_flow_control_window
        for turn in range(8):
            stream = client.begin("First")
            client.send_all(stream, framed(b"x" * 100_000) * 12)
            await client.round_trip()
            if turn % 2:
                with contextlib.suppress(h2.exceptions.StreamClosedError):
                    client.http.reset_stream(stream)
            await client.round_trip()
        # h2 tells of room when a share of the whole is used, so a little may be untold.
        assert client.http.outbound_flow_control_window > before - (before >> 1)


@in_loop
async def test_a_message_waits_for_room_at_the_client() -> None:
    written = asyncio.Event()

    async def long(call: Any) -> None:
        await call.write(b"x" * 300_000)
        written.set()

    async with serving({"Long": long}) as port, raw_client(port) as client:
        stream = client.begin("Long")
        for _ in range(5):
            await client.round_trip()
        assert client.nbytes == 65_535
        assert not written.is_set()
        client.http.increment_flow_control_window(300_000, stream)
        await client.round_trip()
        assert not written.is_set(), "the connection has no room"
        client.http.increment_flow_control_window(300_000)
        while client.nbytes < 300_005:
            await client.round_trip()
        await asyncio.wait_for(written.wait(), 20)


@pytest.mark.timeout(20)
@in_loop
async def test_a_client_may_lower_its_window_below_what_was_sent() -> None:
    """RFC 9113, section 6.9.2: the room is below zero until the client gives more."""

    async def long(call: Any) -> None:
        await call.write(b"x" * 100_000)

    async with serving({"Long": long}) as port, raw_client(port) as client:
        client.http.increment_flow_control_window(1 << 20)
        stream = client.begin("Long")
        await client.round_trip()
        client.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})
        await client.round_trip()
        client.http.increment_flow_control_window(64_000, stream)
        await client.round_trip()
        assert client.nbytes == 65_535, "the room is still below zero"
        client.http.increment_flow_control_window(1 << 20, stream)
        for _ in range(10):
            await client.round_trip()
        assert client.nbytes == 100_005


@in_loop
async def test_a_client_that_reads_nothing_holds_up_its_own_connection_alone() -> None:
    async def flood(call: Any) -> None:
        for _ in range(1000):
            await call.write(b"x" * 100_000)

    handlers = {"Flood": flood, "Echo": echo}
    async with listening(handlers) as (server, port), raw_client(port) as deaf:
        [connection] = server._connections
        stream = deaf.begin("Flood")
        deaf.http.increment_flow_control_window(1 << 30, stream)
        deaf.http.increment_flow_control_window(1 << 30)
        deaf._writer.write(deaf.http.data_to_send())
        async with channel_to(port) as channel:
            call = begin(channel, "Echo")
            await call.write(b"1")
            assert await call.read() == b"1"
            call.cancel()
        await until(lambda: connection._is_paused)
        buffered = connection._transport.get_write_buffer_size()
        assert buffered < 1 << 20, "a turn at a time, and none while it is full"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        PREFACE + b"\x00\x00\x01\x00\x00\x00\x00\x00\x00x",
        PREFACE + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00",
    ],
    ids=["HTTP/1.1", "a body of no call", "no room to give", "TLS"],
)
@in_loop
async def test_bytes_that_are_no_http_2_close_their_connection(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving({"Echo": echo}) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        if sent.startswith(b"\x16"):
            writer.write_eof()  # too short to be told from a preface by h2
        await asyncio.wait_for(reader.read(), 20)
        writer.close()
        async with channel_to(port) as channel:
            call = begin(channel, "Echo")
            await call.write(b"1")
            assert await call.read() == b"1", "the control"
            call.cancel()
    assert all(one.exc_info is None for one in caplog.records)


@in_loop
async def test_changed_bytes_of_a_real_call_break_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    client = RawClient(None, None)  # type: ignore[arg-type]
    client.http.initiate_connection()
    stream = client.begin("Echo")
    client.http.send_data(stream, framed(b"hello") * 3, end_stream=True)
    good = client.http.data_to_send()
    rng = random.Random(39)
    async with listening({"Echo": echo}) as (server, port):
        for _ in range(150):
            bad = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(bad[: rng.randint(1, len(bad))])
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 20)
            writer.close()
        await until(lambda: not server._connections)
    assert all(one.exc_info is None for one in caplog.records)


@in_loop
async def test_a_flood_of_calls_that_are_reset_leaves_nothing() -> None:
    waiting = Waiting()
    async with listening({"Wait": waiting}) as (server, port), raw_client(port) as client:
        for _ in range(20):
            for _ in range(MOST_CALLS // 2):
                client.http.reset_stream(client.begin("Wait"))
            await client.round_trip()
        [connection] = server._connections
        await until(lambda: connection.num_calls == 0)
        assert len(connection._http.streams) <= MOST_CALLS


ODD_HEADS: list[list[tuple[str, str]]] = [
    [("x", "y")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "x"), (":path", "/healthz")],
    [("content-type", "application/grpc")],
    [(":path", "/a"), (":path", "/b"), ("content-type", "application/grpc"), ("UPPER", "x")],
    [(":path", f"/{SERVICE}/Other"), ("content-type", "application/grpc")],
    [(":path", f"/{SERVICE}/Echo"), ("content-type", "application/grpc")],
]


@pytest.mark.parametrize("ends_by", ["its head", "a reset"])
@in_loop
async def test_odd_requests_that_end_at_once_leave_other_calls_alone(
    ends_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving({"Echo": echo}) as port, raw_client(port) as client:
        client.http.config.validate_outbound_headers = False
        client.http.config.normalize_outbound_headers = False
        going_on = client.begin("Echo")
        for heads in ODD_HEADS:
            stream = client.http.get_next_available_stream_id()
            client.http.send_headers(stream, heads, end_stream=ends_by == "its head")
            if ends_by == "a reset":
                client.http.reset_stream(stream)
            await client.round_trip()
        client.http.send_data(going_on, framed(b"1"), end_stream=True)
        for _ in range(2):
            await client.round_trip()
        assert client.nbytes == len(framed(b"1"))
        ended = [one.stream_id for one in client.events if isinstance(one, h2.events.StreamEnded)]
        assert len(ended) == 1 + (len(ODD_HEADS) if ends_by == "its head" else 0)
    assert all(one.exc_info is None for one in caplog.records)


@in_loop
async def test_more_calls_than_the_settings_allow_close_the_connection() -> None:
    waiting = Waiting()
    async with listening({"Wait": waiting}) as (server, port), raw_client(port) as client:
        for _ in range(MOST_CALLS):
            client.begin("Wait")
        await client.round_trip()
        [connection] = server._connections
        assert connection.num_calls == MOST_CALLS, "the control"
        client.http.remote_settings.max_concurrent_streams = 1 << 20
        client.http.remote_settings.acknowledge()
        client.begin("Wait")
        client._writer.write(client.http.data_to_send())
        await until(lambda: not server._connections)


@in_loop
@pytest.mark.parametrize("at_once", [MOST_CALLS, 1000])
async def test_a_burst_of_calls_on_a_new_connection_is_served(at_once: int) -> None:
    """More than the limit, before the client has heard of it, closed the connection."""
    async with (
        listening({"Echo": echo}) as (server, port),
        raw_client(port, hasty=True) as client,
    ):
        for number in range(at_once):
            client.http.send_data(client.begin("Echo"), framed(b"%d" % number), end_stream=True)
        while sum(isinstance(one, h2.events.StreamEnded) for one in client.events) < at_once:
            await client.round_trip()
        [connection] = server._connections
        await until(lambda: connection.num_calls == 0)
        assert client.http.remote_settings.max_concurrent_streams == MOST_CALLS
    assert not any(isinstance(one, h2.events.StreamReset) for one in client.events)


@in_loop
async def test_a_server_that_stops_lets_calls_end_and_takes_no_other() -> None:
    async with listening({"Echo": echo}) as (server, port), channel_to(port) as channel:
        call = begin(channel, "Echo")
        await call.write(b"1")
        assert await call.read() == b"1"
        stopping = asyncio.create_task(server.stop(20))
        code, words = grpc.StatusCode.OK, ""
        while code is grpc.StatusCode.OK:  # calls that began before the client has heard of it
            code, words = await ended(begin(channel, "Echo", request_iterator=iter(())))
        # The client gives a call up by itself if it fails before its first write.
        assert code is grpc.StatusCode.UNAVAILABLE or words.startswith("Locally cancelled")
        assert not stopping.done()
        await call.write(b"2")
        assert await call.read() == b"2"
        await call.done_writing()
        assert (await ended(call))[0] is grpc.StatusCode.OK
        await asyncio.wait_for(stopping, 20)


@in_loop
async def test_a_server_that_stops_breaks_off_calls_when_the_time_is_up() -> None:
    waiting = Waiting()
    async with listening({"Wait": waiting}) as (server, port), channel_to(port) as channel:
        call = begin(channel, "Wait")
        await asyncio.wait_for(waiting.has_begun.wait(), 20)
        await server.stop(0.05)
        await asyncio.wait_for(waiting.was_cancelled.wait(), 20)
        assert (await ended(call))[0] is grpc.StatusCode.UNAVAILABLE


@in_loop
async def test_a_connection_that_answers_no_probe_is_closed() -> None:
    waiting = Waiting()
    probing = listening({"Wait": waiting}, keepalive_s=0.2)
    async with probing as (server, port), raw_client(port) as client:
        client.begin("Wait")
        client._writer.write(client.http.data_to_send())
        await asyncio.wait_for(waiting.was_cancelled.wait(), 20)
        await until(lambda: not server._connections)


@in_loop
async def test_a_connection_that_answers_its_probes_stays() -> None:
    """Probed by hand: on a busy machine an answer may take as long as the time between probes."""
    waiting = Waiting()
    async with listening({"Wait": waiting}) as (server, port), raw_client(port) as client:
        client.begin("Wait")
        await client.round_trip()
        [connection] = server._connections
        for probes in range(1, 5):
            connection._probe()
            assert connection._is_silent, "the control: a second probe would close it"
            while sum(isinstance(e, h2.events.PingReceived) for e in client.events) < probes:
                await client.read()
            await until(lambda: not connection._is_silent)
        assert not waiting.was_cancelled.is_set()
