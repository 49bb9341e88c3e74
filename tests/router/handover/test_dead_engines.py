"""Engines that are gone, or go in the middle of something."""

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from functools import partial

import aiohttp
import pytest
from aiohttp import web

from pdconn.router.fleet.engine_client import ConnectFailed
from pdconn.router.fleet.member import Role
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_server import Limits, running_proxy
from tests.fakes.deployment import deployment as deployed
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, CHUNKS, error, reset
from tests.router.handover.handing import Handing

# Where decode stays down its last tickets are waited for at each end.
LIMITS = Limits(first_backoff_s=0.05, last_returns_s=0.2)
deployment = partial(deployed, limits=LIMITS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_an_engine_that_refuses_connections_is_skipped_and_named(role, caplog):
    async with deployment(num_prefill=2, num_decode=2) as d:
        gone, alive = getattr(d, role)
        await gone.stop()
        for _ in range(4):
            assert (await d.complete()).body == ANSWER
        assert len(alive.seen) == 4
        assert d.metric("retries_total", role=role, engine=gone.url) == 1
        assert d.metric("engine_up", role=role, engine=gone.url) == 0
        (line,) = [r.getMessage() for r in caplog.records if "engine down" in r.getMessage()]
        assert gone.url in line
        assert role in line
        assert not d.leases.held


@in_loop
async def test_the_next_decode_engine_gets_the_same_ticket_if_the_first_was_not_reached():
    async with deployment(num_decode=2) as d:
        gone, alive = d.decode
        await gone.stop()
        assert (await d.complete()).status == 200
        assert d.leases.granted == 1
        assert alive.seen[0].body["kv_transfer_params"]["lease"] == "lease-1"


@in_loop
async def test_a_prefill_engine_that_dies_with_a_request_is_replaced():
    async with deployment(num_prefill=2) as d:
        d.prefill[0].script = reset
        d.prefill[0].health_status = 503
        assert (await d.complete()).status == 200
        assert d.metric("retries_total", role="prefill", engine=d.prefill[0].url) == 1
        await until(lambda: d.metric("engine_up", role="prefill", engine=d.prefill[0].url) == 0)


@in_loop
async def test_an_engine_whose_health_is_well_is_not_down_for_a_broken_connection():
    """Whatever broke it: another server process of the engine, a proxy before it, a full window."""
    async with deployment(num_decode=2) as d:
        d.decode[0].script = reset
        assert (await d.complete()).body == ANSWER
        await until(lambda: d.decode[0].num_probes)
        await asyncio.sleep(0.05)
        assert d.metric("engine_up", role="decode", engine=d.decode[0].url) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_without_an_engine_of_a_role_the_client_learns_which_and_why(role):
    async with deployment(num_prefill=2, num_decode=2, require_prefill=True) as d:
        for engine in getattr(d, role):
            await engine.stop()
        for _ in range(2):  # tried without success, then known to be down
            reply = await d.complete()
            assert reply.status == 503
            assert reply.headers["Retry-After"]
            assert reply.error["role"] == role
            assert {e["engine"] for e in reply.error["engines"]} == {
                e.url for e in getattr(d, role)
            }
            assert all(e["why"] == "Connection refused" for e in reply.error["engines"])
        assert d.outcome("no_engine") == 2


@in_loop
async def test_an_engine_that_comes_back_is_asked_again():
    async with deployment() as d:
        await d.decode[0].stop()
        assert (await d.complete()).status == 503
        await d.decode[0].start()
        await until(lambda: d.metric("engine_up", role="decode", engine=d.decode[0].url) == 1)
        assert (await d.complete()).status == 200
        assert d.decode[0].num_probes == 1


@in_loop
async def test_an_engine_that_answers_but_is_not_well_stays_out():
    async with deployment() as d:
        await d.decode[0].stop()
        assert (await d.complete()).status == 503
        d.decode[0].health_status = 503
        await d.decode[0].start()
        await until(lambda: d.decode[0].num_probes >= 2)
        assert (await d.complete()).status == 503
        assert not d.decode[0].seen


@in_loop
async def test_the_ticket_of_a_request_that_decode_could_not_take_is_given_back_later():
    async with deployment() as d:
        await d.decode[0].stop()
        assert (await d.complete()).status == 503
        assert d.leases.held
        await d.decode[0].start()
        await until(lambda: d.metric("unused_tickets_total", outcome="returned") == 1)
        assert not d.leases.held


@in_loop
async def test_a_ticket_that_is_not_taken_back_is_counted_and_left_to_its_lease(caplog):
    async with deployment(lease_s=0.6) as d:
        await d.decode[0].stop()
        assert (await d.complete()).status == 503
        await until(lambda: d.metric("unused_tickets_total", outcome="no_engine") == 1)
        assert any("ticket not returned" in r.getMessage() for r in caplog.records)


@in_loop
async def test_tickets_on_their_way_back_are_bounded_in_number():
    async with deployment(limits=replace(LIMITS, most_ticket_returns=2)) as d:
        await d.decode[0].stop()
        d.prefill[0].admitting.clear()  # all five hold a ticket before one sees decode gone
        asking = asyncio.gather(*(d.complete() for _ in range(5)))
        await until(lambda: len(d.prefill[0].seen) == 5)
        d.prefill[0].admitting.set()
        await asking
        assert d.metric("unused_tickets_total", outcome="too_many") == 3


@in_loop
async def test_prefill_lends_nothing_while_decode_is_known_to_be_gone():
    async with deployment() as d:
        await d.decode[0].stop()
        for _ in range(3):
            assert (await d.complete()).status == 503
        assert d.leases.granted == 1


@pytest.mark.parametrize("announced", [False, True])
@in_loop
async def test_a_stream_that_breaks_does_not_look_whole(announced, caplog):
    sent = b"".join(CHUNKS[:2])
    got, whole = b"", False

    async def short(engine, seen, http):
        response = web.StreamResponse(headers={"Content-Length": "1000"} if announced else {})
        await response.prepare(http)
        await response.write(sent)
        await until(lambda: len(got) >= len(sent))
        http.transport.abort()
        return response

    async with deployment() as d:
        d.decode[0].script, d.decode[0].health_status = short, 503
        with contextlib.suppress(aiohttp.ClientPayloadError):
            async with d.client.post(
                d.url("/v1/completions"), json={"prompt": "x", "stream": True}
            ) as response:
                async for chunk in response.content.iter_any():
                    got += chunk
                whole = True
        assert not whole
        assert got == sent  # all that came, and no more
        assert d.outcome("broken_stream") == 1
        assert any("stream broken" in r.getMessage() for r in caplog.records)
        await until(lambda: d.metric("engine_up", role="decode", engine=d.decode[0].url) == 0)


@in_loop
async def test_a_stream_that_ends_does_look_whole():
    """The control for the test above."""
    async with deployment() as d:
        assert (await d.complete(stream=True)).body == b"".join(CHUNKS)


@in_loop
async def test_health_asks_every_engine_and_needs_one_of_each_role():
    async with deployment(num_prefill=2, require_prefill=True) as d:
        await d.prefill[0].stop()
        reply = await d.send("/health", method="GET")
        page = json.loads(reply.body)
        assert reply.status == 200
        assert [e["up"] for e in page["prefill"]] == [False, True]
        assert page["decode"] == [{"engine": d.decode[0].url, "up": True, "why": None}]
        d.prefill[1].health_status = 503
        reply = await d.send("/health", method="GET")
        page = json.loads(reply.body)
        assert (reply.status, page["status"]) == (503, "unavailable")
        assert page["prefill"][1]["why"] == "/health answered 503"


@in_loop
async def test_crowds_of_health_checks_ask_an_engine_once():
    async with deployment() as d:
        replies = await asyncio.gather(*(d.send("/health", method="GET") for _ in range(20)))
        assert {reply.status for reply in replies} == {200}
        assert d.decode[0].num_probes < 10


@in_loop
async def test_models_are_those_of_the_engines_that_live():
    async with deployment(num_decode=2) as d:
        await d.decode[0].stop()
        for _ in range(2):  # tried without success, then known to be down
            reply = await d.send("/v1/models", method="GET")
            listed = {"object": "list", "data": [{"id": "m"}]}
            assert (reply.status, json.loads(reply.body)) == (200, listed)
        await d.decode[1].stop()
        assert (await d.send("/v1/models", method="GET")).status == 200, "prefill lists it too"
        await d.prefill[0].stop()
        assert (await d.send("/v1/models", method="GET")).status == 503


@in_loop
async def test_an_engine_that_does_not_connect_in_time_is_skipped_ticket_and_all():
    """It accepts, and then says nothing where TLS should begin."""

    async def say_nothing(reader, writer):
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with silent, deployment() as d:
        p, alive = d.prefill[0], d.decode[0]
        config = ProxyConfig.from_options([p.url], [url, alive.url], port=0, connect_timeout_s=2.0)
        async with running_proxy(config) as proxy:
            reply = await d.send(proxy.url + "/v1/completions", b'{"prompt": "x"}')
            assert (reply.status, reply.body) == (200, ANSWER)
        assert alive.seen[0].body["kv_transfer_params"]["lease"] == "lease-1"


@in_loop
async def test_an_engine_that_is_busy_is_not_down():
    """An answer may take as long as it takes."""

    async def slow(engine, seen, http):
        await asyncio.sleep(2.5)
        return error(429, "busy")

    async with deployment(connect_timeout_s=2.0) as d:
        d.decode[0].script = slow
        assert (await d.complete()).status == 429
        assert d.metric("engine_up", role="decode", engine=d.decode[0].url) == 1


@pytest.mark.parametrize("others", [0, 1])
@in_loop
async def test_the_only_engine_of_a_role_is_found_up_soon(others):
    """For up to 15 s after decode was up again each request was refused, and no engine was left."""
    async with deployment(num_decode=1 + others) as d:
        gone = d.decode[0]
        await gone.stop()
        for _ in range(2):
            await d.complete()
        outage = partial(d.proxy.router.engines.outage, gone.url)
        await until(lambda: outage().num_failures >= 6)
        pause_s = outage().backoff_s
        began = time.monotonic()
        await gone.start()
        await until(lambda: outage() is None)
        took_s = time.monotonic() - began
        if others:  # the control: there is no hurry
            assert took_s > pause_s / 2
        else:
            assert took_s < pause_s / 4
            assert (await d.complete()).status == 200


# An engine that comes back


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("comes_back", [True, False])
def test_one_that_comes_up_while_another_is_tried_is_asked(role: Role, comes_back: bool) -> None:
    """Connecting to a host that is gone takes 5 s: the other one may be well again by then."""
    handing = Handing(2, 2, require_prefill=True)
    try:
        engines = {Role.PREFILL: handing.prefill, Role.DECODE: handing.decode}
        gone, back = engines[role]
        handing.engines.mark_down(back, "it was slow to answer")
        handing.arrive(is_direct=False)
        if role is Role.DECODE:
            handing.respond(handing.client.open[0])
        [ask] = handing.client.open
        assert ask.engine == gone
        if comes_back:
            handing.engines.mark_up(back)
        ask.fail(ConnectFailed("no connection within 5 s"))
        handing.loop.settle()
        asked = [one.engine for one in handing.client.asks if not one.is_return]
        assert (back in asked) == comes_back
    finally:
        handing.close()
