"""An engine that ends a request without output, as one that stops does: another one is asked.

vLLM's status is 200 and its ``/health`` is well; see ``tests/router/openai/aborted.py``.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from pdconn.router.openai.requests import Route
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, CHUNKS, FakeEngine, Script, Seen, error, stream_of
from tests.router.openai.aborted import EVENTS, aborts, stream_pieces

PATHS = [route.path for route in Route]
ROLE = stream_pieces(Route.CHAT, EVENTS[Route.CHAT])[0]


def begins(beginning: bytes, go_on: asyncio.Event, said: asyncio.Event | None = None) -> Script:
    """A script: a stream of which ``beginning`` is written, and one chunk after ``go_on``."""

    async def script(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(beginning)
        if said is not None:
            said.set()
        await go_on.wait()
        await response.write(CHUNKS[0])
        await response.write_eof()
        return response

    return script


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_another_decode_engine_answers(path: str, stream: bool) -> None:
    async with deployment(num_decode=2) as d:
        d.decode[0].script = aborts
        reply = await d.complete(path, stream=stream)
        assert (reply.status, reply.body) == (200, b"".join(CHUNKS) if stream else ANSWER)
        assert reply.headers["X-Pdconn-Engine"] == d.decode[1].url
        # The first may have used the ticket, and has not told the lender that it is not needed.
        assert [bool(one.seen[0].params) for one in d.decode] == [True, False]
        await until(lambda: d.metric("unused_tickets_total", outcome="returned") == 1)
        assert (d.leases.granted, d.leases.held) == (1, set())
        assert d.metric("direct_requests_total", reason="ticket_spent") == 1
        assert d.outcome("ok", path) == 1
        assert d.metric("retries_total", role="decode", engine=d.decode[0].url) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_where_all_do_the_client_is_told(path: str, stream: bool) -> None:
    """An empty answer with status 200 reaches no client."""
    async with deployment(num_decode=2) as d:
        for engine in d.decode:
            engine.script = aborts
        reply = await d.complete(path, stream=stream)
        assert reply.status == 503
        assert b"it ended the request without any output" in reply.body
        assert d.outcome("no_engine", path) == 1


@in_loop
async def test_such_an_engine_is_asked_after_others_for_a_while() -> None:
    """It drains for minutes, and its ``/health`` is well: without a rest each turn is lost."""
    async with deployment(num_decode=2) as d:
        d.decode[0].script = aborts
        for _ in range(40):
            assert (await d.complete()).body == ANSWER
        assert len(d.decode[0].seen) < 10
        assert d.metric("engine_up", role="decode", engine=d.decode[0].url) == 1


@in_loop
async def test_a_request_is_not_blamed_for_engines_that_stop() -> None:
    """Two that a request breaks are the last that it reaches; these it has not broken."""
    async with deployment(num_decode=4, retries=3) as d:
        for engine in d.decode[:3]:
            engine.script = aborts
        reply = await d.complete()
        assert (reply.status, reply.headers["X-Pdconn-Engine"]) == (200, d.decode[3].url)


@in_loop
async def test_another_prefill_engine_lends() -> None:
    """It was taken for one without a connector, and decode computed the prompt."""
    async with deployment(num_prefill=2) as d:
        d.prefill[0].script = aborts
        assert (await d.complete()).body == ANSWER
        assert [len(one.seen) for one in d.prefill] == [1, 1]
        assert d.decode[0].seen[0].params["lease"] == "lease-1"
        assert d.metric("direct_requests_total", reason="no_ticket") == 0


@in_loop
async def test_without_another_prefill_engine_decode_computes() -> None:
    async with deployment() as d:
        d.prefill[0].script = aborts
        assert (await d.complete()).body == ANSWER
        assert not d.decode[0].seen[0].params
        assert d.metric("direct_requests_total", reason="no_prefill") == 1


@in_loop
async def test_a_batch_of_chats_goes_to_another_engine() -> None:
    cut = {"choices": [{"finish_reason": "abort"}, {"finish_reason": "abort"}]}

    async with deployment(num_decode=2) as d:
        d.decode[0].other = lambda seen: web.json_response(cut)
        d.decode[1].other = lambda seen: web.json_response({"choices": [{"finish_reason": "stop"}]})
        seen = [await d.send("/v1/chat/completions/batch", b"{}") for _ in range(2)]
        assert {reply.headers["X-Pdconn-Engine"] for reply in seen} == {d.decode[1].url}
        assert len(d.decode[0].others) >= 1


@pytest.mark.parametrize("beginning", [b": keep-alive\n\n", ROLE], ids=["comment", "role"])
@in_loop
async def test_a_beginning_is_held_back_for_a_second_and_no_longer(beginning: bytes) -> None:
    """What keeps a connection alive is to do so; reasoning that is hidden may take minutes."""
    go_on = asyncio.Event()
    async with deployment() as d:
        d.decode[0].script = begins(beginning, go_on)
        body = {"model": "m", "messages": [], "stream": True}
        async with d.client.post(d.url("/v1/chat/completions"), json=body) as reply:
            assert await reply.content.readany() == beginning
            go_on.set()
            assert await reply.content.read() == CHUNKS[0]
        assert d.outcome("ok", "/v1/chat/completions") == 1


@in_loop
async def test_a_response_that_is_kept_where_it_is_aborted_is_not_said_to_be_unknown() -> None:
    """Its client would give the conversation up."""
    body = {"previous_response_id": "resp_1", "input": "hi"}

    async def unknown(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
        return error(404, "Response not found")

    async with deployment(num_decode=2) as d:
        d.decode[0].script, d.decode[1].script = aborts, unknown
        assert (await d.complete("/v1/responses", **body)).status == 503
        d.decode[0].script = unknown
        assert (await d.complete("/v1/responses", **body)).status == 404


@pytest.mark.parametrize("order", [1, -1], ids=["failed first", "failed last"])
@in_loop
async def test_a_kept_response_is_not_unknown_while_an_engine_fails(order: int) -> None:
    """As above, on the routes that name a response: one may keep it that answers 503."""
    async with deployment(num_decode=3) as d:
        failing, *others = d.decode[::order]
        failing.other = lambda seen: error(503, "busy")
        assert (await d.send("/v1/responses/resp_1", method="GET")).status == 503
        failing.other = others[0].other
        assert (await d.send("/v1/responses/resp_1", method="GET")).status == 404  # the control
        await failing.stop()
        assert (await d.send("/v1/responses/resp_1", method="GET")).status == 503


@in_loop
async def test_a_client_that_leaves_while_the_beginning_is_held_back_aborts_its_request() -> None:
    async with deployment() as d:
        d.decode[0].script = begins(ROLE, asyncio.Event(), said := asyncio.Event())
        asked = asyncio.create_task(d.complete("/v1/chat/completions", stream=True))
        await said.wait()
        asked.cancel()
        async with asyncio.timeout(10.0):
            while not d.decode[0].aborted:
                await asyncio.sleep(0.01)
            while not d.outcome("client_left", "/v1/chat/completions"):
                await asyncio.sleep(0.01)


@in_loop
async def test_a_stream_that_is_aborted_after_a_token_reaches_the_client_as_it_is() -> None:
    """The control: it has begun, and cannot begin anew.  It is no success."""
    events = (
        {"choices": [{"text": "a", "finish_reason": None}]},
        {"choices": [{"text": "", "finish_reason": "abort"}]},
    )
    async with deployment(num_decode=2) as d:
        d.decode[0].script = stream_of(*events, pause_s=0.2)
        reply = await d.complete(stream=True)
        sent = [f"data: {json.dumps(event)}\n\n" for event in events]
        assert reply.body.decode() == "".join(sent) + "data: [DONE]\n\n"
        assert not d.decode[1].seen
        assert d.outcome("engine_error") == 1
