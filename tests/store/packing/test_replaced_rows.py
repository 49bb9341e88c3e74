"""A packed row that is evicted and saved anew while it is read is not taken for a damaged one."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdconn.store.format.row import RowName
from pdconn.store.rank import packed_shares
from pdconn.store.shelf.files_shelf import FilesShelf
from tests.store.encryption.key_files import KEYS, key_file
from tests.store.packing.engines import (
    ALL,
    LOADED,
    NONE,
    SOME,
    found,
    model,
    rows_of,
    saved,
    settings,
)

FORMS = {"fits now": (NONE, ALL), "fits in part": (SOME, NONE)}
"""Heads that fit in the row that is replaced, and in the one that takes its place."""


def swapping(patch: pytest.MonkeyPatch, root: Path, other: Path, behind: int) -> Counter[RowName]:
    """Replace each row once it was read so often by the other root's; returns reads by row."""
    reads, read = Counter[RowName](), FilesShelf.read

    def reading(self: FilesShelf, namespace: str, name: RowName, ranges: Sequence[Any]) -> None:
        try:
            read(self, namespace, name, ranges)
        finally:
            reads[name] += 1
            if reads[name] == behind:
                path = self._row(namespace, name)
                assert path is not None
                within = Path(path).relative_to(root)
                new = root / f"new {threading.get_ident()}"
                shutil.copyfile(other / within, new)
                os.replace(new, path)

    patch.setattr(FilesShelf, "read", reading)
    return reads


def loaded(
    tmp_path: Path, patch: pytest.MonkeyPatch, forms: str, behind: int, *, is_sealed: bool
) -> tuple[int, int]:
    """Tokens that are loaded of rows that are replaced behind so many reads; rows of the root."""
    key = key_file(tmp_path / "keys", KEYS[0]) if is_sealed else None
    before, after = (settings(tmp_path / name, key_file=key) for name in ("before", "after"))
    for given, fitting in zip((before, after), FORMS[forms], strict=True):
        saved(given, model(fitting))
    root = tmp_path / "before"
    with patch.context() as patched:
        reads = swapping(patched, root, tmp_path / "after", behind)
        tokens = found(before, model(FORMS[forms][1]))
    assert max(reads.values()) >= behind, "rows were replaced while they were read"
    return tokens, len(rows_of(root))


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("behind", [1, 2])
@pytest.mark.parametrize("forms", FORMS)
def test_a_row_that_is_saved_anew_while_it_is_read_is_loaded(
    forms: str, behind: int, is_sealed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, _ = loaded(tmp_path, monkeypatch, forms, behind, is_sealed=is_sealed)
    assert tokens == LOADED


def test_a_reader_that_looks_once_takes_it_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(packed_shares, "_TRIES", 1)
    tokens, _ = loaded(tmp_path, monkeypatch, "fits now", 1, is_sealed=False)
    assert tokens < LOADED
