"""Pictures of the docs: what a command draws is what it draws now; all are small and used."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pdconn.tools.cli.main import main
from tests.project.docs.architecture import HEIGHT, THEMES, WIDTH, picture
from tests.project.docs.generate import DOCS, ROOT

IMAGES = DOCS / "images"
MOST_NBYTES = 200 << 10
_DRAWN = re.compile(r"pdconn (plan .*--svg docs/images/([\w-]+\.svg))$", re.MULTILINE)


def drawn() -> dict[str, str]:
    """The pictures that the docs say how to draw, and the command."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    return {found[2]: found[1] for found in _DRAWN.finditer(text)}


@pytest.mark.parametrize("name", sorted(drawn()))
def test_a_picture_is_what_its_command_draws(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs/images").mkdir(parents=True)
    assert main(shlex.split(drawn()[name])) == 0
    capsys.readouterr()
    assert (tmp_path / "docs/images" / name).read_text(encoding="utf-8") == (
        IMAGES / name
    ).read_text(encoding="utf-8")


def test_each_command_draws_another_picture() -> None:
    pictures = [(IMAGES / name).read_bytes() for name in drawn()]
    assert len({*pictures}) == len(pictures) > 1
    bands = {
        name: (IMAGES / name).read_text(encoding="utf-8").count('class="run"') for name in drawn()
    }
    assert bands["plan-slow.svg"] > 2 * bands["plan.svg"], "a band for each token of a head"


@pytest.mark.parametrize("theme", THEMES)
def test_the_architecture_is_what_its_script_draws(theme: str) -> None:
    shown = (IMAGES / f"architecture-{theme}.svg").read_text(encoding="utf-8")
    assert shown == picture(THEMES[theme]), "run `python -m tests.project.docs.architecture`"


def outside(svg: str) -> list[str]:
    """Elements of the architecture that do not lie within the picture."""
    return [
        element
        for element in re.findall(r"<(?:rect|line|text|circle)[^>]*>", svg)
        for axis, most in (("x", WIDTH), ("y", HEIGHT))
        for place in re.findall(rf'\b(?:c?{axis}|{axis}[12])="(\d+)"', element)
        if int(place) > most
    ]


def test_nothing_of_the_architecture_lies_outside() -> None:
    for theme in THEMES.values():
        assert outside(picture(theme)) == []
    assert len(outside(picture(THEMES["light"]).replace('x="490"', 'x="990"'))) == 1


def test_the_architecture_s_texts_have_contrast() -> None:
    """Every text is readable on each ground that it may stand on: WCAG asks for 4.5."""
    for theme in THEMES.values():
        for ground in (theme.page, theme.engine, theme.box):
            for colour in (theme.text, theme.quiet, theme.accent):
                assert contrast(colour, ground) >= 4.5, (colour, ground)
    assert contrast(THEMES["light"].quiet, THEMES["dark"].page) < 4.5, "the other theme's"


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_picture_is_small_used_and_can_be_made_again() -> None:
    pages = "\n".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *DOCS.glob("*.md"))
    )
    found = sorted(IMAGES.iterdir())
    made = {*drawn(), *(f"architecture-{theme}.svg" for theme in THEMES)}
    assert {path.name for path in found if path.suffix == ".svg"} == made != set(THEMES)
    for path in found:
        assert path.stat().st_size <= MOST_NBYTES, path.name
        assert re.search(rf"images/{re.escape(path.name)}[)\"]", pages), path.name
    assert "python -m tests.router.page" in pages, "which makes the others"
