"""The tree keeps to its limits: folders, files, functions, class names, README."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure.__main__ import ROOT
from tests.structure.measure import GOALS, PACKAGES, WIRE_MESSAGES, Goals, read_tree, violations
from tests.structure.traced import summed

SMALL = Goals(files_in_a_folder=2, lines_of_a_file=9, lines_of_a_function=4, lines_of_the_readme=1)


def test_the_tree_keeps_to_its_limits() -> None:
    assert violations(ROOT) == []


def test_the_tree_is_not_empty() -> None:
    """The control of the test above: something was counted."""
    source = read_tree(ROOT, PACKAGES)
    assert len(source.files) > 100
    assert len(source.functions) > 1000
    assert len(source.classes) > 200
    assert WIRE_MESSAGES in source.files


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkout that keeps to ``SMALL``."""
    folder = tmp_path / "pdconn/protocol"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "messages.py").write_text("class Claim: ...\n", encoding="utf-8")
    (folder / "claims.py").write_text(
        "class Claim: ...\n\n\ndef f():\n    pass\n", encoding="utf-8"
    )
    (tmp_path / "README.md").write_text("# small\n", encoding="utf-8")
    assert violations(tmp_path, SMALL) == []
    return tmp_path


def test_a_wire_message_may_share_its_name(small: Path) -> None:
    assert read_tree(small, PACKAGES).classes == {"Claim": ["pdconn/protocol/claims.py"]}


@pytest.mark.parametrize(
    ("path", "text", "violation"),
    [
        ("pdconn/protocol/third.py", "", "pdconn/protocol: 3 files, at most 2"),
        ("pdconn/long.py", "\n" * 10, "pdconn/long.py: 10 lines, at most 9"),
        (
            "transport/slow.py",
            "class A:\n    async def g():\n" + "        x = 1\n" * 4,
            "transport/slow.py:g: 5 lines, at most 4",
        ),
        (
            "registration/again.py",
            "def f():\n    class Claim: ...\n",
            "class Claim: defined in pdconn/protocol/claims.py, registration/again.py",
        ),
        (
            "registration/private.py",
            "class _Held: ...\n\n\nclass _Held: ...\n",
            "class _Held: defined in registration/private.py, registration/private.py",
        ),
        ("README.md", "#\n#\n", "README.md: 2 lines, at most 1"),
    ],
)
def test_what_is_above_a_limit_is_named(small: Path, path: str, text: str, violation: str) -> None:
    (small / path).parent.mkdir(exist_ok=True)
    (small / path).write_text(text, encoding="utf-8")
    assert violations(small, SMALL) == [violation]
    assert violations(small, GOALS) == [each for each in [violation] if "class" in each]


def test_tests_have_limits_for_folders_and_files(small: Path) -> None:
    """Functions may be long there, and classes of two files may share a name."""
    (small / "tests").mkdir()
    for name in "ab":
        (small / f"tests/test_{name}.py").write_text(
            "class Same:\n    def f():" + "\n        x()" * 7, encoding="utf-8"
        )
    assert violations(small, SMALL) == []
    (small / "tests/test_c.py").write_text("\n" * 10, encoding="utf-8")
    too_long = "tests/test_c.py: 10 lines, at most 9"
    assert violations(small, SMALL) == ["tests: 3 files, at most 2", too_long]


def test_changes_of_file_are_counted_thread_by_thread() -> None:
    found = summed([["a", "a", "b", "a"], ["b"], ["b", "c"], []])
    assert (found["files"], found["changes"]) == (3, 3)
    assert found["names"] == ["a", "b", "c"]
    assert found["most"] == {"a -> b": 1, "b -> a": 1, "b -> c": 1}


def test_a_pull_and_a_routed_request_are_traced() -> None:
    command = [sys.executable, "-m", "tests.structure.traced", "--runs", "1", "--json"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    found = json.loads(printed.stdout)
    assert list(found) == ["first pull", "next pull", "routed request"]
    for each in found.values():
        assert len(each["names"]) == each["files"] <= each["changes"]
        assert 0 < sum(each["most"].values()) <= each["changes"]
    assert any(name.startswith("pdconn/lender/") for name in found["next pull"]["names"])
    assert any(name.startswith("pdconn/puller/") for name in found["next pull"]["names"])
