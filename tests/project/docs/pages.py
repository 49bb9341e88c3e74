"""Markdown pages as tests need them: fenced commands, links, code spans."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.project.docs.generate import DOCS, ROOT

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Command:
    """One shell command of a page, with the line breaks that its quotes hold."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """As a shell would split it."""
        return shlex.split(self.text.replace("\\\n", " "))

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.text.split())[:60]}"


def commands(path: Path) -> list[Command]:
    """The commands in the ``bash`` fences of a page."""
    found = []
    for fence in _FENCE.finditer(path.read_text(encoding="utf-8")):
        if fence["language"] == "bash":
            found += [Command(path.name, text) for text in _split(fence["text"])]
    return found


def _split(text: str) -> list[str]:
    """A fence's commands: a line goes on while a quote is open or it ends in a backslash."""
    whole, begun = [], ""
    for line in text.splitlines():
        begun += line
        if begun.count("'") % 2 or begun.endswith("\\"):
            begun += "\n"
        elif begun.strip():
            whole.append(begun.strip())
            begun = ""
    assert not begun, f"a command that does not end: {begun}"
    return whole


def prose(path: Path) -> str:
    """A page without its fences."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def links(path: Path) -> list[str]:
    """Where a page links to."""
    return [found["target"] for found in _LINK.finditer(prose(path))]


def spans(text: str) -> list[str]:
    """The code spans of a text."""
    return _SPAN.findall(text)


def every_page() -> list[Path]:
    """README, what lies beside it, and ``docs/`` with its folders; each file once."""
    beside = [ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md")]
    inside = [path for path in sorted(DOCS.rglob("*.md")) if not path.is_symlink()]
    folders = [ROOT / "docker/README.md", ROOT / "examples/kubernetes/README.md"]
    return [*beside, *folders, *inside]
