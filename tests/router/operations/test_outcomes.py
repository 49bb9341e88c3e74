"""Every request that was routed ends on the page: how, with which status, after how long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

import aiohttp
import pytest

from pdconn.router.admin import admin_app as pages
from pdconn.router.router_server import Limits
from tests.fakes.deployment import Deployment, deployment, leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import die_in_stream, error, hang

PAUSE_S = 0.2


async def newest(d: Deployment) -> dict[str, Any]:
    reply = await d.send("/debug/state", method="GET")
    decided: dict[str, Any] = json.loads(reply.body)["decisions"][0]
    return decided


async def ended(d: Deployment) -> tuple[str, int | None]:
    """How the newest request ended, and with which status."""
    async with asyncio.timeout(20):
        while (one := await newest(d))["outcome"] is None:
            await asyncio.sleep(0.01)
    assert one["total_ms"] >= one["decision_ms"]
    path = f"/debug/route/{one['request_id']}"
    route = json.loads((await d.send(path, method="GET")).body)
    assert {name: route[name] for name in one} == one, "both pages agree"
    return one["outcome"], one["status"]


@in_loop
async def test_an_answer_ends_ok_after_its_last_byte():
    async with deployment() as d:
        d.decode[0].chunk_pause_s = PAUSE_S
        asking = asyncio.create_task(d.complete(stream=True))
        await until(lambda: d.decode[0].seen)
        async with asyncio.timeout(20):
            while (one := await newest(d))["status"] is None:
                await asyncio.sleep(0.01)
        assert (one["status"], one["outcome"], one["total_ms"]) == (200, None, None), "under way"
        assert (await asking).status == 200
        assert await ended(d) == ("ok", 200)
        one = await newest(d)
        assert one["total_ms"] >= 3 * 1000 * PAUSE_S
        assert one["decision_ms"] < one["total_ms"] / 2, "the time of the decision alone"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_without_an_engine_it_ends_as_refused(role):
    """It stayed under way for ever: the page shows a fleet at work while all requests fail."""
    async with deployment(require_prefill=True, limits=Limits(last_returns_s=0.2)) as d:
        await getattr(d, role)[0].stop()
        for number in range(1, 3):  # tried without success, then known to be down
            assert (await d.complete()).status == 503
            assert await ended(d) == ("no_engine", 503)
            assert len(d.proxy.router.decisions) == number


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_an_engines_error_is_its_outcome(role):
    async def refuse(engine, seen, http):
        return error(507, "no")

    async with deployment() as d:
        getattr(d, role)[0].script = refuse
        assert (await d.complete()).status == 507
        assert await ended(d) == ("engine_error", 507)


@in_loop
async def test_a_stream_that_breaks_ends_so():
    async with deployment() as d:
        d.decode[0].script = die_in_stream
        with contextlib.suppress(aiohttp.ClientError):
            await d.complete(stream=True)
        assert await ended(d) == ("broken_stream", 200)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_a_client_that_left_ends_it_without_a_status(role):
    """The engines may go on with it for a moment; what they answer then is no outcome."""
    async with deployment(limits=Limits(patience_s=0.2)) as d:
        engine = getattr(d, role)[0]
        engine.admitting.clear()
        writer = await d.open()
        await until(lambda: engine.seen)
        await leave(writer)
        assert await ended(d) == ("client_left", None)
        engine.admitting.set()
        await asyncio.sleep(0.3)
        assert await ended(d) == ("client_left", None)


@in_loop
async def test_what_the_end_of_the_router_cuts_off_is_told_from_what_clients_left():
    async with deployment(drain_timeout_s=0.1, limits=Limits(patience_s=0.1)) as d:
        d.decode[0].script = hang
        asking = asyncio.create_task(d.complete())
        await until(lambda: d.decode[0].seen)
        decisions = d.proxy.router.decisions
    await asyncio.gather(asking, return_exceptions=True)
    [(_, outcome)] = decisions.newest()
    assert outcome.end is not None
    assert (outcome.end.value, outcome.status) == ("cut_off", None)


@in_loop
async def test_another_request_of_the_same_id_keeps_its_own_outcome():
    """Ids come from clients: the end of an older request is not that of the newer one."""
    async with deployment() as d:
        d.decode[0].admitting.clear()

        async def ask(**body: Any) -> int:
            headers, body = {"X-Request-Id": "same"}, {"model": "m", "prompt": "hi", **body}
            async with d.client.post(d.url("/v1/completions"), json=body, headers=headers) as reply:
                await reply.read()
                return reply.status

        older = asyncio.create_task(ask())
        await until(lambda: d.decode[0].seen)
        newer = asyncio.create_task(ask())
        await until(lambda: len(d.decode[0].seen) == 2)
        older.cancel()
        await until(lambda: d.outcome("client_left") == 1)
        assert (await newest(d))["outcome"] is None
        d.decode[0].admitting.set()
        assert await newer == 200
        assert await ended(d) == ("ok", 200)


@pytest.mark.parametrize(("status", "fault"), [(200, "none"), (400, "client"), (500, "service")])
@in_loop
async def test_the_page_knows_whose_fault_an_end_is(status, fault):
    """A client's mistake was red, as an engine's failure is."""

    async def answer(engine, seen, http):
        return error(status, "x")

    async with deployment() as d:
        d.decode[0].script = answer if status >= 400 else None
        assert (await d.complete()).status == status
        await ended(d)
        assert (await newest(d))["fault"] == fault
    assert "one.fault" in pages._PAGE.read_text(encoding="utf-8")


def test_the_page_says_whose_time_it_shows():
    """'Took' beside a request that ran for a minute was the time of its decision."""
    page = pages._PAGE.read_text(encoding="utf-8")
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", page)
    assert "Took" not in heads
    assert {"Outcome", "Total", "Deciding"} <= set(heads)
    columns = page[page.index("function decisionRow") : page.index("function fill")]
    assert "one.total_ms" in columns
    assert "one.decision_ms" in columns
