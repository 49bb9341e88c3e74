"""Engines that refuse: which engine is next, and the client's answer, by role and status."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import partial

import pytest
from aiohttp import web

from pdconn.router.fleet.engine_registry import (
    LONGEST_NAMED_S,
    LONGEST_REST_S,
    MOST_IN_A_ROW,
    EngineRests,
)
from pdconn.router.handover.tries import ELSEWHERE, retry_after_s, status_of
from pdconn.router.router_server import Limits
from tests.fakes.deployment import deployment as deployed
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, CHUNKS, FakeEngine, Seen, error

deployment = partial(deployed, limits=Limits(first_backoff_s=0.05, last_returns_s=0.2))

WORDS = "the engine's own words"


def asked(engine: FakeEngine) -> list[Seen]:
    """What it was asked, without tickets that it was to return."""
    return [seen for seen in engine.seen if seen.body["model"] == "m"]


def refusing(status: int, **headers: str):
    async def refuse(engine, seen, http):
        reply = error(status, WORDS)
        reply.headers.update(headers)
        return reply

    return refuse


async def fails_in_stream(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    """As vLLM whose pull fails, or whose core dies: 200, then an error for a first event."""
    if not seen.body.get("stream"):
        return error(500, WORDS)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    await response.write(b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n')
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


# Who is asked next


@pytest.mark.parametrize("status", sorted(ELSEWHERE))
@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_another_engine_of_the_role_is_asked(role, status):
    async with deployment(num_prefill=2, num_decode=2) as d:
        bad, good = getattr(d, role)
        bad.script = refusing(status)
        for _ in range(4):
            reply = await d.complete()
            assert (reply.status, reply.body) == (200, ANSWER)
        assert asked(bad)
        assert asked(good)
        assert d.metric("engine_up", role=role, engine=bad.url) == 1
        assert d.metric("retries_total", role=role, engine=bad.url) == len(asked(bad))
        assert d.outcome("ok") == 4
        await until(lambda: not d.leases.held)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 501])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_any_other_status_is_the_clients(role, status):
    """The control: what another engine would answer, too."""
    async with deployment(num_prefill=2, num_decode=2) as d:
        for engine in getattr(d, role):
            engine.script = refusing(status)
        reply = await d.complete()
        assert (reply.status, reply.error["message"]) == (status, WORDS)
        assert sum(len(asked(engine)) for engine in getattr(d, role)) == 1


@pytest.mark.parametrize("status", sorted(ELSEWHERE))
@in_loop
async def test_decode_computes_if_every_prefill_engine_refuses(status):
    async with deployment(num_prefill=2) as d:
        for engine in d.prefill:
            engine.script = refusing(status)
        assert (await d.complete()).body == ANSWER
        assert [len(engine.seen) for engine in d.prefill] == [1, 1]
        assert not d.decode[0].seen[0].params
        assert d.metric("direct_requests_total", reason="prefill_error") == 1


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_the_only_decode_engine_is_asked_again_without_the_ticket(stream):
    """Its pull may have failed, which is no fault of its; its first event says so, too."""

    async def cannot_pull(engine, seen, http):
        return await (fails_in_stream if seen.params else FakeEngine.answer)(engine, seen, http)

    async with deployment() as d:
        d.decode[0].script = cannot_pull
        reply = await d.complete(stream=stream)
        assert (reply.status, reply.body) == (200, b"".join(CHUNKS) if stream else ANSWER)
        assert [bool(seen.params) for seen in d.decode[0].seen[:2]] == [True, False]
        assert d.metric("direct_requests_total", reason="ticket_spent") == 1
        assert d.outcome("ok") == 1


@in_loop
async def test_a_stream_that_has_begun_is_not_begun_again():
    """The control: an error after a token reaches the client as it is."""
    later = b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"error": {"code": 500}}\n\n'

    async def fails_later(engine, seen, http):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for event in later:
            await response.write(event)
            await asyncio.sleep(0.2)  # else both may be here before a byte goes to the client
        await response.write_eof()
        return response

    async with deployment(num_decode=2) as d:
        d.decode[0].script = fails_later
        assert (await d.complete(stream=True)).body == b"".join(later)
        assert not d.decode[1].seen


def of_length(engine: FakeEngine, max_model_len: int, prompt_tokens: int) -> None:
    """As vLLM does: it lists its length, and refuses prompts of more tokens with 400."""
    engine.models = [{"id": "m", "max_model_len": max_model_len}]
    if prompt_tokens > max_model_len:
        engine.script = refusing(400)


@in_loop
async def test_a_prompt_too_long_for_prefill_alone_is_decodes():
    """Prefill's shorter ``max_model_len`` was the client's 400."""
    async with deployment(num_prefill=2, num_decode=1) as d:
        for engine in d.prefill:
            of_length(engine, 100, 500)
        of_length(d.decode[0], 1000, 500)
        assert (await d.complete()).body == ANSWER
        assert not asked(d.decode[0])[0].params
        assert d.metric("direct_requests_total", reason="prefill_too_short") == 1
        assert d.metric("engine_up", role="prefill", engine=d.prefill[0].url) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_an_engine_that_takes_longer_prompts_is_asked(role):
    async with deployment(num_prefill=2, num_decode=2) as d:
        for engine in (*d.prefill, *d.decode):
            of_length(engine, 1000, 500)
        of_length(getattr(d, role)[0], 100, 500)
        for _ in range(MOST_IN_A_ROW + 2):
            assert (await d.complete()).body == ANSWER
        assert asked(getattr(d, role)[0]), "it is no fault of its, and it does not rest"
        handed_over = [seen for engine in d.decode for seen in asked(engine) if seen.params]
        assert len(handed_over) >= MOST_IN_A_ROW + 2


@in_loop
async def test_a_mistake_of_the_client_is_the_clients_where_lengths_differ():
    """The control: an engine that takes longer prompts answers the same, once."""
    async with deployment() as d:
        of_length(d.prefill[0], 100, 500)
        of_length(d.decode[0], 1000, 5000)
        reply = await d.complete()
        assert (reply.status, reply.error["message"]) == (400, WORDS)
        assert [len(asked(engine)) for engine in (*d.prefill, *d.decode)] == [1, 1]


@in_loop
async def test_a_prompt_too_long_for_prefill_is_refused_where_prefill_is_required():
    async with deployment(require_prefill=True) as d:
        of_length(d.prefill[0], 100, 500)
        of_length(d.decode[0], 1000, 500)
        assert (await d.complete()).status == 400
        assert not asked(d.decode[0])


# What the client gets where no engine is left


@pytest.mark.parametrize("status", sorted(ELSEWHERE))
@in_loop
async def test_the_client_gets_the_last_answer_if_all_decode_engines_refuse(status):
    async with deployment(num_decode=2) as d:
        for engine in d.decode:
            engine.script = refusing(status, **{"Retry-After": "7"})
        reply = await d.complete()
        assert (reply.status, reply.error["message"]) == (status, WORDS)
        assert reply.headers["Retry-After"] == "7"
        assert all(engine.seen for engine in d.decode)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_where_prefill_is_required_decode_computes_nothing(role):
    async with deployment(num_prefill=2, num_decode=2, require_prefill=True) as d:
        for engine in getattr(d, role):
            engine.script = refusing(503)
        reply = await d.complete()
        assert (reply.status, reply.error["message"]) == (503, WORDS)
        tickets = [seen.params for engine in d.decode for seen in asked(engine)]
        assert all(tickets)
        assert len(tickets) == (0 if role == "prefill" else 1)


# Engines that do it again and again


@in_loop
async def test_an_engine_that_refuses_again_and_again_gets_less():
    """It kept its share for ever: half of all requests here."""
    async with deployment(num_prefill=2, num_decode=2) as d:
        for bad in (d.prefill[0], d.decode[0]):
            bad.script = refusing(500)
        for _ in range(20):
            assert (await d.complete()).status == 200
        assert len(d.prefill[0].seen) == MOST_IN_A_ROW
        assert len(d.prefill[1].seen) == 20
        d.decode[0].script = None
        await asyncio.sleep(1.2)
        for _ in range(6):
            assert (await d.complete()).status == 200
        assert len(asked(d.decode[0])) > MOST_IN_A_ROW + 1


@in_loop
async def test_an_engine_rests_as_long_as_it_says():
    async with deployment(num_decode=2) as d:
        bad, good = d.decode
        bad.script = refusing(429, **{"Retry-After": "30"})
        for _ in range(6):
            assert (await d.complete()).status == 200
        assert len(asked(bad)) == 1
        assert len(good.seen) >= 6
        await good.stop()
        bad.script = None
        assert (await d.complete()).body == ANSWER, (
            "where no other is left it is asked all the same"
        )


@in_loop
async def test_an_engine_whose_health_says_so_is_down_after_one_answer():
    """vLLM's API server answers 500 when its core has died, and 503 at /health."""
    async with deployment(num_decode=2) as d:
        dead = d.decode[0]
        dead.script, dead.health_status = refusing(500), 503
        assert (await d.complete()).status == 200
        await until(lambda: d.metric("engine_up", role="decode", engine=dead.url) == 0)
        dead.script, dead.health_status = None, 200
        await until(lambda: d.metric("engine_up", role="decode", engine=dead.url) == 1)


