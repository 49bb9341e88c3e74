"""Each test is run by one recipe of the Makefile, and no recipe leaves out a file that it needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from tests import selection
from tests.project.structure.__main__ import ROOT
from tests.selection import MARKS, combinations, marks_named_for, may_run, selects, unnamed

RECIPES = ("test-fast", "test-vllm", "test-matrix", "compose", "multinode")
FOLDERS = {"compose": "tests/project/docker/fleet", "multinode": "tests/multinode"}
"""Where the tests of a mark are, if its recipe looks at one folder."""


def lines_of(recipe: str) -> list[str]:
    """The commands of a recipe."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(rf"^{recipe}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert found is not None, recipe
    return found[1].splitlines()


def expressions() -> dict[str, str]:
    """What each command selects by."""
    return {
        line.strip(): found[1].strip('"')
        for recipe in RECIPES
        for line in lines_of(recipe)
        if (found := re.search(r'-m pytest -m ("[^"]+"|\w+)', line))
    }


def times_run(selecting: Mapping[str, str]) -> dict[tuple[str, ...], int]:
    """How many commands run a test of each set of marks, where it is not one."""
    counted = {
        marks: sum(selects(expression, marks) for expression in selecting.values())
        for marks in combinations(MARKS)
    }
    return {marks: count for marks, count in counted.items() if count != 1}


def test_each_test_is_run_by_one_command() -> None:
    selecting = expressions()
    assert len(selecting) == 7
    assert times_run(selecting) == {}


def test_a_test_that_two_commands_run_or_none_is_noticed() -> None:
    """Negative control."""
    selecting = expressions()
    fast = next(iter(selecting))
    assert times_run({**selecting, fast: "not (compose or engine or multinode or ucx)"}) == {
        ("matrix",): 2
    }
    assert times_run({**selecting, fast: "not engine and ucx"}).keys() >= {(), ("ucx",)}


def test_a_mark_whose_recipe_looks_at_one_folder_is_in_no_other() -> None:
    for mark, folder in FOLDERS.items():
        assert any(folder in line for line in lines_of(mark))
        naming = {path for path in _files() if f"mark.{mark}\n" in _lines(path)}
        assert naming
        assert all(ROOT / folder in path.parents for path in naming)


def _files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def _lines(path: Path) -> str:
    """Its text, with a line for each mark that it gives."""
    return "\n".join(re.findall(r"mark\.\w+", path.read_text(encoding="utf-8"))) + "\n"


@pytest.mark.parametrize(
    ("named", "expression", "is_imported"),
    [
        ((), "ucx", False),
        ((), "engine and not matrix", False),
        ((), "not (engine or matrix)", True),
        (("engine",), "engine and not matrix", True),
        (("engine",), "engine and matrix", False),
        (("engine", "matrix"), "engine and matrix", True),
        (("engine", "matrix"), "engine and not matrix", True),
        (("matrix",), "not (engine or matrix)", True),
        ((), "hypothesis", True),
    ],
)
def test_a_file_is_imported_if_its_marks_may_be_selected(
    tmp_path: Path, named: Collection[str], expression: str, is_imported: bool
) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("".join(f"@pytest.mark.{mark}\n" for mark in named), encoding="utf-8")
    assert may_run(expression, path) == is_imported


def test_a_mark_that_a_folder_gives_is_named_for_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that none gives is noticed where all files are imported."""
    monkeypatch.setattr(selection, "TESTS", tmp_path)
    path = tmp_path / "room/test_it.py"
    path.parent.mkdir()
    path.write_text("def test_it(): ...\n", encoding="utf-8")
    (path.parent / "conftest.py").write_text("pytest.mark.engine\n", encoding="utf-8")
    assert marks_named_for(path) == {"engine"}
    assert may_run("not engine", path), "not each of them may have it"
    assert unnamed([(path, ("engine", "timeout"))]) == []
    assert unnamed([(path, ("engine", "matrix"))]) == [f"{path}: names no mark matrix"]


def test_a_file_whose_tests_have_a_mark_from_their_folder_is_not_imported_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "TESTS", tmp_path)
    path = tmp_path / "room/test_it.py"
    path.parent.mkdir()
    path.write_text("@pytest.mark.matrix\n", encoding="utf-8")
    giving = "for item in items:\n    item.add_marker(pytest.mark.engine)\n"
    (path.parent / "conftest.py").write_text(giving, encoding="utf-8")
    assert not may_run("not (engine or ucx)", path)
    assert may_run("engine and not matrix", path)
    assert may_run("hypothesis", path)


def test_engines_are_given_their_mark_by_their_folder() -> None:
    """A negative control of the above: in another form it would be found in no folder."""
    engines = ROOT / "tests/vllm/engines/test_pair.py"
    assert not may_run("not (compose or engine or matrix or multinode or ucx)", engines)
    assert may_run("engine and not (compose or matrix or multinode or ucx)", engines)
