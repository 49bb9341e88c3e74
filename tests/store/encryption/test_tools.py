"""``pdconn store`` on an encrypted root: it lists, trims and finds accidents without a key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.store.format.footer import decode_footer, encode_footer
from pdconn.store.format.row import ALIGNMENT
from pdconn.tools.cli.main import main
from tests.store.encryption.engines import on_files, rows_of, saved
from tests.store.encryption.key_files import KEYS, key_file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    saved(on_files(tmp_path / "root", key_file(tmp_path / "keys", KEYS[0])))
    return tmp_path / "root"


def verified(
    capsys: pytest.CaptureFixture[str], root: Path, *words: str
) -> tuple[int, dict[str, int], list[str]]:
    """Exit code, rows by state, warnings."""
    code = main(["store", "verify", str(root), "--json", *words])
    document = json.loads(capsys.readouterr().out)
    rows = {state: one["rows"] for state, one in document["counts"].items() if one["rows"]}
    return code, rows, document["warnings"]


def test_with_its_key_every_row_is_good_and_without_one_the_report_says_what_is_not_known(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = len(rows_of(root))
    assert verified(capsys, root, "--key-file", str(tmp_path / "keys")) == (0, {"good": count}, [])
    code, rows, (warning,) = verified(capsys, root)
    assert (code, rows) == (0, {"encrypted": count})
    assert "give --key-file" in warning
    other = key_file(tmp_path / "other", KEYS[1])
    code, rows, (warning,) = verified(capsys, root, "--key-file", other)
    assert (code, rows) == (0, {"encrypted": count})
    assert "other keys" in warning


def test_an_accident_is_found_without_a_key_and_a_forgery_with_it_alone(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, other = [path for path in rows_of(root) if path.parent.parent.name == "fa"][:2]
    data = row.read_bytes()
    flipped = bytearray(data)
    flipped[5] ^= 1
    row.write_bytes(flipped)
    assert verified(capsys, root)[:2] == (1, {"damaged": 1, "encrypted": len(rows_of(root)) - 1})
    # Another row's bytes and seals with this row's name, and checksums that are sound.
    stolen = other.read_bytes()
    footer, ours = decode_footer(stolen), decode_footer(data)
    forged = encode_footer(replace(footer, name=ours.name, tokens=ours.tokens))
    row.write_bytes(stolen[: footer.data_nbytes] + forged)
    assert len(forged) % ALIGNMENT == 0
    code, rows, _ = verified(capsys, root)
    assert (code, rows) == (0, {"encrypted": len(rows_of(root))})
    code, rows, _ = verified(capsys, root, "--key-file", str(tmp_path / "keys"), "--drop-bad")
    assert code == 1
    assert rows["damaged"] == 1
    assert not row.exists()


def test_a_wrong_key_drops_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rows_of(root)
    other = key_file(tmp_path / "other", KEYS[1])
    assert verified(capsys, root, "--key-file", other, "--drop-bad")[0] == 0
    assert rows_of(root) == before


def test_listing_and_removing_need_no_key(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "ls", str(root), "--json"]) == 0
    (namespace,) = json.loads(capsys.readouterr().out)
    assert namespace["namespace"].startswith("sealed-")
    assert namespace["rows_not_reached"] == 0
    assert namespace["longest_resumable_tokens"] == 256
    assert main(["store", "drop", str(root), "--all", "--yes"]) == 0
    assert rows_of(root) == []


def test_a_key_file_that_cannot_be_used_is_a_bad_option(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "verify", str(root), "--key-file", str(tmp_path / "none")]) == 2
    assert "--key-file: expected a readable file" in capsys.readouterr().err
