"""What a picker makes of a gateway's reports, and of reports that are missing."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from aiohttp import web

from pdconn.router.labels import PickEnd, RequestEnd
from pdconn.router.picker import picker_service
from pdconn.router.picker.gateway_reports import MOST_MISSED
from tests.fakes.deployment import Deployment, deployment, leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, MODEL, FakeEngine
from tests.router.picker.gateway import MODES, Filter, behind_envoy


def picks(d: Deployment) -> dict[PickEnd, float]:
    found = {one: d.metric("picks_total", answered_by=one.value) for one in PickEnd}
    return {one: count for one, count in found.items() if count}


def outcomes(d: Deployment) -> dict[RequestEnd, float]:
    found = {one: d.outcome(one.value) for one in RequestEnd}
    return {one: count for one, count in found.items() if count}


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [one.getMessage() for one in caplog.records if text in one.getMessage()]


async def failing(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"code": 503}}, status=503)


def returned(d: Deployment) -> float:
    return d.metric("unused_tickets_total", outcome="returned")


# Where it sent a request


@pytest.mark.parametrize("lacks", [0, 1])
@in_loop
async def test_a_pick_that_a_gateway_does_not_honour_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture, lacks: int
) -> None:
    """Its cluster lacks the only decode engine, and has prefill's; the engine gets no blame."""
    async with deployment(running=behind_envoy(Filter(lacks=lacks))) as d:
        answering = d.prefill[0] if lacks else d.decode[0]
        for _ in range(3):
            reply = await d.complete()
            assert reply.headers["X-Pdconn-Engine"] == answering.url
        await until(lambda: d.outcome("ok") == 3)
        assert picks(d) == {PickEnd.ELSEWHERE if lacks else PickEnd.FIRST: 3}
        lines = warnings(caplog, "elsewhere than to the endpoint")
        assert len(lines) == lacks
        if lacks:
            assert f"picked={d.decode[0].url.removeprefix('http://')} " in lines[0]
            assert f"sent_to={d.prefill[0].url.removeprefix('http://')} " in lines[0]


@in_loop
async def test_an_engine_is_not_blamed_for_what_another_one_answered() -> None:
    async with deployment(num_decode=1, running=behind_envoy(Filter(lacks=1))) as d:
        await d.complete()
        d.prefill[0].script = failing  # as decode
        await d.complete()
        assert d.metric("retries_total", role="decode", engine=d.decode[0].url) == 0


@pytest.mark.parametrize("tells", [True, False])
@in_loop
async def test_what_a_gateway_does_not_tell_is_counted_as_such(tells: bool) -> None:
    more = {} if tells else {"response_attributes": []}
    async with deployment(num_decode=2, running=behind_envoy(Filter(more=more))) as d:
        await d.complete()
        await d.decode[1].stop()
        assert (await d.complete()).body == ANSWER
        assert picks(d) == ({PickEnd.FIRST: 1, PickEnd.NEXT: 1} if tells else {PickEnd.UNTOLD: 2})


# Whether it reports answers


