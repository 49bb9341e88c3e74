"""The page as a browser draws it: pods, hit rates and decisions, and a router that was lost."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape

import pytest
from aiohttp import web

from pdconn.router.admin import admin_app as pages_module
from tests.fakes.event_loop import in_loop
from tests.router.page.browser import CHROMIUM, seen, served
from tests.router.page.fleet import EVIL, STRANGE, fleet, send_three

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine's PATH")


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
    async with served(app) as url:
        yield url


@pytest.mark.parametrize(("num_failures", "recovers"), [(2, True), (10_000, False)])
@in_loop
async def test_the_page_says_when_it_lost_the_router_and_recovers(tmp_path, num_failures, recovers):
    async with flaky(num_failures) as url:
        dom = await seen(url, tmp_path)
    assert "No answer from the router: HTTP status 503. Retrying." in dom
    assert ('<p id="offline" role="alert" hidden' in dom) is recovers
    assert ("policy p" in dom) is recovers
