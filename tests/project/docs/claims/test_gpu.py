"""``docs/gpu.md`` has the figures that the kit wrote on a card."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.project.docs.generate import ROOT

FOUND = json.loads((ROOT / "tests/gpu/results/h100.json").read_text(encoding="utf-8"))["steps"]
PAGE = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())

SPEEDS = {
    "torch's copy within one process": "copy within a process, GB/s",
    "read in one piece": "read in one piece, GB/s",
    "read in blocks of 2,048 KiB, in random order": "read in blocks of 2048 KiB, GB/s",
    "read in blocks of 256 KiB": "read in blocks of 256 KiB, GB/s",
    "read in blocks of 64 KiB": "read in blocks of 64 KiB, GB/s",
    "read in one piece, as UCX chooses by itself": "by UCX's own choice, GB/s",
}
CONTESTANTS = {
    "**pdconn**": "pdconn",
    "vLLM's NixlConnector": "in-tree",
    "vLLM's NixlConnector, reads on": "in-tree, reads on",
    "one engine alone, prefill included": "alone, prefill included",
}
MODELS = {"Gemma-3-like": "gemma-3-like", "Granite-4-H-like": "granite-4-h-like"}


def row(start: str, page: str = PAGE) -> list[str]:
    """Cells of the table's row whose first cell starts so."""
    [line] = [one for one in page.splitlines() if one.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


@pytest.mark.parametrize("name", SPEEDS)
def test_speeds(name: str) -> None:
    assert [float(cell.replace(",", "")) for cell in row(name)] == [
        FOUND["nixl"]["found"][SPEEDS[name]]
    ]


@pytest.mark.parametrize("name", CONTESTANTS)
def test_hand_overs(name: str) -> None:
    steps = [FOUND["handover"]["found"][f"{n} tokens"] for n in (200, 1000, 3000)]
    who = CONTESTANTS[name]
    assert row(name) == [f"{one['median ms'][who]}, {one['worst ms'][who]}" for one in steps]
    assert not any(one["differs"] for one in steps)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    found: dict[str, Any] = FOUND["vllm"]["found"][MODELS[name]]
    [line] = [one for one in PAGE.splitlines() if one.startswith(f"| {name} ")]
    rows = found["warming"] + found["prompts"]
    right = sum(one["differs"] is None for one in rows)
    medians = [found[f"median of {which}, ms"] for which in ("hand-over", "alone")]
    shown = [f"{right} of {len(rows)}", str(sum(one["pulls"] for one in rows))]
    shown += [f"{one:.4g}" for one in medians]
    assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == shown


def test_bytes() -> None:
    files = FOUND["bytes"]["found"].values()
    passed, failed, skipped = (
        sum(one[k] for one in files) for k in ("passed", "failed", "skipped")
    )
    assert f"{passed} passed, {skipped} were skipped" in PAGE
    assert failed == 0


def test_the_readme_has_the_same_speeds() -> None:
    found = FOUND["nixl"]["found"]
    ours, plain = found["read in one piece, GB/s"], found["by UCX's own choice, GB/s"]
    assert f"reads at {ours:,.0f} GB/s where UCX by itself chose {plain:.1f}" in README


def test_another_figure_is_noticed() -> None:
    """Negative control."""
    with pytest.raises(AssertionError):
        assert row("read in one piece", PAGE.replace("1,048.25", "1,048.26")) == ["1,048.25"]
