"""The client that laws of the hand-over script ends requests as the real one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import ConnectFailed, ConnectionLost, Delivery, EngineClient
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, FakeEngine, Leases, Seen, error, hang, reset
from tests.fakes.scripted.client import ScriptedClient

PATH = "/v1/completions"
BODY = b'{"model": "m", "prompt": "hi"}'
KINDS = pytest.mark.parametrize("kind", ["real", "scripted"])


class Either:
    """A client of either kind, and an engine that ends a request as it is told to."""

    def __init__(self, client: EngineClient | ScriptedClient, engine: FakeEngine) -> None:
        self.client, self.engine, self.delivery = client, engine, Delivery()
        self.closed: list[BaseException | None] = []

    async def ends(self, how: str) -> None:
        """The engine answers (by a status), breaks the connection, or is gone."""
        if isinstance(self.client, EngineClient):
            if how == "gone":
                await self.engine.stop()
            elif how == "broken":
                self.engine.script = reset
            elif how != "200":
                self.engine.script = refuse
            return
        if how == "gone":
            self.client.down.add(self.engine.url)
            return
        client = self.client
        await until(lambda: client.open)
        [ask] = client.open
        if how == "broken":
            ask.fail(ConnectionLost("it broke"))
        else:
            ask.respond(int(how))

    async def post_body(self, how: str) -> tuple[int, bytes]:
        """Status and body of the answer, which is closed."""
        if isinstance(self.client, EngineClient) or how == "gone":
            await self.ends(how)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._post())
            if isinstance(self.client, ScriptedClient) and how != "gone":
                await self.ends(how)
        return asking.result()

    async def _post(self) -> tuple[int, bytes]:
        headers: CIMultiDict[str] = CIMultiDict()
        answer = await self.client.post_body(self.engine.url, PATH, BODY, headers, self.delivery)
        answer.when_closed(self.closed.append)
        await answer.await_first()
        async with answer:
            return answer.status, await answer.read_rest()


async def refuse(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    return error(503, "busy")


@asynccontextmanager
async def either(kind: str) -> AsyncIterator[Either]:
    engine = FakeEngine(Leases())
    await engine.start()
    client = EngineClient(5.0) if kind == "real" else ScriptedClient()
    try:
        yield Either(client, engine)
    finally:
        await client.close()
        await engine.stop()


@KINDS
@in_loop
async def test_an_answer_was_seen_is_read_whole_and_closed_once(kind: str) -> None:
    async with either(kind) as made:
        assert await made.post_body("200") == (200, ANSWER)
        assert made.delivery.begun
        assert made.closed == [None]


@KINDS
@in_loop
async def test_a_refusal_is_an_answer(kind: str) -> None:
    async with either(kind) as made:
        status, _ = await made.post_body("503")
        assert status == 503
        assert made.delivery.begun


@KINDS
@in_loop
async def test_what_could_not_connect_was_not_seen(kind: str) -> None:
    async with either(kind) as made:
        with pytest.raises(ExceptionGroup) as failed:
            await made.post_body("gone")
        assert failed.group_contains(ConnectFailed)
        assert not made.delivery.begun


@KINDS
@in_loop
async def test_what_broke_may_have_been_seen(kind: str) -> None:
    async with either(kind) as made:
        with pytest.raises(ExceptionGroup) as failed:
            await made.post_body("broken")
        assert failed.group_contains(ConnectionLost)
        assert made.delivery.begun


@KINDS
@in_loop
async def test_one_that_is_cancelled_is_no_longer_asked(kind: str) -> None:
    async with either(kind) as made:
        made.engine.script = hang
        asking = asyncio.create_task(made._post())
        if isinstance(made.client, ScriptedClient):
            client = made.client
            await until(lambda: client.open)
        else:
            await until(lambda: made.engine.seen)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        if isinstance(made.client, ScriptedClient):
            assert not made.client.open
        else:
            await until(lambda: made.engine.aborted)
