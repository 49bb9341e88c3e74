"""A root of rows, and ``pdconn store`` to run on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdconn.tools.cli.main import main
from tests.tools.cli.store_command import CHAIN, Run
from tests.tools.cli.stored_rows import full, prompt, save, windows


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A prompt of five blocks that can be resumed at its end, and one whose beginning is gone."""
    path = tmp_path / "root"
    path.mkdir()
    save(path, [*full(CHAIN, range(5)), *windows(CHAIN, (3, 4))])
    save(path, full(prompt(2, 3), [2]))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def made(*words: str | Path) -> tuple[int, str, str]:
        code = main(["store", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return made
