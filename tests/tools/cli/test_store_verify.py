"""``pdconn store verify`` finds every damaged row, and removes no other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdconn.store.format.row import RowName
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.store_errors import RowMissing, ShelfFailure
from tests.tools.cli.store_command import CHAIN, FA_NBYTES, Run, asked, files, flip
from tests.tools.cli.stored_rows import LAYOUT, NAMESPACE, file_of, full


def test_rows_that_are_whole_are_good(root: Path, run: Run) -> None:
    found = asked(run, "verify", root)
    assert found["counts"]["good"]["rows"] == 8
    assert found["bad"] == found["warnings"] == []


def _swap(path: Path) -> None:
    other = next(one for one in path.parents[1].rglob("*.*.*") if one != path)
    path.write_bytes(other.read_bytes())


def _cut(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


SLABS = [slab.offset for slab in LAYOUT.fa.slabs]
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"slab {number}": (lambda path, at=at: flip(path, at + 5), f"slab {number} (")
        for number, at in enumerate(SLABS)
    },
    "last byte of a slab": (
        lambda path: flip(path, SLABS[2] + LAYOUT.fa.slabs[2].nbytes - 1), "slab 2 (",
    ),
    "checksum": (lambda path: flip(path, LAYOUT.fa.data_nbytes), "footer: its checksum differs"),
    "tail": (lambda path: flip(path, -30), "footer: expected"),
    "another row": (_swap, "name: expected"),
    "a page cut": (lambda path: _cut(path, 4096), "footer: expected"),
    "a byte cut": (lambda path: _cut(path, 1), "row: expected whole pages"),
    "empty": (lambda path: path.write_bytes(b""), "row: expected whole pages"),
    "zeros": (lambda path: path.write_bytes(bytes(FA_NBYTES)), "footer: expected"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_only_damaged_rows_are_removed(what: str, root: Path, run: Run) -> None:
    damage, why = DAMAGE[what]
    path = file_of(root, full(CHAIN, [3])[0])
    damage(path)
    before = files(root)
    found = asked(run, "verify", root, code=1)
    (bad,) = found["bad"]
    assert (bad["kind"], bad["index"], bad["state"]) == ("fa", 3, "damaged")
    assert why in bad["why"]
    assert files(root) == before
    code, text, _ = run("verify", root, "--drop-bad")
    assert code == 1
    assert why in text
    assert "removed 1 damaged rows" in text
    assert files(root) == before - {path}
    assert run("verify", root)[0] == 0


def test_without_a_layout_footers_alone_are_checked_and_that_is_said(root: Path, run: Run) -> None:
    """The first half is a negative control: slabs are found out by their checksums alone."""
    (root / "rows" / NAMESPACE / "layout.json").unlink()
    row, other = (file_of(root, name) for name in full(CHAIN, (2, 3)))
    flip(row, 5)
    code, text, _ = run("verify", root)
    assert code == 0
    assert f"warning: namespace {NAMESPACE}: no layout.json; only footers were checked" in text
    assert "8 footer good" in text
    flip(other, -30)
    assert asked(run, "verify", root, code=1)["counts"]["damaged"]["rows"] == 1


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"fa": 1}'])
def test_a_broken_layout_is_said_and_footers_are_checked(text: bytes, root: Path, run: Run) -> None:
    (root / "rows" / NAMESPACE / "layout.json").write_bytes(text)
    found = asked(run, "verify", root)
    assert "layout.json: expected the layout of rows" in found["warnings"][0]
    assert found["counts"]["footer_good"]["rows"] == 8


def test_a_layout_of_other_rows_damns_no_row(root: Path, run: Run) -> None:
    fewer = LAYOUT.fa.sections[0].layers[:1]
    other = replace_layers(fewer)
    (root / "rows" / NAMESPACE / "layout.json").write_bytes(other)
    before = files(root)
    found = asked(run, "verify", root, "--drop-bad")
    assert found["counts"]["footer_good"]["rows"] == 6
    assert found["counts"]["good"]["rows"] == 2
    assert files(root) == before


def replace_layers(layers: Sequence[Any]) -> bytes:
    import msgspec

    section = msgspec.structs.replace(LAYOUT.fa.sections[0], layers=tuple(layers))
    fa = msgspec.structs.replace(LAYOUT.fa, sections=(section,))
    return msgspec.structs.replace(LAYOUT, fa=fa).encoded()


def test_a_row_that_cannot_be_read_is_bad_and_stays(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = FilesShelf.read

    def failing(self: FilesShelf, namespace: str, name: RowName, ranges: Any) -> None:
        if name.index == 4:
            raise ShelfFailure("cannot read it: EIO")
        reads(self, namespace, name, ranges)

    monkeypatch.setattr(FilesShelf, "read", failing)
    before = files(root)
    found = asked(run, "verify", root, "--drop-bad", code=1)
    assert found["counts"]["unreadable"]["rows"] == 2
    assert found["dropped"]["rows"] == 0
    assert files(root) == before


def test_a_row_that_is_evicted_meanwhile_is_not_bad(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: FilesShelf, namespace: str, name: RowName, ranges: Any) -> None:
        raise RowMissing("gone")

    monkeypatch.setattr(FilesShelf, "read", gone)
    assert asked(run, "verify", root)["counts"]["gone"]["rows"] == 8


def test_rows_larger_than_what_is_read_at_once_are_checked_whole(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdconn.store.verify._AT_ONCE", 8192)
    assert run("verify", root)[0] == 0
    flip(file_of(root, full(CHAIN, [0])[0]), SLABS[-1])
    assert asked(run, "verify", root, code=1)["counts"]["damaged"]["rows"] == 1
