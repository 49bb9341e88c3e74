"""The JSON that the page at ``/`` draws, and how one request was routed, without a browser."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from pdconn.router.admin import admin_app as pages_module
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_server import running_proxy
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop
from tests.fakes.fake_engine import Leases, reset
from tests.router.page.fleet import BLOCK, EVIL, LONG, Engine, fleet, is_known, send_three


@in_loop
async def test_the_page_runs_nothing_but_its_own_script():
    async with deployment() as d:
        reply = await d.send("/", method="GET")
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        policy = reply.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "connect-src 'self'" in policy
        assert "unsafe" not in policy


def test_the_page_needs_no_other_host_and_makes_no_markup():
    page = pages_module._PAGE.read_text(encoding="utf-8")
    assert not re.search(r"https?://|//[a-z]+\.", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\bon\w+=", page)
    assert not re.search(r"\sstyle=", page)  # the policy would refuse it


@in_loop
async def test_the_state_tells_of_engines_pods_hits_and_decisions(tmp_path):
    async with fleet(tmp_path) as made:
        await send_three(made)
        state = await made.state()
    engines = {one["engine"]: one for one in state["engines"]}
    assert list(engines) == [made.prefill.url, made.decode.url, made.busy.url]
    prefill, decode, busy = engines.values()
    assert (prefill["roles"], prefill["up"], prefill["trust"]) == (["prefill"], True, 1.0)
    assert prefill["hits"] == {
        "prefill": {"requests": 2, "tokens": 160, "hit_tokens": 64, "hit_rate": 64 / 160}
    }
    assert (prefill["hit_rate"], decode["hit_rate"]) == (64 / 160, 64 / 200)
    assert (prefill["own_hit_rate"], busy["own_hit_rate"]) == (600 / 800, None)
    assert (busy["hit_rate"], busy["hits"]["decode"]["requests"]) == (None, 0)
    pods = {one["pod"]: one for one in state["pods"]}
    assert [pods[name]["blocks"] for name in engines] == [4, 2, 1]
    assert pods[made.decode.url]["hit_rate"] == 64 / 200
    newest = state["decisions"][0]
    assert (newest["request_id"], newest["alone"]) == ("the-short-one", True)
    assert (newest["decode"], newest["decode_hit_tokens"]) == (made.decode.url, 32)
    oldest = state["decisions"][-1]
    assert oldest["prefill_why"] == "36 uncached + 0 queued + 3584 of others + 0 pressure"
    assert (newest["prefill"], newest["prefill_why"]) == (None, None)


@in_loop
async def test_no_client_learns_the_seed_of_the_hashes():
    seed = "a-seed-of-ours"
    how = {"hash_algorithm": "xxhash", "hash_block_tokens": BLOCK, "hash_seed": seed}
    leases = Leases()
    engine = Engine(leases)
    await engine.http.start()
    words = f"{engine.url},events=tcp://127.0.0.1:{engine.ports[0]}"
    try:
        async with (
            running_proxy(ProxyConfig.from_options([words], [engine.url], port=0, **how)) as router,
            aiohttp.ClientSession() as client,
            asyncio.timeout(20),
        ):
            text = "[]"
            while '"xxhash"' not in text:  # until the pod is known
                await engine.hold(LONG)
                async with client.get(f"{router.admin_url}/debug/state") as reply:
                    text = await reply.text()
            assert '"seeded":true' in text
            assert seed not in text
    finally:
        await engine.http.stop()
        await engine.events.die()


@in_loop
async def test_an_engine_that_left_takes_its_hit_rate_with_it(tmp_path):
    async with fleet(tmp_path) as made:
        made.decode, made.busy = made.busy, made.decode  # the one with a tally goes
        await send_three(made)
        gone = made.busy.url
        assert gone in [one["engine"] for one in (await made.state())["engines"]]
        whole = made.path.read_text(encoding="utf-8")
        made.remove_busy()
        await made.state_with(lambda s: gone not in json.dumps([s["engines"], s["pods"]]))
        made.path.write_text(whole, encoding="utf-8")  # it is back, and has served nothing yet
        state = await made.state_with(is_known)
        back = next(one for one in state["engines"] if one["engine"] == gone)
        stayed = next(one for one in state["engines"] if one["engine"] == made.prefill.url)
        assert (back["hit_rate"], stayed["hit_rate"]) == (None, 64 / 160)


@pytest.mark.parametrize("request_id", [EVIL, "a/b?c#d", "100%25", '"\\'])
@in_loop
async def test_any_request_id_is_listed_and_can_be_asked_about(request_id):
    async with deployment() as d:
        url, headers = d.url("/v1/completions"), {"X-Request-Id": request_id}
        async with d.client.post(url, json={"model": "m", "prompt": "hi"}, headers=headers) as r:
            assert r.status == 200
        reply = await d.send("/debug/state", method="GET")
        assert reply.headers["Content-Type"].startswith("application/json")
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert json.loads(reply.body)["decisions"][0]["request_id"] == request_id
        # as the page links it: encodeURIComponent
        path = "/debug/route/" + quote(request_id, safe="!'()*")
        async with d.client.get(aiohttp.client.URL(d.url(path), encoded=True)) as answer:
            assert (await answer.json())["request_id"] == request_id


@in_loop
async def test_a_request_id_that_is_no_text_does_not_hide_the_state():
    async with deployment() as d:
        port = int(d.proxy.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"model": "m", "prompt": "hi"}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"X-Request-Id: \xff\xfe\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await reader.read()
        writer.close()
        await writer.wait_closed()
        reply = await d.send("/debug/state", method="GET")
        assert reply.status == 200
        listed = json.loads(reply.body)["decisions"]
        [shown] = [one["request_id"] for one in listed]
        assert re.fullmatch("[0-9a-f]{32}", shown), "it gets an id of the router's"


@in_loop
async def test_an_unknown_request_is_not_found():
    async with deployment() as d:
        reply = await d.send("/debug/route/unknown-id", method="GET")
        assert (reply.status, reply.error["type"]) == (404, "NotFoundError")
        assert "unknown-id" in reply.error["message"]


@in_loop
async def test_a_request_learns_how_long_its_ticket_and_decodes_first_byte_took():
    async with deployment(num_decode=2) as d:

        async def times_of(**body: Any) -> tuple[Any, Any]:
            done = await d.complete(**body)
            assert done.status == 200
            path = f"/debug/route/{done.headers['X-Request-Id']}"
            route = json.loads((await d.send(path, method="GET")).body)
            return route["ticket_ms"], route["first_byte_ms"]

        ticket_ms, first_byte_ms = await times_of()
        counted_s = (
            d.metric("time_to_ticket_seconds_sum"),
            d.metric("decode_first_byte_seconds_sum"),
        )
        assert (ticket_ms, first_byte_ms) == pytest.approx(
            tuple(1000 * each for each in counted_s), abs=0.001
        )
        alone = await times_of(n=2)
        assert alone[0] is None, "decode had no ticket"
        assert alone[1] > 0
        for engine in d.decode:
            engine.script = reset if engine is d.decode[0] else None
        spent = [await times_of() for _ in range(2)]
        assert [one[0] is None for one in spent].count(True) == 1, "the dead one had the ticket"


@in_loop
async def test_there_is_no_snapshot_of_a_prompt_that_was_not_looked_for():
    async with deployment(policy="round-robin") as d:
        done = await d.complete()
        path = f"/debug/route/{done.headers['X-Request-Id']}"
        assert (await d.send(path, method="GET")).status == 200
        reply = await d.send(f"{path}?snapshot=1", method="GET")
        assert (reply.status, reply.error["type"]) == (409, "ConflictError")
        assert "round-robin does not look at prompts" in reply.error["message"]
