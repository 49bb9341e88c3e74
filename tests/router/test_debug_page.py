"""The page at ``/`` and the JSON it draws, by itself and in a browser.

Two engines tell of their caches over real sockets.  16-token blocks, hashed as vLLM does:

    prompt      tokens   prefill holds    decode holds
    LONG        100      4 blocks = 64    2 blocks = 32
    STRANGE      60      0                0
    SHORT        40      (not asked)      2 blocks = 32, lacks 8: decode serves it alone
    hit rate             64 of 160        64 of 200
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web

from pdconn.router.admin import app as pages_module
from pdconn.router.config import ProxyConfig
from pdconn.router.prefix.hashing import HashScheme, chain, external
from pdconn.router.server import Running, running_proxy
from tests.fakes.fake_engine import FakeEngine, Leases, Reply, deployment, in_loop, reset
from tests.router.events.test_subscriber import Publisher, two_ports

BLOCK = 16
SCHEME = HashScheme("sha256_cbor", BLOCK)
LONG = list(range(1, 101))
STRANGE = list(range(1000, 1060))
SHORT = LONG[:40]
ALONE_BELOW = 10
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
METRICS = """\
vllm:num_requests_running 3
vllm:num_requests_waiting 4
vllm:kv_cache_usage_perc 0.25
vllm:prefix_cache_queries_total 800
vllm:prefix_cache_hits_total 600
"""

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine's PATH")


# A fleet that tells of its caches


class Engine:
    """A fake engine with a publisher beside it."""

    def __init__(self, leases: Leases) -> None:
        self.http = FakeEngine(leases)
        self.ports = two_ports()
        self.events = Publisher(self.ports)

    @property
    def url(self) -> str:
        return self.http.url

    def entry(self, role: str) -> str:
        """Of a fleet file."""
        events, replay = (f"tcp://{{host}}:{port}" for port in self.ports)
        return (
            f'[[engine]]\nurl = "{self.url}"\nroles = ["{role}"]\n'
            f'events = "{events}"\nreplay = "{replay}"\n'
        )

    async def hold(self, tokens: list[int]) -> None:
        """Say that the blocks of these tokens are stored."""
        hashes = [external(full) for full in chain(SCHEME, tokens)]
        await self.events.publish(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": None,
                "token_ids": tokens[: BLOCK * len(hashes)],
                "block_size": BLOCK,
                "medium": "GPU",
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )


@dataclass
class Fleet:
    """A router over engines of a fleet file, and a client."""

    prefill: Engine
    decode: Engine
    busy: Engine
    path: Path
    router: Running
    client: aiohttp.ClientSession

    async def get(self, path: str) -> Reply:
        async with self.client.get(self.router.admin_url + path) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def state(self) -> dict[str, Any]:
        return json.loads((await self.get("/debug/state")).body)

    async def ask(self, prompt: list[int], request_id: str) -> None:
        url, body = f"{self.router.url}/v1/completions", {"model": "m", "prompt": prompt}
        headers = {"X-Request-Id": request_id}
        async with self.client.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()

    async def state_with(self, true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while not true(state := await self.state()):
                await asyncio.sleep(0.02)
        return state

    def remove_busy(self) -> None:
        """The third engine leaves the fleet."""
        text = self.prefill.entry("prefill") + self.decode.entry("decode")
        written = self.path.with_suffix(".new")
        written.write_text(text)
        written.replace(self.path)


@asynccontextmanager
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Three engines whose caches the router knows."""
    leases = Leases()
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for held in (LONG[: 4 * BLOCK], LONG[: 2 * BLOCK], STRANGE[:BLOCK]):
            engine = Engine(leases)
            stack.push_async_callback(engine.events.die)
            await engine.http.start()
            stack.push_async_callback(engine.http.stop)
            engine.http.metrics_page = METRICS
            await engine.hold(held)
            engines.append(engine)
        prefill, decode, busy = engines
        # The second decode engine is so busy that it is asked nothing.
        busy.http.metrics_page = "vllm:num_requests_running 900\n"
        path = tmp_path / "fleet.toml"
        path.write_text(prefill.entry("prefill") + decode.entry("decode") + busy.entry("decode"))
        config = ProxyConfig.of(
            [], [], fleet=str(path), port=0, alone_below=ALONE_BELOW, drain_timeout_s=1.0
        )
        client = await stack.enter_async_context(aiohttp.ClientSession())
        router = await stack.enter_async_context(running_proxy(config))
        made = Fleet(prefill, decode, busy, path, router, client)
        await made.state_with(_is_known)
        yield made


