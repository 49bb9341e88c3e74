"""``pdconn store``, run in this process on rows of a small model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdconn.store.format.footer import row_nbytes
from tests.tools.cli.stored_rows import LAYOUT, prompt

assert LAYOUT.wa is not None
FA_NBYTES, WA_NBYTES = row_nbytes(LAYOUT.fa), row_nbytes(LAYOUT.wa)
CHAIN = prompt(1, 6)

Run = Callable[..., tuple[int, str, str]]


def asked(run: Run, *words: str | Path, code: int = 0) -> Any:
    """What ``--json`` prints."""
    found, out, _ = run(*words, "--json")
    assert found == code
    return json.loads(out)


def files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
