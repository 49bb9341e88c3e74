"""What the documentation names is there: links, files, messages; and MkDocs builds it."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.project.docs.generate import DOCS, ROOT
from tests.project.docs.pages import every_page, links, prose, spans

_PATH = re.compile(r"(?:pdconn|transport|registration|tests|docker|examples|docs)/[\w./-]*\w")
_MODULE = re.compile(r"python -m (tests[\w.]*)")
_METRIC = re.compile(r"\b(?:pdconn:\w+|vllm:nixl_\w+|pdconn_(?:proxy|router)_\w*[^\W_])")
_LEAST = 6
"""Letters of a message's piece that are worth looking for."""
_OLDER_NAME = re.compile(r"\bPdConnector\b")
_SAYS_THE_OLDER_NAME = {
    "docs/configuration.md",
    "docs/other-routers.md",  # what Dynamo takes it for
    "docs/behind/dynamo.md",
    "pdconn/vllm/__init__.py",
    "pdconn/vllm/connector.py",
    "pdconn/vllm/nixl/connector_registry.py",
}


@pytest.mark.parametrize("page", every_page(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [target for target in links(page) if _is_broken(page, target)] == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    """Negative control."""
    page = tmp_path / "page.md"
    page.write_text(
        "[a](page.md) [b](gone.md) [c](page.md#gone) [d](https://example.org)\n\n# A b\n",
        encoding="utf-8",
    )
    assert [one for one in links(page) if _is_broken(page, one)] == ["gone.md", "page.md#gone"]
    assert not _is_broken(page, "#a-b")


@pytest.mark.parametrize("page", every_page(), ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {word for span in spans(text) for word in _PATH.findall(span)}
    gone = [name for name in sorted(named) if not (ROOT / name).exists() and "NAME" not in name]
    assert not gone, "\n".join(gone)
    modules = {name.rstrip(".") for name in _MODULE.findall(text)}
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []


def test_the_older_name_of_the_connector_is_said_where_it_is_explained_only() -> None:
    """Users see one name; what says the other is listed, and says it."""
    folders = (ROOT / name for name in ("docs", "examples", "docker", "pdconn"))
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    shown = [path for path in files if path.suffix in (".md", ".py", ".yaml", ".yml", ".sh")]
    seen = {
        path.relative_to(ROOT).as_posix()
        for path in shown
        if not path.is_symlink() and _OLDER_NAME.search(path.read_text(encoding="utf-8"))
    }
    assert seen == _SAYS_THE_OLDER_NAME


def test_messages_to_look_up_are_messages_of_the_code() -> None:
    text = prose(DOCS / "troubleshooting.md").partition("## By message")[2]
    assert len(list(_quoted(text))) > 50
    unsaid = _unsaid(text)
    assert not unsaid, "\n".join(unsaid)


def test_a_message_that_nothing_says_is_noticed() -> None:
    """Negative control."""
    assert _unsaid("| `pdconn: pull of … failed: …: the dog ate it` | a |\n") == ["the dog ate it"]
    assert _unsaid("| `kv_connector_extra_config: expected a known key` | a | b |\n") == []


@pytest.mark.parametrize("page", every_page(), ids=lambda page: page.name)
def test_metrics_that_are_named_exist(page: Path) -> None:
    assert sorted(_metrics(page.read_text(encoding="utf-8")) - _exported()) == []


def test_a_metric_that_nothing_exports_is_noticed() -> None:
    """Negative control."""
    text = "rate(pdconn:pulls_total[5m]), `pdconn:pulls`, pdconn_proxy_requests_sum, `pdconn: pull`"
    assert _metrics(text) - _exported() == {"pdconn:pulls", "pdconn_proxy_requests_sum"}


def test_mkdocs_builds_without_a_warning(tmp_path: Path) -> None:
    assert _build(DOCS, tmp_path / "site") == ""
    assert (tmp_path / "site/security.html").is_file()
    assert "kv_lease_duration" in (tmp_path / "site/configuration.html").read_text(encoding="utf-8")


def test_mkdocs_refuses_a_broken_link(tmp_path: Path) -> None:
    """Negative control."""
    shutil.copytree(DOCS, tmp_path / "docs")
    with (tmp_path / "docs/index.md").open("a") as page:
        page.write("\n[gone](gone.md)\n")
    assert "gone.md" in _build(tmp_path / "docs", tmp_path / "site")


def _is_broken(page: Path, target: str) -> bool:
    if "://" in target:
        return False
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    if not path.exists():
        return True
    return bool(anchor) and anchor not in _anchors(path)


def _anchors(path: Path) -> set[str]:
    """The ids that MkDocs and GitHub give to headings."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {
        re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", one.lower())).strip("-") for one in headings
    }


def _build(docs: Path, site: Path) -> str:
    """What MkDocs complains of; nothing where all is well."""
    config = site.parent / "mkdocs.yml"
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config.write_text(
        re.sub(r"^docs_dir: .*$", f"docs_dir: {docs}", text, flags=re.MULTILINE), encoding="utf-8"
    )
    words = ["build", "--strict", "-f", str(config), "-d", str(site)]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    warnings = [line for line in done.stderr.splitlines() if not line.startswith("INFO ")]
    assert (done.returncode == 0) == (not warnings), done.stderr
    return "\n".join(warnings)


def _metrics(text: str) -> set[str]:
    return set(_METRIC.findall(text))


def _exported() -> set[str]:
    """Series of the generated tables, which other tests hold to the code."""
    rows = re.findall(
        r"^\| `([\w:]+)` \| (counter|gauge|histogram) ",
        (DOCS / "metrics.md").read_text(encoding="utf-8"),
        re.M,
    )
    series = {name for name, _ in rows}
    for name, kind in rows:
        if kind == "histogram":
            series |= {f"{name}_{suffix}" for suffix in ("bucket", "sum", "count")}
    return series


def _quoted(text: str) -> Iterator[str]:
    """The pieces of messages in the first column of tables."""
    for line in text.splitlines():
        if line.startswith("|"):
            for span in spans(line.split("|")[1]):
                # A FieldError puts its parts together: "field: expected this, got that".
                parts = re.split(r"…|%[sdg]|: expected |, got ", span)
                pieces = (piece.strip(" :,.") for piece in parts)
                yield from (piece for piece in pieces if len(piece) >= _LEAST)


def _unsaid(text: str) -> list[str]:
    in_code = _code_strings()
    return [piece for piece in _quoted(text) if piece not in in_code]


@cache
def _code_strings() -> str:
    """Every string of the code, an f-string in one piece with its values left out."""
    parts = []
    for package in ("pdconn", "transport", "registration"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    words = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                    parts.append("".join(map(str, words)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    parts.append(node.value)
    return "\n".join(parts)
