"""Count files, lines, functions and class names of a source tree, without importing it."""

from __future__ import annotations

import ast
import statistics
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.project.structure.classes import read_classes, share_of_shared

PACKAGES = ("pdconn", "transport", "registration")
MOST_ATTRIBUTES = 12
_OF_TOOLS = ("# type:", "# noqa", "# fmt:", "# ruff:", "# mypy:")
WIRE_MESSAGES = "pdconn/protocol/messages.py"
"""Its classes may share a name with another class, so they are not counted."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A file, folder or function, and its lines (of a folder: its files)."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.size} ({self.name})"


@dataclass(frozen=True, slots=True)
class Goals:
    """The most that a tree may have."""

    files_in_a_folder: int = 14
    lines_of_a_file: int = 600
    lines_of_a_function: int = 60
    lines_of_the_readme: int = 140


GOALS = Goals()


@dataclass(frozen=True)
class Tree:
    """Every Python file of some folders of a checkout.

    Attributes:
        files: path below the root -> lines.
        functions: of every file, with the lines from ``def`` to the last one.
        classes: name -> the files that define it, without the wire messages.
    """

    files: Mapping[str, int]
    functions: Sequence[Sized]
    classes: Mapping[str, Sequence[str]]

    @property
    def folders(self) -> list[Sized]:
        """Files in each folder, largest first; ``__init__.py`` is not counted."""
        counts = Counter(
            str(Path(path).parent) for path in self.files if Path(path).name != "__init__.py"
        )
        return [Sized(name, count) for name, count in counts.most_common()]

    @property
    def largest_files(self) -> list[Sized]:
        """Largest first."""
        return _descending(Sized(path, lines) for path, lines in self.files.items())

    @property
    def largest_functions(self) -> list[Sized]:
        """Largest first."""
        return _descending(self.functions)

    def defined_twice(self, private: bool) -> dict[str, Sequence[str]]:
        """Class names with more than one definition, and where those are."""
        return {
            name: places
            for name, places in sorted(self.classes.items())
            if len(places) > 1 and name.startswith("_") == private
        }


def _descending(sized: Iterator[Sized] | Sequence[Sized]) -> list[Sized]:
    return sorted(sized, key=lambda each: (-each.size, each.name))


def read_files(root: Path, folders: Sequence[str]) -> Tree:
    """Count the lines of every Python file below ``folders`` of ``root``, and look no closer."""
    return Tree({name: len(text.splitlines()) for name, text in _texts(root, folders)}, (), {})


def _texts(root: Path, folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    for path in (path for folder in folders for path in sorted((root / folder).rglob("*.py"))):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def read_tree(root: Path, folders: Sequence[str]) -> Tree:
    """Parse every Python file below ``folders`` of ``root``."""
    files: dict[str, int] = {}
    functions: list[Sized] = []
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in _texts(root, folders):
        files[name] = len(text.splitlines())
        for node in ast.walk(ast.parse(text, name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append(Sized(f"{name}:{node.name}", lines))
            elif isinstance(node, ast.ClassDef) and name != WIRE_MESSAGES:
                classes[node.name].append(name)
    return Tree(files, functions, classes)


def comment_share(root: Path, folders: Sequence[str]) -> float:
    """Share of all lines that are a comment for readers, and none for a tool."""
    num_lines = num_comments = 0
    for path in sorted(p for folder in folders for p in (root / folder).rglob("*.py")):
        with path.open("rb") as file:
            found = list(tokenize.tokenize(file.readline))
        num_lines += path.read_bytes().count(b"\n")
        num_comments += sum(
            token.type == tokenize.COMMENT
            and token.line.lstrip().startswith("#")
            and not token.string.startswith(_OF_TOOLS)
            for token in found
        )
    return num_comments / num_lines if num_lines else 0.0


def num_contracts(root: Path) -> int:
    """Contracts of imports in ``pyproject.toml``."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return len(tomllib.loads(text)["tool"]["importlinter"]["contracts"])


def facts(root: Path) -> dict[str, object]:
    """What ``python -m tests.project.structure`` prints of a checkout."""
    source, tests = read_tree(root, PACKAGES), read_tree(root, ["tests"])
    public, private = source.defined_twice(private=False), source.defined_twice(private=True)
    found: dict[str, object] = {}
    for name, tree in (("source", source), ("tests", tests)):
        found |= {
            f"{name}: files": len(tree.files),
            f"{name}: lines": sum(tree.files.values()),
            f"{name}: median file, lines": statistics.median(tree.files.values()),
            f"{name}: largest file, lines": str(tree.largest_files[0]),
            f"{name}: largest function, lines": str(tree.largest_functions[0]),
            f"{name}: files in the largest folder": str(tree.folders[0]),
        }
    classes = read_classes(root, PACKAGES)
    wide = [each for each in classes if len(each.attributes) > MOST_ATTRIBUTES]
    return found | {
        "source: lines that are comments, %": round(100 * comment_share(root, PACKAGES), 1),
        "public methods whose name 2 other classes have, %": round(
            100 * share_of_shared(classes), 1
        ),
        f"classes of more than {MOST_ATTRIBUTES} attributes": len(wide),
        "import contracts": num_contracts(root),
        "class names defined more than once, public": len(public),
        "class names defined more than once, private": len(private),
        "README.md, lines": len((root / "README.md").read_text(encoding="utf-8").splitlines()),
        "defined more than once": {**public, **private},
    }


def violations(root: Path, goals: Goals = GOALS) -> list[str]:
    """Which goals a checkout misses: one line for each folder, file, function or name."""
    # Of tests, functions and classes have no limit: parsing them would take most of the time.
    source, tests = read_tree(root, PACKAGES), read_files(root, ["tests"])
    found = []
    for what, most, all_of_them in (
        ("files", goals.files_in_a_folder, [*source.folders, *tests.folders]),
        ("lines", goals.lines_of_a_file, [*source.largest_files, *tests.largest_files]),
        ("lines", goals.lines_of_a_function, source.largest_functions),
    ):
        found += [
            f"{each.name}: {each.size} {what}, at most {most}"
            for each in all_of_them
            if each.size > most
        ]
    for private in (False, True):
        for name, places in source.defined_twice(private).items():
            found.append(f"class {name}: defined in {', '.join(places)}")
    lines = len((root / "README.md").read_text(encoding="utf-8").splitlines())
    if lines > goals.lines_of_the_readme:
        found.append(f"README.md: {lines} lines, at most {goals.lines_of_the_readme}")
    return found