def _is_known(state: dict[str, Any]) -> bool:
    loads = [one["load"] for one in state["engines"]]
    live = [pod["state"] == "live" and pod["hashing"] for pod in state["pods"]]
    return all(loads) and len(live) == 3 and all(live)


async def send_three(made: Fleet) -> None:
    """The requests of the table above."""
    await made.ask(LONG, "the-long-one")
    await made.ask(STRANGE, "the-strange-one")
    await made.ask(SHORT, "the-short-one")


# A browser


async def seen(url: str, tmp_path: Path) -> str:
    """The page as HTML, after some polls, with its script's doings in it."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        f"--user-data-dir={tmp_path / 'chromium'}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        url,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return out.decode()


def rows(dom: str, table: str) -> list[str]:
    """The text of each row of a table."""
    found = re.search(rf'<tbody id="{table}">(.*?)</tbody>', dom, re.DOTALL)
    assert found, dom[-2000:]
    return [_text(row) for row in re.findall(r"<tr>(.*?)</tr>", found[1], re.DOTALL)]


def _text(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def row_of(name: str, lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith(name)]
    return line


# Without a browser


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
    page = pages_module._PAGE.read_text()
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
            running_proxy(ProxyConfig.of([words], [engine.url], port=0, **how)) as router,
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
        whole = made.path.read_text()
        made.remove_busy()
        await made.state_with(lambda s: gone not in json.dumps([s["engines"], s["pods"]]))
        made.path.write_text(whole)  # it is back, and has served nothing yet
        state = await made.state_with(_is_known)
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


# In a browser


@in_a_browser
@in_loop
async def test_the_page_shows_pods_hit_rates_and_decisions_and_no_engine_that_left(tmp_path):
    async with fleet(tmp_path) as made:
        await send_three(made)
        await made.ask(STRANGE, EVIL)  # prefill then held 64 of 220, decode 64 of 260
        made.remove_busy()
        await made.state_with(lambda state: len(state["pods"]) == len(state["engines"]) == 2)
        dom = await seen(made.router.admin_url, tmp_path)
        pods, engines, decisions = (rows(dom, name) for name in ("pods", "engines", "decisions"))
        assert "LIVE 4 0: full attention" in row_of(made.prefill.url, pods)
        assert "sha256_cbor blocks of 16" in row_of(made.prefill.url, pods)
        for url, rate in ((made.prefill.url, 64 / 220), (made.decode.url, 64 / 260)):
            assert f"{100 * rate:.1f} %" in row_of(url, pods)
            assert f"up 3 / 4 25.0 % 0 {100 * rate:.1f} % 75.0 %" in row_of(url, engines)
        assert len(pods) == len(engines) == 2
        assert made.busy.url not in dom
        newest, alone, strange, long = decisions
        assert EVIL in newest
        assert "<img" not in dom
        assert dom.count("<script") == 1
        assert "<title>pdconn router</title>" in dom
        assert f"40 – {made.decode.url} 32 hit decode alone" in alone
        assert "handed over" in strange
        assert f"100 {made.prefill.url} 64 hit {made.decode.url} 32 hit handed over" in long
        assert long.split(" handed over ")[1].startswith(
            "ok HTTP 200 prefill: 36 uncached + 3584 of others decode: 3620 at prefill + 8 pulled"
        )
        assert 'href="debug/route/the-long-one"' in dom
        assert '<p id="offline" role="alert" hidden' in dom


@asynccontextmanager
async def flaky(num_failures: int) -> AsyncIterator[str]:
    """The page over a router that answers nothing at first."""
    asked = 0

    async def state(http: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked <= num_failures:
            return web.Response(status=503)
        none = {"engines": [], "pods": [], "decisions": []}
        return web.json_response({"policy": "p", "hashes": 0, "remembered": 0, **none})

    async def history(http: web.Request) -> web.Response:
        none = {"engines": [], "pods": [], "samples": []}
        return web.json_response({"boot": 0, "interval_s": 2, "most": 300, **none})

    async def page(http: web.Request) -> web.FileResponse:
        return web.FileResponse(pages_module._PAGE)

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_get("/debug/state", state)
    app.router.add_get("/debug/history", history)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


@in_a_browser
@pytest.mark.parametrize(("num_failures", "recovers"), [(2, True), (10_000, False)])
@in_loop
async def test_the_page_says_when_it_lost_the_router_and_recovers(tmp_path, num_failures, recovers):
    async with flaky(num_failures) as url:
        dom = await seen(url, tmp_path)
    assert "No answer from the router: HTTP status 503. Retrying." in dom
    assert ('<p id="offline" role="alert" hidden' in dom) is recovers
    assert ("policy p" in dom) is recovers