@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_a_gateway_that_reports_no_answers_has_no_clients_that_left(
    caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    async with deployment(running=behind_envoy(Filter(mode, reports=False))) as d:
        for number in range(1, MOST_MISSED + 5):
            assert (await d.complete()).body == ANSWER
            await until(lambda number=number: d.outcome("unseen") == number)
        assert outcomes(d) == {RequestEnd.UNSEEN: MOST_MISSED + 4}
        assert not len(d.proxy.router.loads.inflight)
        assert returned(d) <= MOST_MISSED  # and not of each request
        assert len(warnings(caplog, "response_header_mode")) == 1


@in_loop
async def test_clients_that_leave_are_counted_once_a_gateway_has_reported_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The control."""
    stands = asyncio.Event()

    async def stand(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
        if seen.body["model"] == MODEL:
            await stands.wait()
        return web.json_response({}, status=404)

    async with deployment(running=behind_envoy(Filter())) as d:
        await d.complete()
        d.decode[0].script = stand
        for number in range(1, MOST_MISSED + 3):
            asked = len(d.decode[0].seen)
            writer = await d.open()
            await until(lambda asked=asked: len(d.decode[0].seen) > asked)
            await leave(writer)
            await until(lambda number=number: d.outcome("client_left") == number)
            await until(lambda number=number: returned(d) == number)
        assert outcomes(d) == {RequestEnd.CLIENT_LEFT: MOST_MISSED + 2, RequestEnd.OK: 1}
        assert not warnings(caplog, "response_header_mode")
        stands.set()


# Whether it ends requests in time


async def endless(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    for _ in itertools.count():
        await response.write(b"data: {}\n\n")
        await asyncio.sleep(0.02)
    return response


async def silent(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
    if seen.body["model"] == MODEL:
        await asyncio.sleep(60)
    return web.json_response({}, status=404)


async def lasting(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
    await asyncio.sleep(2.5)
    return web.Response(body=ANSWER)


@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_a_request_ends_at_the_gateway_when_the_routers_time_is_over(mode: str) -> None:
    settings = {"request_timeout_s": 1.0}
    async with deployment(running=behind_envoy(Filter(mode)), **settings) as d:
        d.decode[0].script = silent
        async with asyncio.timeout(20):
            reply = await d.complete()
        assert (reply.status, reply.error["type"]) == (504, "GatewayTimeoutError")
        await until(lambda: outcomes(d) == {RequestEnd.TIMED_OUT: 1})
        await until(lambda: returned(d) == 1)
        # Too slow for a client is not broken.
        assert d.metric("retries_total", role="decode", engine=d.decode[0].url) == 0
        # What the gateway says then is no first byte of an engine.
        assert d.metric("decode_first_byte_seconds_count") == 0
        d.decode[0].script = endless
        async with asyncio.timeout(20):
            body = {"model": MODEL, "prompt": "x", "stream": True}
            async with d.client.post(d.url("/v1/completions"), json=body) as answer:
                assert answer.status == 200
                with pytest.raises(Exception, match="payload"):
                    await answer.read()
        await until(lambda: outcomes(d) == {RequestEnd.TIMED_OUT: 2})
        assert d.metric("decode_first_byte_seconds_count") == 1
        d.decode[0].script = None
        assert (await d.complete()).status == 200
        await until(lambda: outcomes(d) == {RequestEnd.TIMED_OUT: 2, RequestEnd.OK: 1})


@in_loop
async def test_a_gateway_that_does_not_heed_the_routers_time_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The control: Envoy lets processors change its own headers only if it is told to."""
    shape = Filter(more={"mutation_rules": {}})
    async with deployment(running=behind_envoy(shape), request_timeout_s=1.0) as d:
        d.decode[0].script = lasting
        both = await asyncio.gather(d.complete(), d.complete())
        assert [reply.status for reply in both] == [200, 200]
        await until(lambda: outcomes(d) == {RequestEnd.OK: 2})
        assert len(warnings(caplog, "allow_envoy")) == 1


# How many calls it has


@pytest.mark.parametrize("most", [1, 2])
@in_loop
async def test_more_calls_than_allowed_are_refused_as_requests_are(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Before their heads are read; the control has room for two."""
    monkeypatch.setattr(picker_service, "SPARE_CALLS", most - 9)
    async with deployment(running=behind_envoy(Filter()), max_requests=9) as d:
        d.prefill[0].computes.clear()
        first = asyncio.create_task(d.complete())
        await until(lambda: len(d.prefill[0].seen) == 1)
        second = asyncio.create_task(d.complete())
        if most == 1:
            reply = await second
            assert (reply.status, reply.error["type"]) == (503, "ServiceUnavailableError")
            assert reply.headers["Retry-After"] == "1"
        else:
            await until(lambda: len(d.prefill[0].seen) == 2)
        d.prefill[0].computes.set()
        assert (await first).status == 200
        assert (await second).status == (503 if most == 1 else 200)
        assert d.metric("gateway_calls_refused_total", reason="too_many") == 2 - most
        assert (await d.complete()).status == 200
