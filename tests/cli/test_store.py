"""``pdconn store``, as an operator runs it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdconn.cli.main import main
from pdconn.store.budget.accounts import Accounts
from pdconn.store.errors import RowMissing, ShelfFailure
from pdconn.store.format.footer import row_nbytes
from pdconn.store.format.names import RowKind, RowName
from pdconn.store.shelf.files import FilesShelf
from tests.cli.stored_rows import BLOCK, LAYOUT, NAMESPACE, file_of, full, prompt, save, windows

assert LAYOUT.wa is not None
FA_NBYTES, WA_NBYTES = row_nbytes(LAYOUT.fa), row_nbytes(LAYOUT.wa)
CHAIN = prompt(1, 6)
DAY_S = 86400.0

Run = Callable[..., tuple[int, str, str]]


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


def asked(run: Run, *words: str | Path, code: int = 0) -> Any:
    """What ``--json`` prints."""
    found, out, _ = run(*words, "--json")
    assert found == code
    return json.loads(out)


def files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


# Listings


def test_a_namespace_is_counted_and_its_prefixes_are_followed(root: Path, run: Run) -> None:
    (one,) = asked(run, "ls", root)
    assert one["namespace"] == NAMESPACE
    assert one["fa"] == {"rows": 6, "bytes": 6 * FA_NBYTES}
    assert one["wa"] == {"rows": 2, "bytes": 2 * WA_NBYTES}
    assert one["block_tokens"] == BLOCK
    assert one["longest_prefix_tokens"] == one["longest_resumable_tokens"] == 5 * BLOCK
    assert one["rows_not_reached"] == 1
    assert one["oldest_use"] <= one["newest_use"] <= time.time() + 1


def test_a_boundary_without_all_its_windows_cannot_be_resumed(root: Path, run: Run) -> None:
    file_of(root, windows(CHAIN, [3])[0]).unlink()
    (one,) = asked(run, "ls", root)
    assert one["longest_prefix_tokens"] == 5 * BLOCK
    assert one["longest_resumable_tokens"] == 0


def test_a_gap_ends_a_prefix_and_what_follows_is_not_reached(root: Path, run: Run) -> None:
    file_of(root, full(CHAIN, [1])[0]).unlink()
    (one,) = asked(run, "ls", root)
    assert one["longest_prefix_tokens"] == BLOCK
    assert one["rows_not_reached"] == 1 + 3 + 2


def test_without_a_layout_tokens_come_from_a_footer(root: Path, run: Run) -> None:
    (root / "rows" / NAMESPACE / "layout.json").unlink()
    (one,) = asked(run, "ls", root)
    assert one["longest_prefix_tokens"] == 5 * BLOCK
    assert one["longest_resumable_tokens"] is None
    assert " ? " in run("ls", root)[1]


def test_rows_are_listed_in_order_with_the_bytes_of_their_files(root: Path, run: Run) -> None:
    rows = asked(run, "ls", root, "--rows")
    assert [(row["kind"], row["index"]) for row in rows] == [
        *[("fa", index) for index in (0, 1, 2, 2, 3, 4)],
        *[("wa", index) for index in (3, 4)],
    ]
    for row in rows:
        parent = bytes.fromhex(row["parent"] or "00" * 16)
        name = RowName(RowKind(row["kind"]), bytes.fromhex(row["key"]), parent, row["index"])
        assert file_of(root, name).stat().st_size == row["bytes"]
    text = run("ls", root, "--rows")[1]
    assert all(row["key"] in text for row in rows)


def test_a_namespace_can_be_picked(root: Path, run: Run) -> None:
    save(root, full(CHAIN, range(2)), namespace="other")
    assert [one["namespace"] for one in asked(run, "ls", root)] == [NAMESPACE, "other"]
    (one,) = asked(run, "ls", root, "--namespace", "other")
    assert one["fa"]["rows"] == 2
    assert len(asked(run, "ls", root, "--rows", "--namespace", "other")) == 2


def test_totals_shares_and_rows_being_written_are_shown(root: Path, run: Run) -> None:
    with FilesShelf(root) as shelf:
        shelf.begin("boot-1", "7-0", FA_NBYTES)
        shelf.put_note("boot-1", "7-0", 0, b"")
    found = asked(run, "stat", root)
    assert found["fa"] == {"rows": 6, "bytes": 6 * FA_NBYTES}
    assert found["wa_share"] == 2 * WA_NBYTES / (6 * FA_NBYTES + 2 * WA_NBYTES)
    assert found["writers"] == {"boot-1": {"rows": 1, "bytes": FA_NBYTES}}
    text = run("stat", root)[1]
    assert "boot-1" in text
    assert f"{100 * found['wa_share']:.1f} %" in text


def test_the_budget_is_what_the_accounts_say(root: Path, run: Run) -> None:
    assert asked(run, "stat", root)["budget"] is None
    assert "no accounts" in run("stat", root)[1]
    accounts = Accounts(root, "boot-1", 1 << 30)
    with FilesShelf(root) as shelf:
        accounts.recount(shelf)
    assert accounts.reserve(1 << 20) == 1 << 20
    before = files(root)
    assert asked(run, "stat", root)["budget"] == {
        "capacity_bytes": 1 << 30,
        "committed_bytes": 6 * FA_NBYTES + 2 * WA_NBYTES,
        "wa_bytes": 2 * WA_NBYTES,
        "reserved_bytes": 1 << 20,
        "writers": 1,
    }
    assert "1.00 MiB reserved of 1.00 GiB" in run("stat", root)[1]
    assert files(root) == before
    accounts.close()


def test_removed_rows_are_free_for_engines_at_once(root: Path, run: Run) -> None:
    accounts = Accounts(root, "boot-1", 1 << 30)
    with FilesShelf(root) as shelf:
        accounts.recount(shelf)
    _flip(file_of(root, full(CHAIN, [4])[0]), 5)
    assert run("verify", root, "--drop-bad")[0] == 1
    assert accounts.usage().committed == 5 * FA_NBYTES + 2 * WA_NBYTES
    assert run("drop", root, "--all", "--yes")[0] == 0
    usage = accounts.usage()
    assert (usage.committed, usage.wa, usage.num_writers) == (0, 0, 1)
    accounts.close()


def test_an_empty_root_has_no_rows_and_is_sound(tmp_path: Path, run: Run) -> None:
    FilesShelf(tmp_path).close()
    assert run("ls", tmp_path)[:2] == (0, "no rows\n")
    assert asked(run, "ls", tmp_path, "--rows") == []
    assert asked(run, "stat", tmp_path)["wa_share"] is None
    assert run("verify", tmp_path)[0] == 0
    assert run("drop", tmp_path, "--all", "--yes")[:2] == (0, "removed 0 of 0 rows, 0 B\n")


# Verification


def test_rows_that_are_whole_are_good(root: Path, run: Run) -> None:
    found = asked(run, "verify", root)
    assert found["counts"]["good"]["rows"] == 8
    assert found["bad"] == found["warnings"] == []


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def _swap(path: Path) -> None:
    other = next(one for one in path.parents[1].rglob("*.*.*") if one != path)
    path.write_bytes(other.read_bytes())


def _cut(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


SLABS = [slab.offset for slab in LAYOUT.fa.slabs]
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"slab {number}": (lambda path, at=at: _flip(path, at + 5), f"slab {number} (")
        for number, at in enumerate(SLABS)
    },
    "last byte of a slab": (
        lambda path: _flip(path, SLABS[2] + LAYOUT.fa.slabs[2].nbytes - 1), "slab 2 (",
    ),
    "checksum": (lambda path: _flip(path, LAYOUT.fa.data_nbytes), "footer: its checksum differs"),
    "tail": (lambda path: _flip(path, -30), "footer: expected"),
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
    _flip(row, 5)
    code, text, _ = run("verify", root)
    assert code == 0
    assert f"warning: namespace {NAMESPACE}: no layout.json; only footers were checked" in text
    assert "8 footer good" in text
    _flip(other, -30)
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
    _flip(file_of(root, full(CHAIN, [0])[0]), SLABS[-1])
    assert asked(run, "verify", root, code=1)["counts"]["damaged"]["rows"] == 1


# Removal


def test_without_yes_nothing_is_removed(root: Path, run: Run) -> None:
    before = files(root)
    for words in (["--all"], ["--namespace", NAMESPACE], ["--older", "0s"]):
        code, out, err = run("drop", root, *words)
        assert (code, out.split(",")[0]) == (2, "would remove 8 rows")
        assert "add --yes" in err
    assert files(root) == before


def test_a_namespace_is_removed_and_the_other_stays(root: Path, run: Run) -> None:
    kept = save(root, full(CHAIN, range(2)), namespace="other")
    code, out, _ = run("drop", root, "--namespace", NAMESPACE, "--yes")
    assert (code, out.split(",")[0]) == (0, "removed 8 of 8 rows")
    assert [one["namespace"] for one in asked(run, "ls", root)] == ["other"]
    assert all(path.is_file() for path in kept)


def test_nothing_but_rows_is_removed(root: Path, run: Run) -> None:
    folder = file_of(root, full(CHAIN, [0])[0]).parent
    for path in (folder / "notes.txt", root / "mine", root / "rows/x", root / "rows" / NAMESPACE):
        (path / "mine" if path.is_dir() else path).write_text("keep me")
    (folder / "link").symlink_to(root / "mine")
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("keep me")
    (root / "rows" / "linked").symlink_to(outside)
    with FilesShelf(root) as shelf:
        shelf.begin("boot-1", "7-0", FA_NBYTES)
        rows = {file_of(root, row.name) for row in shelf.rows()}
    before = files(root)
    assert run("drop", root, "--all", "--yes")[0] == 0
    assert files(root) == before - rows
    assert (outside / "file").read_text() == "keep me"
    assert (folder / "link").is_symlink()


def test_old_rows_are_removed_unless_a_younger_one_depends_on_them(root: Path, run: Run) -> None:
    """The beginning of a prompt is as young as its end, though only the end was read."""
    now = time.time()
    for index in range(5):
        age = 9 * DAY_S if index != 3 else DAY_S / 2
        os.utime(file_of(root, full(CHAIN, [index])[0]), (now - age, now - age))
    for name in windows(CHAIN, (3, 4)):
        os.utime(file_of(root, name), (now - 9 * DAY_S,) * 2)
    found = asked(run, "drop", root, "--older", "7d", "--yes")
    left = asked(run, "ls", root, "--rows")
    assert [(row["kind"], row["index"]) for row in left] == [
        ("fa", 0), ("fa", 1), ("fa", 2), ("fa", 2), ("fa", 3),
    ]  # fmt: skip
    assert found["removed"]["rows"] == 3


def test_a_full_row_is_as_young_as_its_window(root: Path, run: Run) -> None:
    old = time.time() - 9 * DAY_S
    for name in [*full(CHAIN, range(5)), *windows(CHAIN, [3])]:
        os.utime(file_of(root, name), (old, old))
    assert asked(run, "drop", root, "--older", "36h", "--yes")["removed"]["rows"] == 1
    (one,) = asked(run, "ls", root)
    assert (one["longest_prefix_tokens"], one["wa"]["rows"]) == (5 * BLOCK, 1)


def test_older_and_namespace_are_both_obeyed(root: Path, run: Run) -> None:
    old = time.time() - 9 * DAY_S
    save(root, full(CHAIN, range(2)), namespace="other", used_at=old)
    words = ["--older", "7d", "--yes", "--namespace"]
    assert asked(run, "drop", root, *words, NAMESPACE)["removed"]["rows"] == 0
    assert asked(run, "drop", root, *words, "other")["removed"]["rows"] == 2


# Errors


@pytest.mark.parametrize("what", ["ls", "stat", "verify", "drop"])
def test_what_is_no_root_is_refused_and_left_alone(what: str, tmp_path: Path, run: Run) -> None:
    more = ["--all", "--yes"] if what == "drop" else []
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    for name, seen in (("gone", "no such folder"), ("file", "a file"), ("folder", "without a")):
        code, _, err = run(what, tmp_path / name, *more)
        assert code == 2
        assert f"pdconn store {what}: ROOT: expected the folder of a store, got" in err
        assert seen in err
        assert err.count("\n") == 1
    assert not (tmp_path / "gone").exists()
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["drop"], "rows to remove: expected --namespace, --older or --all, got none of them"),
        (["drop", "--all", "--older", "7d"], "--all: expected to stand alone"),
        (["drop", "--namespace", "", "--yes"], "namespace: expected one that has rows, got ''"),
        (["drop", "--namespace", "0a1b2d"], f"did you mean '{NAMESPACE}'?"),
        (["drop", "--namespace", ".."], "namespace: expected one that has rows, got '..'"),
        (["drop", "--older", "7"], "--older: expected a time such as 90s, 30m, 36h or 7d, got 7"),
        (["drop", "--older", "-7d"], None),
        (["drop", "--older", ""], "got nothing"),
        (["ls", "--namespace", "gone"], "namespace: expected one that has rows, got 'gone'"),
        (["verify", "--namespace", ""], "namespace: expected one that has rows, got ''"),
    ],
)
def test_bad_options_end_with_two_and_remove_nothing(
    words: list[str], message: str | None, root: Path, run: Run
) -> None:
    before = files(root)
    try:
        code, _, err = run(words[0], root, *words[1:])
    except SystemExit as end:
        assert message is None
        code, err = end.code, ""  # type: ignore[assignment]
    assert code == 2
    assert (message or "") in err
    assert files(root) == before


def test_a_root_of_another_version_is_refused(root: Path, run: Run) -> None:
    (root / "format").write_text("pdconn store, version 99\n")
    code, _, err = run("verify", root, "--drop-bad")
    assert code == 2
    assert "version 99" in err


def test_a_device_that_fails_ends_with_one(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: FilesShelf, namespace: str, name: RowName) -> int:
        raise ShelfFailure("cannot remove it: EROFS")

    monkeypatch.setattr(FilesShelf, "remove", failing)
    code, _, err = run("drop", root, "--all", "--yes")
    assert code == 1
    assert err == "pdconn store drop: cannot remove it: EROFS\n"


@pytest.mark.parametrize("what", ["ls", "stat", "verify", "drop"])
def test_help_has_examples(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["store", what, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"pdconn store {what} /mnt/kv" in text


def test_a_key_of_the_wrong_parent_is_not_reached(root: Path, run: Run) -> None:
    """Negative control of the chains: the index alone does not make a prefix."""
    stranger = replace(full(CHAIN, [5])[0], parent=prompt(3, 6).keys[4])
    save(root, [stranger])
    (one,) = asked(run, "ls", root)
    assert one["longest_prefix_tokens"] == 5 * BLOCK
    assert one["rows_not_reached"] == 2


# Files that no engine writes


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        (f'"block_tokens":{BLOCK}', '"block_tokens":0', "block_tokens"),
        ('"num_heads":2', '"num_heads":-2', "num_heads"),
        ('"unit_tokens":1', '"unit_tokens":0', "unit_tokens"),
        ('"first_head":0', '"first_head":-1', "first_head"),
    ],
)
def test_a_layout_of_numbers_that_cannot_be_is_named(
    old: str, new: str, field: str, root: Path, run: Run
) -> None:
    """They ended a listing in a traceback."""
    path = root / "rows" / NAMESPACE / "layout.json"
    text = path.read_text()
    assert old in text
    assert field not in run("verify", root)[1]
    path.write_text(text.replace(old, new, 1))
    assert run("ls", root)[0] == 0
    assert f"{field}: expected a number above 0" in run("verify", root)[1]


def test_an_unknown_namespace_is_answered_with_those_that_there_are(root: Path, run: Run) -> None:
    code, _, error = run("ls", root, "--namespace", "zzz")
    assert code == 2
    assert f"known namespaces: {NAMESPACE}" in error
