"""The tree keeps to its limits: folders, files, functions, class names, README."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.structure.__main__ import ROOT
from tests.project.structure.classes import read_classes, share_of_shared, shared_names
from tests.project.structure.measure import (
    GOALS,
    PACKAGES,
    WIRE_MESSAGES,
    Goals,
    comment_share,
    read_tree,
    violations,
)
from tests.project.structure.traced import summed

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


CLASSES = """
class Interface(Protocol):
    def put(self): ...
    def poll(self): ...

class A:
    def __init__(self): self.one = self._two = 1
    def put(self): ...
    def poll(self): ...
    def add(self): ...
    def close(self): ...

class B:
    three: int
    def put(self): ...
    def poll(self): ...
    def add(self): ...
    def close(self): ...

class C:
    @property
    def add(self): ...
    def close(self): ...
    def put(self): ...

class D:
    def add(self): ...
    def close(self): ...

class E(D):
    def add(self): ...
"""


def test_methods_of_one_interface_share_their_name(small: Path) -> None:
    (small / "pdconn/classes.py").write_text(CLASSES, encoding="utf-8")
    classes = read_classes(small, PACKAGES)
    by_name = {each.place.partition(":")[2]: each for each in classes}
    assert by_name["A"].attributes == {"one", "_two"}
    assert by_name["B"].attributes == {"three"}
    assert by_name["C"].methods == {"close", "put"}, "a property is an attribute to its readers"
    shared = shared_names(classes)
    assert list(shared) == ["add"], "put is the interface's and one other's, close is Python's"
    assert len(shared["add"]) == 4, "of three families: A, B, and D with what derives from it"
    assert share_of_shared(classes) == 4 / (2 + 4 + 4 + 2 + 2 + 1)


def test_comments_for_readers_are_counted(small: Path) -> None:
    path = small / "pdconn/comments.py"
    path.write_text("# why\nx = 1  # beside code\n# noqa: E501\ny = 2\n", encoding="utf-8")
    for name in ("messages.py", "claims.py"):
        (small / "pdconn/protocol" / name).unlink()
    assert comment_share(small, PACKAGES) == 1 / 4


def test_changes_of_file_are_counted_thread_by_thread() -> None:
    found = summed([["a", "a", "b", "a"], ["b"], ["b", "c"], []])
    assert (found["files"], found["changes"]) == (3, 3)
    assert found["names"] == ["a", "b", "c"]
    assert found["most"] == {"a -> b": 1, "b -> a": 1, "b -> c": 1}


def test_traces_of_all_kinds_of_request_have_files() -> None:
    command = [sys.executable, "-m", "tests.project.structure.traced", "--runs", "1", "--json"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    found = json.loads(printed.stdout)
    assert list(found) == ["first pull", "next pull", "routed request", "store save", "store load"]
    for each in found.values():
        assert len(each["names"]) == each["files"] <= each["changes"]
        assert 0 < sum(each["most"].values()) <= each["changes"]
    assert any(name.startswith("pdconn/lender/") for name in found["next pull"]["names"])
    assert any(name.startswith("pdconn/puller/") for name in found["next pull"]["names"])
