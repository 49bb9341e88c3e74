"""Calls of grpcio's client: what it sees is the same by the picker's server and by grpcio's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
from h2.settings import SettingCodes

from pdconn.router.picker.rpc import gateway_connection
from pdconn.router.picker.rpc.call import NOT_FOUND, CallFailed
from tests.fakes.event_loop import in_loop, until
from tests.router.picker.rpc.servers import (
    MOST_NBYTES,
    Side,
    begin,
    channel_to,
    ended,
    serving,
    serving_by_grpcio,
)

SIZES = [0, 1, 5, 16_379, 16_384, 16_385, 65_530, 1 << 20, (4 << 20) + 3]
both = pytest.mark.parametrize(
    "serve", [serving, serving_by_grpcio], ids=["the picker's", "grpcio's"]
)


def in_loop_of_each(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """As ``in_loop`` for the picker's server; grpcio's closes its sockets when it likes."""

    @functools.wraps(test)
    def run(*args: Any, serve: Any, **kwargs: Any) -> None:
        if serve is serving:
            in_loop(test)(*args, serve=serve, **kwargs)
        else:
            asyncio.run(test(*args, serve=serve, **kwargs))  # type: ignore[arg-type]

    return run


async def echo(side: Side) -> None:
    while (message := await side.read()) is not None:
        await side.write(message)


@both
@in_loop_of_each
async def test_messages_of_any_length_pass_both_ways(serve: Any) -> None:
    async with serve({"Echo": echo}) as port, channel_to(port) as channel:
        call = begin(channel, "Echo")
        for number, nbytes in enumerate(SIZES):
            sent = bytes([number]) * nbytes
            await call.write(sent)
            assert await call.read() == sent
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await ended(call) == (grpc.StatusCode.OK, "")


@both
@in_loop_of_each
async def test_messages_written_together_arrive_one_by_one(serve: Any) -> None:
    async def three(side: Side) -> None:
        await side.write(b"a", b"", b"c" * 70_000)

    async with serve({"Three": three}) as port, channel_to(port) as channel:
        call = begin(channel, "Three")
        assert [await call.read() for _ in range(3)] == [b"a", b"", b"c" * 70_000]
        assert await call.read() is grpc.aio.EOF


@both
@in_loop_of_each
async def test_more_calls_at_once_than_a_connection_takes(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = gateway_connection._LATER | {SettingCodes.MAX_CONCURRENT_STREAMS: 8}
    monkeypatch.setattr(gateway_connection, "_LATER", few)
    at_once = most = 0

    async def count(side: Side) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        while (message := await side.read()) is not None:
            await side.write(message)
        at_once -= 1

    async with serve({"Count": count}) as port, channel_to(port) as channel:

        async def one(number: int) -> None:
            call = begin(channel, "Count")
            for turn in range(3):
                sent = f"{number} {turn}".encode()
                await call.write(sent)
                assert await call.read() == sent
            await call.done_writing()
            assert (await ended(call))[0] is grpc.StatusCode.OK

        await asyncio.gather(*(one(number) for number in range(40)))
    assert most <= 8 or serve is serving_by_grpcio
    assert most > 1, "the control: they ran side by side"


class Waiting:
    """A handler that waits until it is cancelled."""

    def __init__(self) -> None:
        self.has_begun, self.was_cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, side: Side) -> None:
        self.has_begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise


@both
@in_loop_of_each
async def test_a_call_that_the_client_breaks_off_is_cancelled(serve: Any) -> None:
    waiting = Waiting()
    async with serve({"Wait": waiting}) as port, channel_to(port) as channel:
        call = begin(channel, "Wait")
        await asyncio.wait_for(waiting.has_begun.wait(), 20)
        assert not waiting.was_cancelled.is_set()
        call.cancel()
        await asyncio.wait_for(waiting.was_cancelled.wait(), 20)


@both
@in_loop_of_each
async def test_a_connection_that_ends_cancels_its_calls(serve: Any) -> None:
    waiting = Waiting()
    async with serve({"Wait": waiting}) as port:
        async with channel_to(port) as channel:
            call = begin(channel, "Wait")
            await asyncio.wait_for(waiting.has_begun.wait(), 20)
            del call
        await asyncio.wait_for(waiting.was_cancelled.wait(), 20)


@in_loop
async def test_a_pending_read_is_cancelled_with_its_call() -> None:
    """grpcio's ends without a message."""
    ends: list[BaseException] = []

    async def read(call: Any) -> None:
        await call.write(b"reading")
        try:
            await call.read()
        except asyncio.CancelledError as error:
            ends.append(error)
            raise

    async with serving({"Read": read}) as port, channel_to(port) as channel:
        call = begin(channel, "Read")
        assert await call.read() == b"reading"
        call.cancel()
        await until(lambda: ends)


