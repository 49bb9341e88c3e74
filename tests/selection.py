"""Which tests a recipe of the Makefile runs, by their marks, and which files it need not import.

``make test`` alone imports all files.  A recipe that runs tests of certain marks only, such as
``-m ucx``, imports those that name one of them, themselves or by a ``conftest.py`` above them:
importing all takes longer than many of these tests.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from _pytest.mark.expression import Expression

MARKS = ("compose", "engine", "matrix", "multinode", "ucx")
"""Those that recipes select by."""

TESTS = Path(__file__).parent
_NAMED = re.compile(rf"\bmark\.({'|'.join(MARKS)})\b")
_FOR_ALL = re.compile(rf"^ +item\.add_marker\(pytest\.mark\.({'|'.join(MARKS)})\)", re.MULTILINE)
"""What a ``conftest.py`` gives each test of its folder."""


def selects(expression: str, marks: Collection[str]) -> bool:
    """Whether ``-m expression`` runs a test of these marks.

    Raises:
        ValueError: it asks for another mark.
    """

    def has(name: str, /, **_: object) -> bool:
        if name not in MARKS:
            raise ValueError(f"expected a mark of {', '.join(MARKS)}, seen {name}")
        return name in marks

    return Expression.compile(expression).evaluate(has)


def combinations(marks: Collection[str]) -> Iterator[tuple[str, ...]]:
    """All that a test may have of these."""
    for count in range(len(marks) + 1):
        yield from itertools.combinations(sorted(marks), count)


@functools.cache
def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@functools.cache
def _named_in(path: Path) -> frozenset[str]:
    return frozenset(_NAMED.findall(_text_of(path)))


def _conftests(path: Path) -> list[Path]:
    return [one / "conftest.py" for one in path.parents if TESTS in one.parents]


@functools.cache  # each of the thousands of tests asks for its file's
def marks_named_for(path: Path) -> frozenset[str]:
    """Marks that tests of this file can have: it names them, or a ``conftest.py`` above does."""
    return frozenset().union(*map(_named_in, (path, *_conftests(path))))


@functools.cache
def marks_given_to(path: Path) -> frozenset[str]:
    """Marks that each test of this file has: a ``conftest.py`` above gives them to its folder."""
    return frozenset(mark for one in _conftests(path) for mark in _FOR_ALL.findall(_text_of(one)))


def may_run(expression: str, path: Path) -> bool:
    """Whether ``-m expression`` may run a test of this file, or below this folder.

    False saves the import, and those of ``conftest.py``.
    """
    if path.is_dir():
        return any(may_run(expression, test) for test in path.rglob("test_*.py"))
    return _may_have(expression, marks_named_for(path), marks_given_to(path))


@functools.cache
def _may_have(expression: str, named: frozenset[str], given: frozenset[str]) -> bool:
    try:
        return any(selects(expression, {*given, *some}) for some in combinations(named))
    except ValueError:  # a mark that plugins give, such as hypothesis
        return True


def unnamed(tests: Iterable[tuple[Path, Collection[str]]]) -> list[str]:
    """Files whose tests have marks that they do not name: recipes would not find them."""
    found = {path: set(marks) & set(MARKS) - marks_named_for(path) for path, marks in tests}
    return [f"{path}: names no mark {', '.join(sorted(m))}" for path, m in found.items() if m]
