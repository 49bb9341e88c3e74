"""The figures of the README's first screen are those of the results that it links to."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.project.docs.generate import ROOT

RESULTS = ROOT / "tests/throughput/results"
FIRST_SCREEN = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Try it")[0]

HAND_OVER = (
    r"it takes (\d+) ms \(median, 1,000 tokens\), and (\d+) ms with NixlConnector as it comes"
)
TUNED = r"and (\d+) ms with NixlConnector as it comes, (\d+) ms with its progress thread tuned"
FIRST_TOKEN = r"its median is (\d+) ms with pdconn and (\d+) ms with one engine alone"


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def hand_overs() -> dict[str, float]:
    """Medians of prompts of 1,000 tokens, in milliseconds."""
    measured = result("handover")["runs"]["apart"]["result"]["measured"]
    return {one["contestant"]: 1e3 * one["median_s"] for one in measured if one["tokens"] == 1000}


def first_tokens() -> dict[str, float]:
    """Medians of time to first token, in milliseconds."""
    found = result("serve")["runs"]["serve"]["result"]["contestants"]
    return {one["contestant"]: 1e3 * one["ttft"]["p50_s"] for one in found}


def claimed(sentence: str, text: str = FIRST_SCREEN) -> list[int]:
    """The two figures of a sentence, in milliseconds."""
    found = re.search(sentence, " ".join(text.split()))
    assert found is not None, sentence
    return [int(found[1]), int(found[2])]


def test_the_hand_over_is_what_was_measured() -> None:
    measured = hand_overs()
    assert claimed(HAND_OVER) == [round(measured["pdconn"]), round(measured["in-tree"])]
    assert claimed(TUNED) == [round(measured["in-tree"]), round(measured["in-tree-tuned"])]


def test_the_cost_is_what_was_measured() -> None:
    measured = first_tokens()
    assert claimed(FIRST_TOKEN) == [round(measured["pdconn"]), round(measured["single"])]


def test_a_figure_that_was_not_measured_is_noticed() -> None:
    """Negative control."""
    wrong = re.sub(r"takes \d+ ms", "takes 2 ms", FIRST_SCREEN)
    assert claimed(HAND_OVER, wrong)[0] == 2 != round(hand_overs()["pdconn"])
    with pytest.raises(AssertionError):
        claimed(FIRST_TOKEN, "nothing")


def test_no_claim_rests_on_a_trace_of_our_own() -> None:
    assert not re.search(r"\d+ % fewer", FIRST_SCREEN)