async def fail_at_once(side: Side) -> None:
    raise CallFailed(NOT_FOUND, "no 100 % such thing: \u00e4")


async def fail_later(side: Side) -> None:
    await side.write(b"first")
    raise CallFailed(NOT_FOUND, "later")


@both
@in_loop_of_each
async def test_a_failure_has_its_status_and_its_words(serve: Any) -> None:
    handlers = {"AtOnce": fail_at_once, "Later": fail_later}
    async with serve(handlers) as port, channel_to(port) as channel:
        call = begin(channel, "AtOnce")
        assert await ended(call) == (grpc.StatusCode.NOT_FOUND, "no 100 % such thing: \u00e4")
        call = begin(channel, "Later")
        assert await call.read() == b"first"
        assert await ended(call) == (grpc.StatusCode.NOT_FOUND, "later")


@both
@in_loop_of_each
async def test_a_defect_of_a_handler_ends_its_call_alone(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(side: Side) -> None:
        raise ValueError("a secret")

    async with serve({"Broken": broken, "Echo": echo}) as port, channel_to(port) as channel:
        going_on = begin(channel, "Echo")
        await going_on.write(b"1")
        assert await going_on.read() == b"1"
        assert (await ended(begin(channel, "Broken")))[0] is grpc.StatusCode.UNKNOWN
        await going_on.write(b"2")
        assert await going_on.read() == b"2"
        if serve is serving:
            assert "a secret" not in (await ended(begin(channel, "Broken")))[1]
        going_on.cancel()
    assert "a secret" in caplog.text


@both
@in_loop_of_each
async def test_a_method_that_is_not_there(serve: Any) -> None:
    async with serve({"Echo": echo}) as port, channel_to(port) as channel:
        assert (await ended(begin(channel, "Other")))[0] is grpc.StatusCode.UNIMPLEMENTED


@both
@in_loop_of_each
async def test_a_message_above_the_limit_ends_its_call_alone(serve: Any) -> None:
    async with serve({"Echo": echo}) as port, channel_to(port) as channel:
        call, going_on = begin(channel, "Echo"), begin(channel, "Echo")
        await call.write(b"x" * MOST_NBYTES)
        assert len(await call.read()) == MOST_NBYTES, "the control"
        await call.write(b"x" * (MOST_NBYTES + 1))
        assert (await ended(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await going_on.write(b"1")
        assert await going_on.read() == b"1"
        going_on.cancel()


@in_loop
async def test_compressed_messages_are_refused() -> None:
    gzip = grpc.Compression.Gzip
    async with serving({"Echo": echo}) as port, channel_to(port, compression=gzip) as channel:
        call = begin(channel, "Echo")
        await call.write(b"x" * 10_000)
        code, words = await ended(call)
        assert (code, words) == (
            grpc.StatusCode.UNIMPLEMENTED,
            "messages must not be compressed",
        )


@both
@in_loop_of_each
async def test_a_handler_that_ends_early_ends_the_call(serve: Any) -> None:
    """The client has not ended its side, and goes on by the same connection."""

    async def first_only(side: Side) -> None:
        assert await side.read() is not None

    async with serve({"First": first_only, "Echo": echo}) as port, channel_to(port) as channel:
        for _ in range(3):
            call = begin(channel, "First")
            await call.write(b"x" * 100_000)
            assert (await ended(call))[0] is grpc.StatusCode.OK
        call = begin(channel, "Echo")
        await call.write(b"1")
        assert await call.read() == b"1"
        call.cancel()


@in_loop
async def test_the_end_of_a_clients_side_is_told_only_while_nothing_is_read() -> None:
    told: list[str] = []

    async def watch(call: Any) -> None:
        call.when_ended(lambda: told.append("before a message"))
        await call.write(b"watching")
        assert await call.read() == b"1"
        call.when_ended(lambda: told.append("after it"))
        await call.write(b"watching")
        await until(lambda: told)

    async with serving({"Watch": watch}) as port, channel_to(port) as channel:
        call = begin(channel, "Watch")
        assert await call.read() == b"watching"
        await call.write(b"1")
        assert await call.read() == b"watching"
        assert told == []
        await call.done_writing()
        assert (await ended(call))[0] is grpc.StatusCode.OK
    assert told == ["after it"]
