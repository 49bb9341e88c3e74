"""Clients that leave, at every moment: nothing stays lent, nothing stays running."""

import asyncio

import pytest

from pdconn.router.fleet.engine_client import EngineClient
from pdconn.router.openai.bodies import RETURN_MODEL
from pdconn.router.router_server import Limits
from tests.fakes.deployment import deployment, leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import CHUNKS, hang


@in_loop
async def test_leaving_while_prefill_computes_for_long_aborts_it():
    async with deployment(limits=Limits(patience_s=0.1)) as d:
        d.prefill[0].script = hang
        client = await d.open()
        await until(lambda: d.prefill[0].seen)
        await leave(client)
        await until(lambda: d.prefill[0].aborted)
        assert not d.decode[0].seen
        await until(lambda: d.outcome("client_left") == 1)
        assert d.metric("inflight_requests") == 0


@in_loop
async def test_leaving_while_the_ticket_is_on_its_way_gives_it_back():
    async def lend_and_dawdle(engine, seen, http):
        answer = engine.prefill_answer()  # the blocks are lent from here on
        await go_on.wait()
        return answer

    go_on = asyncio.Event()
    async with deployment(limits=Limits(patience_s=60.0)) as d:
        d.prefill[0].script = lend_and_dawdle
        client = await d.open()
        await until(lambda: d.leases.granted)
        await leave(client)
        await until(lambda: d.outcome("client_left") == 1)
        assert not d.prefill[0].aborted
        go_on.set()
        await until(lambda: d.metric("unused_tickets_total", outcome="returned") == 1)
        assert not d.leases.held
        assert d.decode[0].seen[0].body["model"] == RETURN_MODEL


@in_loop
async def test_closing_prefill_at_once_would_lose_the_ticket():
    """The control for the test above."""

    async def lend_and_dawdle(engine, seen, http):
        engine.prefill_answer()
        return await hang(engine, seen, http)

    async with deployment(limits=Limits(patience_s=0.0)) as d:
        d.prefill[0].script = lend_and_dawdle
        client = await d.open()
        await until(lambda: d.leases.granted)
        await leave(client)
        await until(lambda: d.prefill[0].aborted)
        await asyncio.sleep(0.05)
        assert d.leases.held == {"lease-1"}


@pytest.mark.parametrize("checks_names", [True, False])
@in_loop
async def test_leaving_while_decode_is_not_reached_gives_the_ticket_back(checks_names, monkeypatch):
    """The first decode engine is gone, and connecting to it takes its time."""
    post = EngineClient.post_body
    connecting, go_on = asyncio.Event(), asyncio.Event()

    async def slow(self, engine, *rest, **options):
        if engine == gone.url:
            connecting.set()
            await go_on.wait()
        return await post(self, engine, *rest, **options)

    monkeypatch.setattr(EngineClient, "post_body", slow)
    async with deployment(num_decode=2, limits=Limits(patience_s=60.0)) as d:
        gone, alive = d.decode
        alive.checks_names = checks_names
        await gone.stop()
        client = await d.open(max_tokens=9, stream=True)
        await connecting.wait()
        await leave(client)
        await until(lambda: d.outcome("client_left") == 1)
        go_on.set()
        await until(lambda: d.metric("unused_tickets_total", outcome="returned") == 1)
        assert not d.leases.held
        (asked,) = alive.seen  # only to give back: never the client's own request
        assert asked.body["model"] == RETURN_MODEL
        assert (asked.body["max_tokens"], asked.body["stream"]) == (1, False)


@in_loop
async def test_leaving_before_decode_looked_at_the_request_waits_until_it_has():
    async with deployment(limits=Limits(patience_s=60.0)) as d:
        d.decode[0].admitting.clear()
        d.decode[0].num_chunks = 100_000
        d.decode[0].chunk_pause_s = 0.01
        client = await d.open(stream=True)
        await until(lambda: d.decode[0].seen)
        await leave(client)
        await until(lambda: d.outcome("client_left") == 1)
        assert not d.decode[0].aborted  # closing now would strand the blocks
        d.decode[0].admitting.set()
        await until(lambda: d.decode[0].aborted)  # at the first byte
        assert not d.leases.held


@in_loop
async def test_closing_at_once_would_strand_the_blocks():
    """The control: without the wait the fake engine, like vLLM, notifies no lender."""
    async with deployment(limits=Limits(patience_s=0.0)) as d:
        d.decode[0].admitting.clear()
        client = await d.open()
        await until(lambda: d.decode[0].seen)
        await leave(client)
        await until(lambda: d.decode[0].aborted)
        await asyncio.sleep(0.05)
        assert d.leases.held == {"lease-1"}


@in_loop
async def test_a_client_that_leaves_is_not_served_to_the_end():
    async with deployment(limits=Limits(patience_s=0.1)) as d:
        d.decode[0].script = hang
        client = await d.open()
        await until(lambda: d.decode[0].seen)
        await leave(client)
        await until(lambda: d.decode[0].aborted)
        assert not d.leases.held


@in_loop
async def test_leaving_a_request_without_a_ticket_aborts_it_at_once():
    async with deployment() as d:
        d.decode[0].script = hang
        client = await d.open(prompt=["a", "b"])
        await until(lambda: d.decode[0].seen)
        await leave(client)
        await until(lambda: d.decode[0].aborted)


@in_loop
async def test_leaving_in_the_middle_of_a_stream_aborts_decode():
    async with deployment() as d:
        d.decode[0].num_chunks = 100_000
        d.decode[0].chunk_pause_s = 0.01
        client = await d.open(stream=True)
        await until(lambda: d.metric("decode_first_byte_seconds_count") == 1)
        await leave(client)
        await until(lambda: d.decode[0].aborted)
        await until(lambda: d.outcome("client_left") == 1)
        assert not d.leases.held


@in_loop
async def test_leaving_in_the_middle_of_ones_own_body_asks_no_engine():
    async with deployment() as d:
        port = int(d.proxy.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        await writer.drain()
        await until(lambda: d.metric("inflight_requests") == 1)
        await leave(writer)
        await until(lambda: d.metric("inflight_requests") == 0)
        assert not d.prefill[0].seen


@in_loop
async def test_crowds_that_come_and_go_leave_nothing_lent():
    async with deployment(num_prefill=2, num_decode=2, limits=Limits(patience_s=60.0)) as d:
        for engine in d.decode:
            engine.chunk_pause_s = 0.005
            engine.num_chunks = len(CHUNKS) * 10
        for engine in d.prefill:
            engine.admission_s = 0.02
        clients = [await d.open(stream=True, prompt=f"p{i}") for i in range(60)]
        for i, client in enumerate(clients):
            await asyncio.sleep(0.002 if i % 3 else 0)
            await leave(client)
        await until(lambda: d.metric("inflight_requests") == 0)
        await until(lambda: not d.leases.held)
        assert (await d.complete()).status == 200
