"""Tests in folders of other names, for users without a home, and in another locale.

A clone is called ``pdconn``, people's folders have spaces and letters of their language, and a
server may have neither a home nor a locale.  Every other run of the suite is in the checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.fresh.clean import copy_tree

ROOT = Path(__file__).parents[3]

LOOKED_AT = (
    "tests/tools/cli", "tests/tools/doctor", "tests/project/fresh", "tests/tools/lab",
    "tests/store/shelves", "tests/project/structure",
)  # fmt: skip
"""Rooms that start processes, read files of the checkout, or print paths."""

ASCII = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
"""Python takes the text of files for ASCII; torch cannot be imported then, commands without can."""

PLACES = {
    "pdconn": {"LC_ALL": "POSIX"},
    "pd conn π": {
        "HOME": "/nonexistent", "LC_ALL": "C.UTF-8", "http_proxy": "http://127.0.0.1:9",
        "TMPDIR": "{folder}",
    },
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PLACES)
def test_a_checkout_may_have_any_name_and_its_user_any_locale(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    copy_tree(ROOT, folder)
    more = {key: value.format(folder=tmp_path) for key, value in PLACES[name].items()}
    ended = _tests_in(
        folder,
        more,
        *LOOKED_AT,
        "-m",
        "not (engine or multinode or ucx or matrix or compose)",
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    assert " passed" in ended.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--model", "gemma-3-27b", "--prompt", "32768"),
        ("score", "examples/snapshot.json"),
        ("proxy", "--help"),
        ("doctor", "--help"),
    ],
    ids=lambda words: words[0],
)
def test_commands_work_where_text_is_ascii(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pdconn.tools.cli.main", *words]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ASCII}, check=False, capture_output=True
    )
    assert ended.returncode == 0, ended.stderr.decode(errors="replace")


def test_a_test_that_fails_elsewhere_is_seen(tmp_path: Path) -> None:
    """The control: a test that depends on its folder's name fails in another."""
    folder = tmp_path / "π"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests/test_it.py").write_text(
        "from pathlib import Path\n\ndef test_it():\n    assert Path.cwd().name == 'pdconn'\n",
        encoding="utf-8",
    )
    assert _tests_in(folder, {}, "tests/test_it.py").returncode == 1


def _tests_in(folder: Path, more: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """pytest's end, run in ``folder`` by this interpreter: the packages there come first."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **more}, check=False, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
