"""Pictures of the docs: what a command draws is what it draws now; all are small and used."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pdconn.cli.main import main
from tests.docs.generate import DOCS, ROOT

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


def test_every_picture_is_small_used_and_can_be_made_again() -> None:
    pages = "\n".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *DOCS.glob("*.md"))
    )
    found = sorted(IMAGES.iterdir())
    assert {path.name for path in found if path.suffix == ".svg"} == set(drawn()) != set()
    for path in found:
        assert path.stat().st_size <= MOST_NBYTES, path.name
        assert f"images/{path.name})" in pages, f"{path.name} is used nowhere"
    assert "python -m tests.router.page" in pages, "which makes the others"
