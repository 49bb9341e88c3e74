"""The picture: well-formed, and one band per run, as wide as its bytes."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from pdconn.planning.layouts import LAYOUTS
from pdconn.planning.plan import Pairing
from pdconn.tools.plan.drawing.picture import draw
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.model_shape import ModelShape, sorts_of
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.shapes import SHAPES, built_in
from registration.references import AttentionKind

SVG = "{http://www.w3.org/2000/svg}"
SMALL = ModelShape("small", sorts_of([AttentionKind.FULL] * 3, None, 4, 8))


def parts(svg: str, tag: str, kind: str) -> list[ET.Element]:
    return [part for part in ET.fromstring(svg).iter(SVG + tag) if part.get("class") == kind]


def texts(svg: str) -> list[str]:
    return [part.text or "" for part in ET.fromstring(svg).iter(SVG + "text")]


def tips(svg: str) -> list[str]:
    return [cell.find(SVG + "title").text or "" for cell in parts(svg, "rect", "cell")]


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
    pairing = Pairing.between(decode.references(2)[0], prefill.references(2))
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
    heads = [f"layers.{n}.attn head {h}: 128 bytes" for n in range(3) for h in range(4)]
    assert sorted(tips(svg)) == sorted(heads * 2)
    assert {"prefill rank 0", "prefill rank 1", "decode rank 0"} <= set(texts(svg))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_group_can_be_drawn_and_nothing_is_outside_the_picture(shape):
    prefill, decode = EngineShape(shape, tp=4, pp=2), EngineShape(shape, tp=2, layout="BLNHC")
    for group in range(len(decode.groups)):
        svg = draw(prefill, decode, group)
        assert parts(svg, "path", "run")
        assert outside(svg) == []
        assert len(svg) < 100_000


def outside(svg: str) -> list[str]:
    """What reaches beyond the frame; a letter is taken to be at most 0.6 of its font's height."""
    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    found = []
    for part in root.iter(SVG + "text"):
        kind, words = part.get("class") or "", part.text or ""
        long = 0.6 * (16 if kind == "title" else 12) * len(words)
        left = float(part.get("x")) - (long / 2 if "mid" in kind else 0)
        if left < 0 or left + long > width or not 12 <= float(part.get("y")) <= height - 4:
            found.append(words)
    for part in root.iter(SVG + "rect"):
        x, y = float(part.get("x", 0)), float(part.get("y", 0))
        right, bottom = x + float(part.get("width")), y + float(part.get("height"))
        if x < 0 or y < 0 or right > width + 0.01 or bottom > height:
            found.append(f"rect at {x}, {y}")
    return found


def test_what_is_outside_is_noticed():
    """Negative control."""
    svg = draw(EngineShape(SMALL), EngineShape(SMALL), 0)
    assert outside(svg) == []
    _, _, _, height = map(float, ET.fromstring(svg).get("viewBox").split())
    assert "decode rank 0" in outside(svg.replace(f' {height:g}"', f' {height - 90:g}"', 1))
    longer = svg.replace(">decode rank 0<", f">{'decode ' * 40}<")
    assert len(outside(longer)) == 1


def test_a_name_of_any_length_fits():
    for name in ("a" * 1000, "many words " * 100):
        model = ModelShape(name, SMALL.sorts)
        assert outside(draw(EngineShape(model), EngineShape(model), 0)) == []


def test_layers_and_heads_have_names():
    model = built_in("gpt-oss-20b")
    words = texts(draw(EngineShape(model, "BLHNC", tp=4), EngineShape(model, "BHLNC", tp=4), 1))
    assert {f"layer {n}" for n in (1, 3, 5, 23)} <= set(words), "above, with layers outside"
    assert {"head 0", "head 1"} <= set(words), "below, with heads outside"
    assert {"h0", "h1", "L1", "L23"} <= set(words), "and the others in the cells"


def test_of_many_layers_heads_and_rows_some_are_drawn_and_a_note_says_of_how_many():
    model = built_in("llama-3.1-405b")
    svg = draw(EngineShape(model, "BLNHC"), EngineShape(model, "BHLNC", tp=2), 0)
    shown = len(parts(svg, "path", "run"))
    layers = {tip.split()[0] for tip in tips(svg)}
    assert 0 < shown < 126 * 4 * 16
    assert {"layers.0.attn", "layers.125.attn"} <= layers
    (note,) = [words for words in texts(svg) if words.startswith("drawn are")]
    assert f"{len(layers)} of 126 layers" in note
    assert f"{shown} of {126 * 4 * 16:,} runs" in note
    assert "⋯" in texts(svg)


def test_a_picture_of_everything_has_no_such_note_and_no_break():
    words = texts(draw(EngineShape(SMALL, "BHLNC"), EngineShape(SMALL), 0))
    assert not [one for one in words if one.startswith("drawn are") or "⋯" in one]
    assert [
        one for one in texts(draw(EngineShape(SMALL), EngineShape(SMALL, tp=2), 0)) if "⋯" in one
    ]


def test_many_prefill_ranks_are_some_and_every_band_begins_at_one_that_is_drawn():
    model = built_in("llama-3.1-405b")
    svg = draw(EngineShape(model, tp=8, pp=9), EngineShape(model), 0)
    named = [words for words in texts(svg) if re.fullmatch(r"(prefill rank |rank |)\d+", words)]
    assert 1 < len(named) <= 8
    tops = {(float(c.get("x")), float(c.get("x")) + float(c.get("width")))
            for c in parts(svg, "rect", "cell")}  # fmt: skip
    for band in parts(svg, "path", "run"):
        left, _, _, right = corners(band)
        assert any(x - 0.02 <= left and x <= right for x, _ in tops)
    (note,) = [words for words in texts(svg) if words.startswith("drawn are")]
    assert f"{len(named)} of 72 prefill ranks" in note


def test_a_head_of_the_source_that_is_not_read_is_pale_and_has_no_band():
    svg = draw(EngineShape(SMALL, tp=2), EngineShape(SMALL, tp=4), 0)
    pale = parts(svg, "rect", "cell unread")
    assert [cell.find(SVG + "title").text for cell in pale] == [
        f"layers.{n}.attn head 1: 128 bytes, not read" for n in range(3)
    ]
    ends = [(corners(band)[0], corners(band)[3]) for band in parts(svg, "path", "run")]
    for cell in pale:
        left, right = float(cell.get("x")), float(cell.get("x")) + float(cell.get("width"))
        assert all(right <= a + 0.02 or left >= b - 0.02 for a, b in ends)
    assert any(words.startswith("pale") for words in texts(svg))


def test_unequal_blocks_show_their_first_common_part():
    svg = draw(EngineShape(SMALL, block_tokens=32), EngineShape(SMALL, block_tokens=16), 0)
    assert any("first 16 tokens only" in words for words in texts(svg))
    assert len(parts(svg, "path", "run")) == 3 * 4


def test_names_are_escaped():
    model = ModelShape('<a> & "b"', SMALL.sorts)
    words = texts(draw(EngineShape(model), EngineShape(model), 0))
    assert any(one.startswith('<a> & "b", KV cache group 0 of decode') for one in words)


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
