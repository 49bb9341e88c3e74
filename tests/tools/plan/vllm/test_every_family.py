"""Every family and shape that ``pdconn plan --list`` names is compared with vLLM's own classes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from pdconn.tools.cli.main import main
from pdconn.tools.plan.hf.config_keys import text_keys
from tests.tools.plan.vllm import vllm_families
from tests.tools.plan.vllm.vllm_families import COMPARED, NOT_BUILT
from tests.tools.plan.vllm.vllm_models import CASES, SHAPES


def families(cases: Iterable[Mapping[str, Any]]) -> set[str]:
    """As pdconn reads them: by the level of the language model."""
    return {text_keys(config)["model_type"] for config in cases}


def listed(capsys: pytest.CaptureFixture[str]) -> tuple[set[str], set[str]]:
    """The shapes and the families that the command names."""
    assert main(["plan", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {shape["name"] for shape in found["shapes"]}, set(found["model_types"])


def test_every_listed_family_is_compared_or_has_a_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shapes, named = listed(capsys)
    assert shapes == set(SHAPES)
    compared = families(COMPARED.values()) - {"deepseek_v4"}  # a built-in shape alone
    assert named - compared == set(NOT_BUILT), "neither compared nor in NOT_BUILT, or in both"
    assert compared <= named
    assert {family: one.config["model_type"] for family, one in NOT_BUILT.items()} == {
        family: family for family in NOT_BUILT
    }


def test_a_family_that_is_not_compared_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    _, named = listed(capsys)
    for family in ("apertus", "qwen3_vl_text", "nemotron_h"):
        fewer = {
            name: config for name, config in COMPARED.items() if families([config]) != {family}
        }
        assert named - families(fewer.values()) == {family, *NOT_BUILT}


def test_no_case_hides_another() -> None:
    parts = (SHAPES, CASES, vllm_families.DECODERS, vllm_families.NESTED, vllm_families.HYBRIDS)
    assert sum(map(len, parts)) == len(COMPARED)
