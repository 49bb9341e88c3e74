"""``pdconn store`` as an operator runs it: what it lists, and what it refuses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec import structs

from pdconn.store.budget.accounts import Accounts
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.tools.cli.main import main
from tests.tools.cli.store_command import CHAIN, FA_NBYTES, WA_NBYTES, Run, asked, files
from tests.tools.cli.stored_rows import BLOCK, NAMESPACE, file_of, full, prompt, save, windows

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


def test_what_is_kept_for_sessions_is_counted_and_shown_as_such(root: Path, run: Run) -> None:
    rows, now = [*full(CHAIN, range(2)), windows(CHAIN, [3])[0]], time.time()
    assert asked(run, "stat", root)["kept"] == {"rows": 0, "bytes": 0}
    with FilesShelf(root) as shelf:
        shelf.touch(NAMESPACE, rows, now + 3600)
        shelf.touch(NAMESPACE, full(CHAIN, [2]), now + 1e8)  # as of a damaged file
    (one,) = asked(run, "ls", root)
    assert one["kept"] == {"bytes": 2 * FA_NBYTES + WA_NBYTES}
    assert asked(run, "stat", root)["kept"] == {"rows": 3, "bytes": 2 * FA_NBYTES + WA_NBYTES}
    assert run("ls", root, "--rows")[1].count("kept ") == 3


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


def test_an_empty_root_has_no_rows_and_is_sound(tmp_path: Path, run: Run) -> None:
    FilesShelf(tmp_path).close()
    assert run("ls", tmp_path)[:2] == (0, "no rows\n")
    assert asked(run, "ls", tmp_path, "--rows") == []
    assert asked(run, "stat", tmp_path)["wa_share"] is None
    assert run("verify", tmp_path)[0] == 0
    assert run("drop", tmp_path, "--all", "--yes")[:2] == (0, "removed 0 of 0 rows, 0 B\n")


# Errors


@pytest.mark.parametrize("what", ["ls", "stat", "verify", "drop"])
def test_what_is_no_root_is_refused_and_left_alone(what: str, tmp_path: Path, run: Run) -> None:
    more = ["--all", "--yes"] if what == "drop" else []
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x", encoding="utf-8")
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
    (root / "format").write_text("pdconn store, version 99\n", encoding="utf-8")
    code, _, err = run("verify", root, "--drop-bad")
    assert code == 2
    assert "version 99" in err


@pytest.mark.parametrize("what", ["ls", "stat", "verify", "drop"])
def test_help_has_examples(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["store", what, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"pdconn store {what} /mnt/kv" in text


def test_a_key_of_the_wrong_parent_is_not_reached(root: Path, run: Run) -> None:
    """Negative control of the chains: the index alone does not make a prefix."""
    stranger = structs.replace(full(CHAIN, [5])[0], parent=prompt(3, 6).keys[4])
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
    text = path.read_text(encoding="utf-8")
    assert old in text
    assert field not in run("verify", root)[1]
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert run("ls", root)[0] == 0
    assert f"{field}: expected a number above 0" in run("verify", root)[1]


def test_an_unknown_namespace_is_answered_with_those_that_there_are(root: Path, run: Run) -> None:
    code, _, error = run("ls", root, "--namespace", "zzz")
    assert code == 2
    assert f"known namespaces: {NAMESPACE}" in error
