"""The end of a router: ready no more, then deaf, then the last answers and the last tickets."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest
from aiohttp import web

from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import BadSetting
from pdconn.router.router_server import Limits
from tests.fakes.deployment import Deployment, deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, CHUNKS, hang

DELAY_S = 2.0


async def statuses(d: Deployment) -> dict[str, int]:
    """What both listeners say of the router."""
    urls = (f"{base}{path}" for base in (d.proxy.url, d.proxy.admin_url)
            for path in ("/livez", "/readyz", "/health"))  # fmt: skip
    return {url: (await d.send(url, method="GET")).status for url in urls}


async def refused(url: str) -> None:
    """Wait until a new connection is refused."""
    while True:
        try:
            async with aiohttp.ClientSession() as new, new.get(f"{url}/livez"):
                await asyncio.sleep(0.01)
        except aiohttp.ClientConnectorError:
            return
        except aiohttp.ClientError:
            continue  # accepted in the moment of the end


@in_loop
async def test_it_serves_on_for_the_delay_while_it_is_not_ready():
    """The listener closed at once: what a load balancer still sent was refused."""
    seen: dict[str, int] = {}
    answered: list[float] = []

    async def watch(d: Deployment, began_s: float) -> None:
        while d.proxy.url + "/readyz" not in seen or seen[d.proxy.url + "/readyz"] == 200:
            seen.update(await statuses(d))
        reply = await d.send("/readyz", method="GET")
        assert json.loads(reply.body) == {"status": "draining"}
        async with (
            aiohttp.ClientSession() as new,  # a connection of its own
            new.post(d.url("/v1/completions"), json={"prompt": "x"}) as response,
        ):
            assert await response.read() == ANSWER
        answered.append(time.monotonic() - began_s)

    async with deployment(drain_delay_s=DELAY_S) as d:
        assert set((await statuses(d)).values()) == {200}
        watching = asyncio.create_task(watch(d, time.monotonic()))
        await until(lambda: seen)
    await watching
    for base in (d.proxy.url, d.proxy.admin_url):
        assert (seen[f"{base}/livez"], seen[f"{base}/readyz"]) == (200, 503)
        assert seen[f"{base}/health"] == 200
    assert answered[0] < DELAY_S


@in_loop
async def test_without_a_delay_it_stops_listening_at_once():
    """The control: what the test above sees comes from the delay."""
    async with deployment() as d:
        d.decode[0].admission_s = 0.3
        asking = asyncio.create_task(d.complete())
        await until(lambda: d.decode[0].seen)

        knocking = asyncio.create_task(refused(d.proxy.url))
        await asyncio.sleep(0.05)
        assert not knocking.done()
    await knocking
    assert (await asking).body == ANSWER, "and what it had was finished"


@in_loop
async def test_the_admin_pages_outlive_the_clients_listener():
    """Otherwise no log line shows what a drain waits for."""
    async with deployment(drain_timeout_s=20.0) as d:
        d.decode[0].admitting.clear()
        asking = asyncio.create_task(d.complete())
        await until(lambda: d.decode[0].seen)

        async def pages_without_clients() -> str:
            await refused(d.proxy.url)
            page = (await d.send("/metrics", method="GET")).body.decode()
            d.decode[0].admitting.set()
            return page

        looking = asyncio.create_task(pages_without_clients())
        await asyncio.sleep(0.02)
    assert "pdconn_router_inflight_requests 1.0" in await looking
    assert (await asking).status == 200


@pytest.mark.parametrize("drain_timeout_s", [0.0, 0.1])
@in_loop
async def test_the_ticket_of_a_prefill_that_was_cut_off_is_given_back(drain_timeout_s):
    """With a short drain the last tickets had as short a time, and their blocks stayed lent."""
    lent = asyncio.Event()

    async def slow(engine, seen, http) -> web.StreamResponse:
        answer = engine.prefill_answer()  # the blocks are lent, the ticket is not yet sent
        lent.set()
        await asyncio.sleep(0.8)  # more than the drain, less than the patience with it
        return answer

    async with deployment(drain_timeout_s=drain_timeout_s) as d:
        d.prefill[0].script = slow
        asking = asyncio.create_task(d.complete())
        await lent.wait()
        assert d.leases.held
        outcome, tickets = d.outcome, d.metric
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.exception() is not None
    assert outcome("cut_off") == 1
    assert tickets("unused_tickets_total", outcome="returned") == 1
    assert not d.leases.held


@in_loop
async def test_a_ticket_that_cannot_be_given_back_before_the_end_is_counted_and_named(caplog):
    limits = Limits(first_backoff_s=0.05, last_returns_s=0.2)
    async with deployment(limits=limits) as d:
        await d.decode[0].stop()
        assert (await d.complete()).status == 503
        assert d.leases.held
        metric = d.metric
    assert metric("unused_tickets_total", outcome="no_engine") == 1
    assert any("ticket not returned" in record.getMessage() for record in caplog.records)


async def ending_s(limits: Limits) -> float:
    """Seconds that the end takes while neither engine answers."""
    async with deployment(limits=limits, drain_timeout_s=0.0) as d:
        d.prefill[0].script = d.decode[0].script = hang
        asking = asyncio.create_task(d.complete())
        await until(lambda: d.prefill[0].seen)
        began_s = time.monotonic()
    took_s = time.monotonic() - began_s
    await asyncio.gather(asking, return_exceptions=True)
    return took_s


@in_loop
async def test_the_last_tickets_wait_no_longer_than_they_may():
    """A busy machine may take longer, not always."""
    limits, took_s = Limits(last_returns_s=0.3), []
    while len(took_s) < 3 and not any(each < 10 * limits.last_returns_s for each in took_s):
        took_s.append(await ending_s(limits))
    assert min(took_s) < 10 * limits.last_returns_s


def test_a_delay_that_makes_no_sense_is_refused():
    with pytest.raises(BadSetting, match="--drain-delay"):
        ProxyConfig.from_options(["http://p:1"], ["http://d:1"], drain_delay_s=-1.0)


@in_loop
async def test_an_end_in_the_middle_of_twenty_hand_overs_loses_none():
    """They are spread over prefill, decode and the stream of the answer."""
    async with deployment(num_prefill=2, num_decode=2, drain_timeout_s=60.0) as d:
        for number, engine in enumerate(d.prefill + d.decode):
            engine.admission_s = 0.1 * (number + 1)
            engine.chunk_pause_s = 0.1
        asking = []
        for _ in range(20):
            asking.append(asyncio.create_task(d.complete(stream=True)))
            await asyncio.sleep(0.02)
        stages = [len(engine.seen) for engine in d.prefill + d.decode]
        outcome, leases = d.outcome, d.leases
    assert 0 < sum(stages[2:]) < sum(stages[:2]), "some are with prefill, some with decode"
    replies = await asyncio.gather(*asking)
    assert {(reply.status, reply.body) for reply in replies} == {(200, b"".join(CHUNKS))}
    assert outcome("ok") == 20
    assert (leases.granted, leases.held) == (20, set())
