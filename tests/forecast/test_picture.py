"""The picture: well-formed, and one band per run, as wide as its bytes."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from pdconn.forecast.engine import EngineShape
from pdconn.forecast.errors import ShapeError
from pdconn.forecast.memory import LAYOUTS
from pdconn.forecast.model import ModelShape, sorts_of
from pdconn.forecast.picture import draw
from pdconn.forecast.shapes import SHAPES, built_in
from pdconn.planning.plan import Pairing
from registration.references import AttentionKind

SVG = "{http://www.w3.org/2000/svg}"
SMALL = ModelShape("small", sorts_of([AttentionKind.FULL] * 3, None, 4, 8))


def parts(svg: str, tag: str, kind: str) -> list[ET.Element]:
    return [part for part in ET.fromstring(svg).iter(SVG + tag) if part.get("class") == kind]


def texts(svg: str) -> list[str]:
    return [part.text or "" for part in ET.fromstring(svg).iter(SVG + "text")]


def corners(band: ET.Element) -> list[float]:
    """x of the source's left, target's left, target's right and source's right end."""
    numbers = [float(pair.split(",")[0]) for pair in re.findall(r"[\d.]+,[\d.]+", band.get("d"))]
    return [numbers[0], numbers[3], numbers[4], numbers[7]]


@pytest.mark.parametrize("theirs", LAYOUTS)
@pytest.mark.parametrize("ours", LAYOUTS)
def test_a_band_for_every_run_as_wide_as_its_bytes(theirs, ours):
    prefill = EngineShape(SMALL, theirs, tp=4, block_tokens=4)
    decode = EngineShape(SMALL, ours, tp=2, block_tokens=4)
    svg = draw(prefill, decode, 0)
    pairing = Pairing.of(decode.references(2)[0], prefill.references(2))
    nbytes = [int(n) for template in pairing.templates for n in template.nbytes]
    bands = [corners(band) for band in parts(svg, "path", "run")]
    assert len(bands) == len(nbytes)
    # 3 layers, 2 heads and 4 rows of 8 bytes fill the lower row of 1152 pixels.
    widths = sorted(right - left for _, left, right, _ in bands)
    expected = sorted(n * 1152 / (3 * 2 * 4 * 8) for n in nbytes)
    assert widths == pytest.approx(expected, abs=0.02)
    assert sum(widths) == pytest.approx(1152, abs=0.02 * len(widths))
    # No two runs come from or go to the same place.
    for left, right in ((0, 3), (1, 2)):
        ends = sorted((band[left], band[right]) for band in bands)
        for (_, end), (start, _) in pairwise(ends):
            assert end <= start + 0.02


def test_a_cell_for_every_head_of_every_layer():
    svg = draw(EngineShape(SMALL, tp=2), EngineShape(SMALL), 0)
    tips = [cell.find(SVG + "title").text for cell in parts(svg, "rect", "cell")]
    heads = [f"layers.{n}.attn head {h}: 128 bytes" for n in range(3) for h in range(4)]
    assert sorted(tips) == sorted(heads * 2)
    assert {"prefill rank 0", "prefill rank 1", "decode rank 0"} <= set(texts(svg))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_group_can_be_drawn(shape):
    prefill, decode = EngineShape(shape, tp=4, pp=2), EngineShape(shape, tp=2, layout="BLNHC")
    for group in range(len(decode.groups)):
        svg = draw(prefill, decode, group)
        assert parts(svg, "path", "run")
        assert len(svg) < 2_000_000


def test_what_does_not_fit_is_named():
    model = built_in("llama-3.1-405b")
    svg = draw(EngineShape(model, "BLNHC"), EngineShape(model, "BHLNC", tp=2), 0)
    shown = len(parts(svg, "path", "run"))
    assert 0 < shown < 126 * 4 * 16
    (note,) = [words for words in texts(svg) if words.startswith("cut off")]
    assert f"{126 * 4 * 16 - shown:,} runs" in note


def test_unequal_blocks_show_their_first_common_part():
    svg = draw(EngineShape(SMALL, block_tokens=32), EngineShape(SMALL, block_tokens=16), 0)
    assert any("first 16 tokens only" in words for words in texts(svg))
    assert len(parts(svg, "path", "run")) == 3 * 4


def test_names_are_escaped():
    model = ModelShape('<a> & "b"', SMALL.sorts)
    assert '<a> & "b", group 0 of decode' in texts(draw(EngineShape(model), EngineShape(model), 0))


def test_a_stage_without_the_group_is_drawn_empty():
    model = built_in("deepseek-v4")
    svg = draw(EngineShape(model), EngineShape(model, pp=43), 0)
    assert not parts(svg, "path", "run")
    assert any("holds no layer" in words for words in texts(svg))


@pytest.mark.parametrize(
    ("group", "rank", "field"), [(1, 0, "group"), (-1, 0, "group"), (0, 2, "rank")]
)
def test_what_is_not_there_cannot_be_drawn(group, rank, field):
    with pytest.raises(ShapeError, match=f"{field}: expected 0 to"):
        draw(EngineShape(SMALL), EngineShape(SMALL, tp=2), group, rank)
