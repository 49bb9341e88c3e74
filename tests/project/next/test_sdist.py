"""vLLM's own tests can be had out of its source distribution, and nothing of it runs."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.project.next.sdist import download, obtain
from tests.project.next.tree import NotHad

NAMES = ("tests/a/test_one.py", "tests/a/proxy.py")


def source(folder: Path, version: str = "9.9.0", **more: str) -> Path:
    """As vLLM's is, with a ``setup.py`` that must not run."""
    path = folder / f"vllm-{version}.tar.gz"
    files = {name: f"# {name}\n" for name in NAMES} | {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        "pyproject.toml": (
            '[build-system]\nrequires = ["cuda_tools"]\nbuild-backend = "setuptools.build_meta"\n'
        ),
        "setup.py": "raise SystemExit('setup.py ran')\n",
        **more,
    }
    with tarfile.open(path, "w:gz") as made:
        for name, text in files.items():
            info = tarfile.TarInfo(f"vllm-{version}/{name}")
            info.size = len(text)
            made.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip knows this folder and no index."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def test_files_come_as_they_are_and_no_code_of_the_distribution_runs(
    tmp_path: Path, no_index: Path
) -> None:
    made = source(no_index)
    found = obtain("9.9.0", NAMES, tmp_path / "kept")
    assert [path.read_text(encoding="utf-8") for path in found] == [f"# {name}\n" for name in NAMES]
    # Control: as pip does it by itself, it runs.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
    ended = subprocess.run(
        [*command, "--dest", str(tmp_path), str(made)], capture_output=True, text=True, check=False
    )
    assert "setup.py ran" in ended.stdout + ended.stderr


def test_what_was_had_once_is_not_fetched_again(tmp_path: Path, no_index: Path) -> None:
    source(no_index)
    first = obtain("9.9.0", NAMES, tmp_path / "kept")
    assert obtain("9.9.0", NAMES, tmp_path / "kept", fetch=offline) == first


def offline(version: str, folder: Path) -> None:
    raise NotHad(f"vllm=={version}: no network")


def nothing(version: str, folder: Path) -> None:
    return None


def without_a_file(version: str, folder: Path) -> None:
    with tarfile.open(folder / f"vllm-{version}.tar.gz", "w:gz"):
        pass


@pytest.mark.parametrize("fetch", [offline, nothing, without_a_file, download])
@pytest.mark.usefixtures("no_index")
def test_a_distribution_that_cannot_be_had_is_told_and_leaves_nothing(
    fetch: Any, tmp_path: Path
) -> None:
    with pytest.raises(NotHad):
        obtain("9.9.0", NAMES, tmp_path / "kept", fetch=fetch)
    assert list((tmp_path / "kept").iterdir()) == []
