"""The tutorial and the recipes: each command as the program that reads it takes it.

``test_quickstart`` and ``test_docs_vllm`` parse every command of every page; here is what they
do not look at: values that a parser leaves to the command, and what the pages promise.
"""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from pdconn.tools.bench.bench_errors import BadOption
from pdconn.tools.cli.bench_serve import _bounds, _plan, _targets
from pdconn.tools.cli.main import build_parser
from pdconn.tools.doctor.given.judge import judge_given
from pdconn.tools.doctor.given.read import read_given
from tests.project.docs.generate import DOCS
from tests.project.docs.pages import Command, commands
from tests.project.docs.test_quickstart import COMMANDS, SERVED, transfer_config

TUTORIAL = DOCS / "tutorial.md"
RECIPES = DOCS / "recipes.md"
MEASURED = [one for one in COMMANDS if one.words[:3] == ["pdconn", "bench", "serve"]]
DIAGNOSED = [
    one for one in COMMANDS if one.words[:2] == ["pdconn", "doctor"] and "--config" in one.words
]
TITLES = {
    "gpt-oss": "gpt-oss",
    "Gemma 3 and 4": "gemma-3",
    "Llama 4": "Llama-4",
    "DeepSeek and other MLA models": "DeepSeek",
    "Hybrids with recurrent states": "granite-4.0-h",
}
"""The five families, and a word of the model that each recipe serves."""


def kind(command: Command) -> str:
    """What a command is for, in the words of the tutorial's sections."""
    words = command.words
    if words[0] == "vllm":
        return "serve" if command in SERVED else "alone"
    return " ".join(words[:2]).removesuffix(" serve") if words[0] == "pdconn" else words[0]


def test_the_tutorial_has_every_stage_in_order() -> None:
    stages = [kind(one) for one in commands(TUTORIAL)]
    order = [
        "pip",
        "pdconn doctor",
        "pdconn plan",
        "alone",
        "pdconn bench",
        "serve",
        "pdconn proxy",
    ]
    first = [stages.index(stage) for stage in order]
    assert first == sorted(first)
    assert stages.count("serve") == 2
    assert stages.count("pdconn bench") == 2


@pytest.mark.parametrize("command", MEASURED, ids=str)
def test_a_measurement_has_targets_and_bounds_that_it_takes(command: Command) -> None:
    measured(command.words)


def measured(words: list[str]) -> None:
    args = build_parser("bench").parse_args(words[1:])
    assert _targets(args.target)
    assert _bounds(args).ttft_s > 0
    assert _plan(args).requests > 0


def test_a_measurement_with_a_fault_is_refused() -> None:
    """Negative control."""
    text = next(one.text for one in MEASURED if "admin=" in one.text)
    for old, new in (("admin=http", "admin=ftp"), ("--ttft-bound 500", "--ttft-bound 0")):
        with pytest.raises(BadOption):
            measured(Command("x", text.replace(old, new)).words)


def test_both_measurements_of_the_tutorial_ask_the_same_of_each_engine() -> None:
    alone, pair = (build_parser("bench").parse_args(one.words[1:]) for one in MEASURED
                   if one.page == "tutorial.md")  # fmt: skip
    for option in ("prompt", "output", "rounds", "ttft_bound", "itl_bound", "seed"):
        assert getattr(alone, option) == getattr(pair, option)
    assert (pair.rate, pair.requests) == (2 * alone.rate, 2 * alone.requests)


@pytest.mark.parametrize("command", DIAGNOSED, ids=str)
def test_a_configuration_that_doctor_is_shown_has_no_fault(command: Command) -> None:
    config = command.words[command.words.index("--config") + 1]
    assert list(judge_given(read_given(config, {}), [])) == []


def test_a_configuration_with_a_fault_is_noticed() -> None:
    """Negative control."""
    command = next(one for one in DIAGNOSED if "kv_consumer" in one.text)
    config = command.words[command.words.index("--config") + 1]
    for wrong in (config.replace("recompute", "fail"), config.replace("kv_consumer", "kv_user")):
        assert list(judge_given(read_given(wrong, {}), [])) != []


def test_the_tutorial_s_figures_are_those_of_its_outputs() -> None:
    """The table to decide by repeats what the two reports say."""
    page = TUTORIAL.read_text(encoding="utf-8")
    rows = {
        found[1]: found[2].split()
        for found in re.finditer(r"^ +(one|pd) +(\d.*)$", page, re.MULTILINE)
    }
    decided = page.partition("## 8. Decide")[2]
    ttft, itl, goodput = 1, 4, 8
    for name in ("one", "pd"):
        assert f"{rows[name][goodput]} " in decided
        for column in (ttft, itl):
            assert f"{float(rows[name][column]) + 0.01:.0f} ms" in decided
    assert f"2 × {rows['one'][goodput]} = {2 * float(rows['one'][goodput]):g}" in decided


def families() -> dict[str, list[Command]]:
    """The engines of each section of the recipes."""
    found = defaultdict(list)
    sections = re.split(r"^## (.+)$", RECIPES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        found[title] += [one for one in SERVED if one.page == RECIPES.name and one.text in text]
    return found


def test_every_family_has_a_prefill_and_a_decode_engine_of_one_model() -> None:
    found = families()
    assert list(found) == list(TITLES)
    for title, model in TITLES.items():
        prefill, decode, *more = found[title]
        assert model in prefill.words[2]
        pairs = [(prefill, decode), *zip(more[::2], more[1::2], strict=True)]
        for one, other in pairs:
            assert one.words[2] == other.words[2]
            roles = [transfer_config(each)["kv_role"] for each in (one, other)]
            assert roles == ["kv_producer", "kv_consumer"]


def test_recipes_with_states_cache_prefixes() -> None:
    for command in families()["Hybrids with recurrent states"]:
        assert "--enable-prefix-caching" in command.words
