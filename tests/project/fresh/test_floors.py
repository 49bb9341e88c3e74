"""pdconn runs with the oldest dependencies that it allows, beside those of vLLM 0.32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.structure.test_dependencies import ROOT, floors_of_users

NEEDED = (
    "tests/protocol/test_protocol.py", "tests/protocol/test_auth.py",
    "tests/router/prefix", "tests/router/handover/test_handover.py",
    "tests/router/operations/test_admin.py", "tests/router/test_metrics.py",
)  # fmt: skip
"""Tests that use each of them, and neither vLLM nor torch."""
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis", "trustme", "packaging", "pyyaml")


def pip(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_the_floors_are_enough(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True, timeout=300)
    python = tmp_path / "bin/python"
    if pip(python, "index", "versions", "aiohttp").returncode:
        pytest.skip("no package index is reached from here")
    floors = [f"{name}=={version}" for name, version in floors_of_users().items()]
    done = pip(python, "install", "--quiet", *floors, *FOR_TESTS)
    assert done.returncode == 0, done.stderr[-2000:]
    listed = pip(python, "freeze").stdout.lower().replace("_", "-").splitlines()
    assert {floor for floor in floors if floor not in listed} == set()
    ran = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not matrix and not engine",
         *NEEDED],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False, timeout=800,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:]


def test_what_the_floors_are_tried_with_is_there() -> None:
    assert [name for name in NEEDED if not (ROOT / name).exists()] == []
