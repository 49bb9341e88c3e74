"""The live page as a browser shows it: nothing complains, nothing overflows, and it can be dark.

Each check is also held to a page that fails it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.fakes.event_loop import in_loop
from tests.router.page.browser import CHROMIUM, Page, browser, served
from tests.router.page.busy import traffic

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine's PATH")

EVIL = "<img src=x onerror=\"document.title='owned'\">"
WIDTHS = (400, 1400)

#: As WCAG 2.2 computes contrast, of the colours that the page ends up with; its backgrounds are
#: opaque or clear, so the first opaque one above an element is what its text stands on.
CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const found = parse(getComputedStyle(one).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    const text = walk.currentNode.data.trim();
    if (!text || !one.getClientRects().length || one.closest("script, style")) continue;
    const style = getComputedStyle(one);
    const ink = one.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(parse(ink)), light(ground(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
})()"""

UNNAMED = """[...document.querySelectorAll("button, a, svg[role=img], input")]
  .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim()))
  .map((one) => one.outerHTML.slice(0, 80))"""

#: What shows beyond its frame: text of a chart, which has no scroll bar.
CLIPPED = """[...document.querySelectorAll(".plot text")].filter((one) => {
  const [text, frame] = [one.getBoundingClientRect(), one.closest("svg").getBoundingClientRect()];
  return text.left < frame.left - 0.5 || text.right > frame.right + 0.5;
}).map((one) => one.textContent)"""


async def overflow(page: Page, width: int) -> int:
    """Pixels by which the page is wider than its window (a phone's grows with its contents)."""
    return await page.value("document.documentElement.scrollWidth") - width


async def ground(page: Page) -> str:
    """The colour behind everything."""
    return await page.value("getComputedStyle(document.body).backgroundColor")


@asynccontextmanager
async def serving(html: str) -> AsyncIterator[str]:
    """A page of our own."""

    async def answer(http: web.Request) -> web.Response:
        return web.Response(text=html, content_type="text/html")

    app = web.Application()
    app.router.add_get("/", answer)
    async with served(app) as url:
        yield url


async def _drawn(page: Page) -> None:
    await page.until("document.querySelectorAll('#decisions tr').length > 2")
    await page.until("document.querySelectorAll('#waterfall li').length > 3")
    await page.until("document.querySelectorAll('.plot path').length > 8")


@in_loop
async def test_the_page_fits_can_be_dark_and_nothing_complains(tmp_path):
    async with traffic() as clients, browser(tmp_path) as page:
        made = clients.fleet
        await clients.send(5)
        body = {"model": "m", "prompt": [1, 2, 3]}
        headers = {"X-Request-Id": EVIL}
        async with made.client.post(made.url("/v1/completions"), json=body, headers=headers) as r:
            assert r.status == 200
        url = made.proxy.admin_url
        grounds = {}
        for width in WIDTHS:
            for dark in (False, True):
                await page.show(width, dark=dark)
                await page.open(url)
                await _drawn(page)
                assert await overflow(page, width) <= 0, width
                assert await page.value(CLIPPED) == [], width
                assert await page.value(CONTRAST) == [], (width, dark)
                assert await page.value(UNNAMED) == []
                assert page.complaints == []
                grounds[dark] = await ground(page)
        assert grounds[False] != grounds[True]
        assert await page.value("document.title") == "pdconn router"
        assert EVIL in await page.value("document.querySelector('#decisions').textContent")


@in_loop
async def test_the_theme_can_be_chosen_and_is_remembered(tmp_path):
    async with traffic(1, 1) as clients, browser(tmp_path) as page:
        url = clients.fleet.proxy.admin_url
        await page.show(1400)
        await page.open(url)
        system = await ground(page)
        for theme in ("light", "dark"):
            await page.value("document.getElementById('theme').click()")
            assert await page.value("document.getElementById('theme').textContent") == (
                f"theme: {theme}"
            )
        dark = await ground(page)
        await page.open(url)
        assert await ground(page) == dark != system
        await page.value("document.getElementById('theme').click()")
        assert await ground(page) == system
        assert page.complaints == []


@in_loop
async def test_charts_survive_a_reload_and_a_request_can_be_chosen(tmp_path):
    async with traffic(1, 1) as clients, browser(tmp_path) as page:
        await clients.send(4)
        await page.show(1400)
        await page.open(clients.fleet.proxy.admin_url)
        await _drawn(page)
        await page.until("past.samples.length >= 2")
        seen = await page.value("past.samples.map((one) => one.at)")
        await page.open(clients.fleet.proxy.admin_url)
        await page.until("past.samples.length")
        again = await page.value("past.samples.map((one) => one.at)")
        assert again[: len(seen)] == seen
        await _drawn(page)
        await page.value("document.querySelector('#decisions tr:last-child button').click()")
        shown = await page.value("document.querySelector('#waterfall .id').textContent")
        oldest = await page.value(
            "document.querySelector('#decisions tr:last-child a').textContent"
        )
        assert shown == oldest == "chat-00001"
        assert page.complaints == []


BAD_PAGE = """<!doctype html><meta name="viewport" content="width=device-width">
<style>body { background: #fff } p { color: #ccc } div { width: 600px; height: 10px }</style>
<p>pale</p><div></div><button></button><svg class="plot"><text x="-20" y="20">clipped</text></svg>
<script>console.error("a mistake"); fetch("gone"); null.x;</script>"""


@in_loop
async def test_a_page_with_each_of_these_faults_is_refused(tmp_path):
    """Negative control of every check above."""
    async with serving(BAD_PAGE) as url, browser(tmp_path) as page:
        await page.show(400)
        await page.open(url)
        await page.until("true")
        assert await overflow(page, 400) == 600 + 8 - 400
        assert await page.value(CLIPPED) == ["clipped"]
        assert [one.split(":")[0] for one in await page.value(CONTRAST)] == ["pale"]
        assert len(await page.value(UNNAMED)) == 1
        light = await ground(page)
        await page.show(400, dark=True)
        assert await ground(page) == light
        kinds = {one.split(":")[0] for one in page.complaints}
        assert kinds == {"console", "thrown", "log"}
