"""``docs/gpu.md`` has the figures that the kit wrote on two cards."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.project.docs.generate import ROOT

CARDS = ("H100", "H200")
FOUND = {
    card: json.loads((ROOT / f"tests/gpu/results/{card.lower()}.json").read_text("utf-8"))["steps"]
    for card in CARDS
}
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
MODELS = {
    "Gemma-3-like (full attention and windows)": "gemma-3-like",
    "Granite-4-H-like (attention and states)": "granite-4-h-like",
}


def row(start: str, page: str = PAGE) -> list[str]:
    """Cells of the table's row whose first cell starts so."""
    [line] = [one for one in page.splitlines() if one.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


@pytest.mark.parametrize("name", SPEEDS)
def test_speeds(name: str) -> None:
    assert [float(cell.replace(",", "")) for cell in row(name)] == [
        FOUND[card]["nixl"]["found"][SPEEDS[name]] for card in CARDS
    ]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", CONTESTANTS)
def test_hand_overs(name: str, card: str) -> None:
    steps = [FOUND[card]["handover"]["found"][f"{n} tokens"] for n in (200, 1000, 3000)]
    who = CONTESTANTS[name]
    shown = [f"{one['median ms'][who]}, {one['worst ms'][who]}" for one in steps]
    assert row(f"{name}, {card}") == shown
    assert not any(one["differs"] for one in steps)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, card: str) -> None:
    assert row(f"{name}, {card}") == cells_of(FOUND[card]["vllm"]["found"][MODELS[name]])


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL"])
def test_graphs(mode: str) -> None:
    found = FOUND["H200"]["graphs"]["found"][f"gemma-3-like, {mode}"]
    assert {one["graphs"] for one in found["engines"]} == {mode}
    assert row(f"Gemma-3-like, H200, CUDA graphs `{mode}`") == cells_of(found)


def cells_of(found: dict[str, Any]) -> list[str]:
    """Of a model's row: right answers, pulls, and medians in milliseconds."""
    rows = found["warming"] + found["prompts"]
    right = sum(one["differs"] is None for one in rows)
    medians = [found[f"median of {which}, ms"] for which in ("hand-over", "alone")]
    shown = [f"{right} of {len(rows)}", str(sum(one["pulls"] for one in rows))]
    return shown + [f"{one:.4g}" for one in medians]


@pytest.mark.parametrize("part", FOUND["H200"]["follow"]["found"])
def test_streams(part: str) -> None:
    found = FOUND["H200"]["follow"]["found"][part]
    counts, medians = found["counts"], found["median ms"]
    assert found["differs"] == []
    assert counts["pdconn:pulls_verified_total"] == counts["pdconn:pulls_total"]
    assert 2 * counts["pdconn:pulls_followed_total"] == counts["pdconn:pulls_total"]
    early = counts["pdconn:early_bytes_total"] >> 20
    shown = [str(medians["prefill first"]), str(medians["both at once"]), str(early)]
    assert row(named(part)) == shown


@pytest.mark.parametrize("part", FOUND["H200"]["store"]["found"])
def test_loads(part: str) -> None:
    found = FOUND["H200"]["store"]["found"][part]
    expected, seen = found["loaded tokens, expected and seen"]
    assert found["differs"] is None
    assert expected == seen
    assert row(named(part)) == [str(seen), str(found["first token, ms"]), str(found["alone, ms"])]


def named(part: str) -> str:
    """The name of a part's row."""
    return part.replace("kv-large", "192 KiB a token").replace("tiny", "Gemma-3-like")


@pytest.mark.parametrize("card", CARDS)
def test_bytes(card: str) -> None:
    files = FOUND[card]["bytes"]["found"].values()
    passed, failed, skipped = (
        sum(one[k] for one in files) for k in ("passed", "failed", "skipped")
    )
    assert f"{card}: {passed} passed, {skipped} were skipped" in PAGE
    assert failed == 0


def test_the_readme_has_the_same_speeds() -> None:
    found = FOUND["H100"]["nixl"]["found"]
    ours, plain = found["read in one piece, GB/s"], found["by UCX's own choice, GB/s"]
    assert f"reads at {ours:,.0f} GB/s where UCX by itself chose {plain:.1f}" in README


def test_another_figure_is_noticed() -> None:
    """Negative control."""
    page = PAGE.replace("1,048.25", "1,048.26")
    assert row("read in one piece", page)[0] != row("read in one piece")[0] == "1,048.25"
