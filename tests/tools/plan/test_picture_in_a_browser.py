"""The picture of ``pdconn plan`` as a browser draws it: inside its frame, and dark if asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdconn.tools.plan.drawing.picture import draw
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.shapes import SHAPES, built_in
from tests.fakes.event_loop import in_loop
from tests.router.page.browser import CHROMIUM, Page, browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine's PATH")

OUTSIDE = """[...document.querySelectorAll("text, rect, path")].filter((one) => {
  const box = one.getBBox(), frame = document.documentElement.viewBox.baseVal;
  return box.x < 0 || box.y < 0 || box.x + box.width > frame.width + 0.1
    || box.y + box.height > frame.height + 0.1;
}).map((one) => one.textContent)"""

#: Texts of one line that lie on each other.
OVERLAPPING = """(() => {
  const all = [...document.querySelectorAll("text")].map((one) => [one, one.getBBox()]);
  return all.flatMap(([one, a], i) => all.slice(i + 1)
    .filter(([, b]) => Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > 1
      && Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 6)
    .map(([other]) => `${one.textContent} | ${other.textContent}`));
})()"""


async def shown(page: Page, svg: str, folder: Path) -> tuple[list[str], list[str]]:
    """What a picture has outside its frame, and on each other."""
    path = folder / "plan.svg"
    path.write_text(svg, encoding="utf-8")
    await page.open(path.as_uri())
    return await page.value(OUTSIDE), await page.value(OVERLAPPING)


@in_loop
async def test_every_picture_is_inside_its_frame_and_no_name_covers_another(tmp_path):
    async with browser(tmp_path) as page:
        await page.show(1200)
        for shape in SHAPES:
            for theirs, ours in (("tp=4", "tp=8"), ("tp=8,pp=4", "tp=1"), ("tp=1", "tp=2")):
                prefill, decode = (_engine(shape.name, words) for words in (theirs, ours))
                for group in {0, len(decode.groups) - 1}:
                    svg = draw(prefill, decode, group)
                    assert await shown(page, svg, tmp_path) == ([], []), (shape.name, theirs, ours)
        assert page.complaints == []


@in_loop
async def test_a_picture_with_these_faults_is_noticed(tmp_path):
    """Negative control."""
    svg = draw(_engine("qwen3-8b", ""), _engine("qwen3-8b", ""), 0)
    async with browser(tmp_path) as page:
        await page.show(1200)
        assert await shown(page, svg, tmp_path) == ([], [])
        lower = re.sub(r'(viewBox="0 0 1200) [\d.]+', r"\1 100", svg)
        assert "decode rank 0" in (await shown(page, lower, tmp_path))[0]
        covered = svg.replace(">layer 0<", f">{'layer 0 ' * 8}<")
        assert (await shown(page, covered, tmp_path))[1]


@in_loop
async def test_a_dark_system_gets_a_dark_picture(tmp_path):
    svg = draw(_engine("qwen3-8b", ""), _engine("qwen3-8b", ""), 0)
    colour = "getComputedStyle(document.querySelector('.{}')).fill"
    async with browser(tmp_path) as page:
        seen = []
        for dark in (False, True):
            await page.show(1200, dark=dark)
            await shown(page, svg, tmp_path)
            seen.append([await page.value(colour.format(kind)) for kind in ("ground", "title")])
        assert seen[0][0] != seen[1][0]
        assert seen[0][1] != seen[1][1]


def _engine(name: str, words: str) -> EngineShape:
    sizes = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", words)}
    return EngineShape(built_in(name), **sizes)