@in_loop
async def test_what_is_passed_on_goes_to_another_engine_too():
    async with deployment(num_prefill=2, num_decode=2) as d:
        for engine in (*d.prefill[:1], *d.decode):
            engine.other = lambda seen: error(503, WORDS)
        d.prefill[1].other = lambda seen: web.json_response({"ok": True})
        for _ in range(4):
            assert (await d.send("/v1/embeddings", b"{}")).status == 200
        d.prefill[1].other = lambda seen: error(503, WORDS)
        assert (await d.send("/v1/embeddings", b"{}")).error["message"] == WORDS


@in_loop
async def test_an_engine_that_refuses_returns_no_ticket_and_another_one_does():

    async def cannot_return(engine, seen, http):
        return error(400 if seen.body["model"] == "m" else 503, WORDS)

    async with deployment(num_decode=2) as d:
        d.decode[0].script = cannot_return
        d.decode[0].tell_lender = lambda seen: None
        assert (await d.complete()).status == 400
        await until(lambda: d.metric("unused_tickets_total", outcome="returned") == 1)
        assert not d.leases.held


# The pure parts


def test_rests_grow_and_end_with_an_answer():
    rests = EngineRests()
    assert [rests.note_failure("e", 0.0) for _ in range(MOST_IN_A_ROW)] == [None, None, 1.0]
    assert rests.is_resting("e", 0.9)
    assert not rests.is_resting("e", 1.0)
    assert rests.note_failure("e", 0.5) is None  # sent before it rested
    now, seen = 1.0, []
    for _ in range(6):
        seen.append(rests.note_failure("e", now))
        now += seen[-1]
    assert seen == [2.0, 4.0, 8.0, LONGEST_REST_S, LONGEST_REST_S, LONGEST_REST_S]
    rests.note_success("e")
    assert rests.note_failure("e", now) is None
    assert rests.note_failure("e", now, 1e9) == LONGEST_NAMED_S
    rests.keep_engines(())
    assert not rests.is_resting("e", now)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        (" 120 ", 120.0),
        ("Fri, 27 Nov 2026 09:00:30 GMT", 30.0),
        ("Fri, 27 Nov 2026 08:00:00 GMT", 0.0),
        ("-1", None),
        ("1.5", None),
        ("9" * 40, None),
        ("٣", None),
        ("", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value, seconds):
    assert retry_after_s(value, datetime(2026, 11, 27, 9, tzinfo=UTC)) == seconds


@pytest.mark.parametrize(
    ("chunk", "status"),
    [
        (b'data: {"error": {"message": "x", "code": 503}}\n\ndata: [DONE]\n\n', 503),
        (b'event: error\ndata: {"type": "error", "error": {"type": "api_error"}}\n\n', 500),
        (b'data: {"error": {"code": 400}}\n\n', 400),
        (b'data: {"choices": [{"text": "\\"error\\": {}"}]}\n\n', 200),
        (b'data: {"error": null}\n\n', 200),
        (b"data: [DONE]\n\n", 200),
        (b'data: {"error": {"co', 200),
        (b"", 200),
    ],
)
def test_an_error_with_which_a_stream_begins_is_its_status(chunk, status):
    assert status_of(200, {"Content-Type": "text/event-stream"}, chunk) == status
    assert status_of(200, {"Content-Type": "application/json"}, chunk) == 200
