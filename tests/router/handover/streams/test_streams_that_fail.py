"""Decode that is asked early, where an engine fails, or the client leaves: nothing stays lent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from pdconn.router.router_server import Limits
from tests.fakes.deployment import leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import (
    ANSWER,
    CHUNKS,
    MODEL,
    FakeEngine,
    Seen,
    error,
    hang,
    reset,
)
from tests.router.handover.streams.streaming import (
    WORDS,
    ask_early,
    asked,
    hang_after_following,
    let_compute,
    returned,
    streaming,
    teach,
)

# Prefill fails or refuses


@pytest.mark.parametrize("status", [400, 404])
@in_loop
async def test_what_prefill_refuses_ends_at_decode(status):
    async def refuse(engine: FakeEngine, seen: Seen, http: web.Request) -> web.Response:
        await until(lambda: d.leases.followed)
        return error(status, WORDS)

    async with streaming() as d:
        await teach(d)
        d.prefill[0].script = refuse
        d.decode[0].script = hang_after_following
        reply = await d.complete()
        assert (reply.status, reply.error["message"]) == (status, WORDS)
        await until(lambda: d.decode[0].aborted)
        assert d.outcome("client_error") == 1
        assert len(d.decode[0].seen) == 1


@pytest.mark.parametrize("how", ["503", "broken", "late"])
@in_loop
async def test_the_next_prefill_engine_is_asked_without_a_stream(how):
    """And decode, which was to follow the first, is asked anew with the second one's ticket."""

    async def fail(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
        await until(lambda: d.leases.followed)
        if how == "late":
            return await hang(engine, seen, http)
        return error(503, WORDS) if how == "503" else await reset(engine, seen, http)

    async with streaming(2, prefill_timeout_s=0.3) as d:
        await teach(d)
        d.decode[0].script = hang_after_following
        d.prefill[0].script = fail
        assert (await d.complete()).body == ANSWER
        await until(lambda: d.decode[0].aborted)
        early, late = d.decode[0].seen
        assert early.stream is not None
        assert late.params["lease"] == "lease-3"
        assert "stream" not in d.prefill[1].seen[0].ours
        await until(lambda: not d.leases.held)
        assert d.metric("handed_over_requests_total") == 3


@in_loop
async def test_if_no_prefill_engine_answers_decode_is_asked_anew_and_computes():
    async def fail(engine: FakeEngine, seen: Seen, http: web.Request) -> web.Response:
        await until(lambda: d.leases.followed)
        return error(503, WORDS)

    async with streaming() as d:
        await teach(d)
        d.decode[0].script = hang_after_following
        d.prefill[0].script = fail
        assert (await d.complete()).body == ANSWER
        assert [bool(seen.params) for seen in d.decode[0].seen] == [True, False]
        assert d.metric("direct_requests_total", reason="prefill_error") == 1


@pytest.mark.parametrize("requires", [False, True])
@in_loop
async def test_prefill_that_lends_nothing_leaves_the_prompt_to_decode_if_allowed(requires):
    async with streaming(require_prefill=requires) as d:
        await teach(d)
        d.decode[0].script = hang_after_following
        asking = await ask_early(d)
        d.prefill[0].lends = False
        let_compute(d)
        reply = await asking
        await until(lambda: d.decode[0].aborted)
        assert reply.status == (503 if requires else 200)
        assert d.outcome("no_handover") == requires
        assert d.metric("direct_requests_total", reason="no_ticket") == (not requires)


# Decode fails


@in_loop
async def test_the_next_decode_engine_gets_the_early_ticket_if_the_first_was_not_reached():
    async with streaming(num_decode=2) as d:
        await teach(d)
        await d.decode[1].stop()
        asking = await ask_early(d)
        assert d.decode[0].seen[0].stream is not None
        let_compute(d)
        assert (await asking).body == ANSWER
        await until(lambda: not d.leases.held)
        assert d.metric("handed_over_requests_total") == 2


@pytest.mark.parametrize("how", ["503", "broken"])
@in_loop
async def test_after_decode_has_seen_it_the_ticket_is_returned_and_another_computes(how):
    async def fail(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
        if seen.body["model"] != MODEL:
            return await engine.answer(seen, http)
        engine.leases.followed.append(seen.stream)
        return error(503, WORDS) if how == "503" else await reset(engine, seen, http)

    async with streaming(num_decode=2) as d:
        await teach(d)
        d.decode[1].script = fail
        asking = await ask_early(d)
        assert (await asking).body == ANSWER, "before prefill has answered"
        assert not asked(d.decode[0])[0].params
        let_compute(d)
        await until(lambda: returned(d) == 1)
        await until(lambda: not d.leases.held)
        assert d.metric("direct_requests_total", reason="ticket_spent") == 1


@in_loop
async def test_where_prefill_is_required_a_spent_ticket_ends_the_request():
    async def fail(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
        if seen.body["model"] != MODEL:
            return await engine.answer(seen, http)
        engine.leases.followed.append(seen.stream)
        return error(503, WORDS)

    async with streaming(num_decode=2, require_prefill=True) as d:
        await teach(d)
        d.decode[1].script = fail
        reply = await (await ask_early(d))
        assert (reply.status, reply.error["message"]) == (503, WORDS)
        let_compute(d)
        await until(lambda: returned(d) == 1)
        await until(lambda: not d.leases.held)


@in_loop
async def test_a_mistake_that_decode_finds_is_the_clients_before_prefill_answers():
    async def refuse(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
        if seen.body["model"] != MODEL:
            return await engine.answer(seen, http)
        engine.leases.followed.append(seen.stream)
        return error(400, WORDS)

    async with streaming() as d:
        await teach(d)
        d.decode[0].script = refuse
        reply = await (await ask_early(d))
        assert (reply.status, reply.error["message"]) == (400, WORDS)
        let_compute(d)
        await until(lambda: returned(d) == 1)
        await until(lambda: not d.leases.held)


# Decode answers first


async def answers_at_once(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
    """Decode that has what it needs before prefill's answer has left."""
    if seen.stream is not None:
        engine.leases.followed.append(seen.stream)
    return web.Response(body=ANSWER, content_type="application/json")


@in_loop
async def test_prefill_that_answers_later_is_counted_all_the_same():
    async with streaming() as d:
        await teach(d)
        d.decode[0].script, d.prefill[0].cached_tokens = answers_at_once, 0
        reply = await (await ask_early(d))
        assert reply.body == ANSWER
        inflight = d.proxy.router.loads.inflight
        assert inflight.requests_at(d.prefill[0].url)[0] == 1
        let_compute(d)
        await until(lambda: d.metric("time_to_ticket_seconds_count") == 2)
        await until(lambda: not len(inflight))
        decision, outcome = next(d.proxy.router.decisions.newest())
        assert decision.request_id == reply.headers["X-Request-Id"]
        assert (outcome.prefill, outcome.cached_tokens) == (d.prefill[0].url, 0)
        assert (returned(d), d.metric("handed_over_requests_total")) == (0, 2)


@in_loop
async def test_prefill_that_fails_later_changes_nothing():
    async def fail(engine: FakeEngine, seen: Seen, http: web.Request) -> web.Response:
        await engine.computes.wait()
        return error(503, WORDS)

    async with streaming(2) as d:
        await teach(d)
        d.decode[0].script, d.prefill[0].script = answers_at_once, fail
        assert (await (await ask_early(d))).body == ANSWER
        let_compute(d)
        await until(lambda: not len(d.proxy.router.loads.inflight))
        assert not d.prefill[1].seen, "no other one is asked for it"
        assert d.outcome("ok") == 3


@in_loop
async def test_prefill_that_does_not_answer_is_aborted():
    async with streaming(limits=Limits(late_prefill_s=0.1)) as d:
        await teach(d)
        d.decode[0].script, d.prefill[0].script = answers_at_once, hang
        assert (await (await ask_early(d))).body == ANSWER
        await until(lambda: d.prefill[0].aborted)
        await until(lambda: not len(d.proxy.router.loads.inflight))


@in_loop
async def test_decode_that_computes_by_itself_returns_no_ticket_that_it_may_use():
    """It follows, gives up, and answers: what to do with the blocks is its own affair."""
    async with streaming() as d:
        await teach(d)
        d.decode[0].script = answers_at_once
        assert (await (await ask_early(d))).body == ANSWER
        d.decode[0].script = None
        d.prefill[0].boot = "its next boot"  # whose blocks decode has never heard of
        let_compute(d)
        await until(lambda: returned(d) == 1)
        assert "lease-2" not in d.leases.held


# The client leaves


@in_loop
async def test_leaving_while_both_compute_ends_both_and_gives_the_ticket_back():
    async with streaming(limits=Limits(patience_s=60.0)) as d:
        await teach(d)
        d.prefill[0].computes.clear()
        client = await d.open()
        await until(lambda: d.leases.followed)
        await leave(client)
        await until(lambda: d.decode[0].aborted)
        assert not d.prefill[0].aborted
        let_compute(d)
        await until(lambda: returned(d) == 1)
        assert not d.leases.held
        await until(lambda: not len(d.proxy.router.loads.inflight))


@in_loop
async def test_leaving_while_prefill_computes_for_long_aborts_both():
    async with streaming(limits=Limits(patience_s=0.1)) as d:
        await teach(d)
        d.prefill[0].computes.clear()
        client = await d.open()
        await until(lambda: d.leases.followed)
        await leave(client)
        await until(lambda: d.decode[0].aborted and d.prefill[0].aborted)
        assert len(asked(d.decode[0])) == 1
        await until(lambda: not len(d.proxy.router.loads.inflight))
        assert not d.leases.held


@in_loop
async def test_leaving_before_decode_has_its_turn_asks_it_nothing():
    async with streaming(stream_chunk=0, limits=Limits(patience_s=60.0)) as d:
        await teach(d)
        first = await ask_early(d, prompt=list(range(40)))
        client = await d.open()
        await until(lambda: len(d.prefill[0].seen) == 2)
        await leave(client)
        await until(lambda: d.outcome("client_left") == 1)
        let_compute(d)
        assert (await first).body == ANSWER
        await until(lambda: returned(d) == 1)
        assert len(asked(d.decode[0])) == 1
        assert not d.leases.held


@in_loop
async def test_crowds_that_come_and_go_leave_nothing_lent():
    async with streaming(2, 2, limits=Limits(patience_s=60.0), max_streams=5) as d:
        await teach(d)
        for engine in d.decode:
            engine.chunk_pause_s, engine.num_chunks = 0.005, len(CHUNKS) * 10
        for engine in d.prefill:
            engine.admission_s = 0.02
        clients = [await d.open(stream=True, prompt=f"p{i}") for i in range(60)]
        for number, client in enumerate(clients):
            await asyncio.sleep(0.002 if number % 3 else 0)
            await leave(client)
        await until(lambda: d.metric("inflight_requests") == 0)
        await until(lambda: not d.leases.held)
        await until(lambda: not len(d.proxy.router.loads.inflight))
        assert (await d.complete()).status == 200
