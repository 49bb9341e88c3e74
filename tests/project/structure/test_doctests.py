"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import warnings
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("pdconn", "transport", "registration")


def with_examples() -> list[str]:
    """Names of modules that have examples to run."""
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    shown = (path for path in files if any(map(_is_example, path.read_text("utf-8").splitlines())))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in shown]


def _is_example(line: str) -> bool:
    return ">>> " in line and "+SKIP" not in line


@pytest.mark.parametrize("name", with_examples())
def test_the_examples_of_a_module_print_what_they_say(name: str) -> None:
    with warnings.catch_warnings():  # of other people's packages, at their import
        warnings.simplefilter("ignore")
        module = importlib.import_module(name.removesuffix(".__init__"))
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_an_example_that_is_wrong_is_noticed() -> None:
    """Negative control."""
    module = ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert doctest.testmod(module).failed == 1
