"""The generated parts of ``docs/`` are what the code says now."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from pdconn.tools.cli.main import COMMANDS
from pdconn.vllm.config import KEYS, Settings, read_settings
from tests.project.docs.generate import DOCS, PARTS, ROOT, NoSuchPart, generated, pages, stale

#: Made without importing vLLM; what an engine shows is in ``test_docs_vllm``.
QUICK = {name: make for name, make in PARTS.items() if name != "engine-metrics"}


def test_every_part_stands_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in pages())
    assert [name for name in PARTS if f"<!-- generated:{name} -->" not in text] == []


@pytest.mark.parametrize("name", QUICK)
def test_a_part_is_what_the_code_says(name: str) -> None:
    page = next(
        path for path in pages() if f"<!-- generated:{name} -->" in path.read_text(encoding="utf-8")
    )
    only = {part: make if part == name else as_it_is(page, part) for part, make in PARTS.items()}
    assert list(stale([page], only)) == [], "run `make docs ARGS=--write`"


def test_a_stale_part_is_noticed(tmp_path: Path) -> None:
    """Negative control."""
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- generated:modules -->\n\nold\n\n<!-- /generated -->\nb\n", encoding="utf-8"
    )
    (difference,) = stale([page], {"modules": lambda: "new\n"})
    assert "-old" in difference
    assert "+new" in difference
    page.write_text(
        generated(page.read_text(encoding="utf-8"), {"modules": lambda: "new\n"}), encoding="utf-8"
    )
    assert list(stale([page], {"modules": lambda: "new\n"})) == []
    assert page.read_text(encoding="utf-8").startswith("a\n")
    assert page.read_text(encoding="utf-8").endswith("b\n")


def test_a_key_that_is_added_makes_the_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    page = DOCS / "configuration.md"
    monkeypatch.setattr("pdconn.vllm.config.KEYS", KEYS[:-1])
    assert list(stale([page])) != []


def test_a_part_that_nothing_makes_is_refused() -> None:
    with pytest.raises(NoSuchPart, match="modulse"):
        generated("<!-- generated:modulse -->\n<!-- /generated -->\n")


def test_documented_defaults_are_the_defaults() -> None:
    settings = read_settings({}, "h", 1, 0, {})
    shown = {key.name: key.default.strip("`") for key in KEYS}
    assert {one.name for one in fields(Settings)} - {"security"} <= shown.keys()
    for name in ("kv_lease_duration", "claim_timeout", "read_timeout", "drain_timeout"):
        assert float(shown[name]) == getattr(settings, name)
    for name in ("huge_pages", "enforce_handshake_compat"):
        assert shown[name] == str(getattr(settings, name)).lower()
    assert shown["transport"] == settings.transport
    assert shown["verify"] == settings.verify
    assert ast.literal_eval(shown["backends"]) == list(settings.backends)
    nothing = [name for name, default in shown.items() if default == "none"]
    assert not any(getattr(settings, name, None) for name in nothing)


def test_every_command_and_every_module_is_listed() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert all(f"## pdconn {command.name}" in text for command in COMMANDS)
    listed = (DOCS / "design.md").read_text(encoding="utf-8")
    for package in ("pdconn", "transport", "registration"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "__init__.py":
                assert f"`{path.relative_to(ROOT)}`" in listed


def as_it_is(page: Path, name: str) -> Callable[[], str]:
    """A part as the page has it, so that a test can look at another one."""
    text = page.read_text(encoding="utf-8")
    start = f"<!-- generated:{name} -->\n\n"
    inside = text.partition(start)[2].partition("\n<!-- /generated -->")[0]
    return lambda: inside
