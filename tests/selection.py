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
def _named_in(path: Path) -> frozenset[str]:
    return frozenset(_NAMED.findall(path.read_text(encoding="utf-8")) if path.is_file() else ())


def marks_named_for(path: Path) -> frozenset[str]:
    """Marks that tests of this file can have: it names them, or a ``conftest.py`` above does."""
    above = [one / "conftest.py" for one in path.parents if TESTS in one.parents]
    return frozenset().union(*map(_named_in, (path, *above)))


def may_run(expression: str, path: Path) -> bool:
    """Whether ``-m expression`` may run a test of this file, or below this folder.

    False saves the import, and those of ``conftest.py``.
    """
    if path.is_dir():
        return any(may_run(expression, test) for test in path.rglob("test_*.py"))
    return _may_have(expression, marks_named_for(path))


@functools.cache
def _may_have(expression: str, marks: frozenset[str]) -> bool:
    try:
        return any(selects(expression, some) for some in combinations(marks))
    except ValueError:  # a mark that plugins give, such as hypothesis
        return True


def unnamed(tests: Iterable[tuple[Path, Collection[str]]]) -> list[str]:
    """Files whose tests have marks that they do not name: recipes would not find them."""
    found = {path: set(marks) & set(MARKS) - marks_named_for(path) for path, marks in tests}
    return [f"{path}: names no mark {', '.join(sorted(m))}" for path, m in found.items() if m]
