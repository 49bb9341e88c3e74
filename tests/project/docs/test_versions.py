"""``make docs-version``: a site for each release on one branch, in a repository of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.docs.generate import ROOT

pytest.importorskip("mike")

BIN = Path(sys.executable).parent
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
WHO = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The documentation with what builds it, committed."""
    for name in ("Makefile", "mkdocs.yml", "requirements.txt", "pyproject.toml", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", symlinks=True)
    (tmp_path / ".gitignore").write_text(".work/\n.venv\n", encoding="utf-8")
    (tmp_path / ".venv").symlink_to(BIN.parent)  # whatever its path, make sees one without spaces
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*GIT, *words], cwd=tmp_path, check=True, timeout=30)
    return tmp_path


def deployed(clone: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    """The target, with this interpreter's environment taken as installed."""
    return subprocess.run(
        ["make", "-o", ".venv/.installed", "docs-version", *variables],
        cwd=clone, env={**os.environ, **WHO},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def shown(clone: Path, path: str) -> str:
    """A file of the branch."""
    done = subprocess.run(
        ["git", "show", f"gh-pages:{path}"], cwd=clone, capture_output=True, text=True, check=True,
        timeout=30,
    )  # fmt: skip
    return done.stdout


def test_two_releases_keep_a_site_each_and_the_latest_is_the_default(clone: Path) -> None:
    first = deployed(clone, "VERSION=0.1")
    assert first.returncode == 0, first.stderr
    page = clone / "docs/faq.md"
    page.write_text(page.read_text(encoding="utf-8") + "\nNew in the second.\n", encoding="utf-8")
    second = deployed(clone, "VERSION=0.2")
    assert second.returncode == 0, second.stderr
    versions = {one["version"]: one["aliases"] for one in json.loads(shown(clone, "versions.json"))}
    assert versions == {"0.1": [], "0.2": ["latest"]}
    pages = {version: shown(clone, f"{version}/faq.html") for version in ("0.1", "0.2", "latest")}
    assert "New in the second." not in pages["0.1"]
    assert "New in the second." in pages["0.2"]
    assert pages["latest"] == pages["0.2"]
    assert "latest/" in shown(clone, "index.html")
    assert shown(clone, "0.1/images/architecture-dark.svg").startswith("<svg")
    assert "version-select" in shown(clone, "0.1/js/version-select.js"), "the menu of versions"


def test_a_release_without_a_name_or_with_a_broken_link_is_refused(clone: Path) -> None:
    """Negative control."""
    unnamed = deployed(clone)
    assert unnamed.returncode == 2
    assert "expected VERSION=0.1" in unnamed.stderr
    with (clone / "docs/faq.md").open("a", encoding="utf-8") as page:
        page.write("\n[gone](gone.md)\n")
    broken = deployed(clone, "VERSION=0.1")
    assert broken.returncode == 2
    assert "gone.md" in broken.stderr + broken.stdout
