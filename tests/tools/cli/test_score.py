"""``pdconn score``: a decision in a file, explained; bad files are refused by field."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.cli.main import main

FULL = {"kind": "full_attention", "window": None, "block_tokens": 16}
WINDOW = {"kind": "sliding_window", "window": 32, "block_tokens": 16}

SNAPSHOT: dict[str, Any] = {
    "version": 1,
    "hash_block_tokens": 16,
    "weights": {"gpu": 1.0, "cpu": 0.8},
    "pods": {
        "warm": {
            "groups": {"0": FULL, "1": WINDOW},
            "blocks": [
                {"group": 0, "medium": "gpu", "hashes": [1, 2, 3]},
                {"group": 1, "medium": "gpu", "hashes": [2, 3]},
            ],
        },
        "evicted": {
            "groups": {"0": FULL, "1": WINDOW},
            "blocks": [
                {"group": 0, "medium": "gpu", "hashes": [1, 2, 3]},
                {"group": 1, "medium": "gpu", "hashes": [1, 2]},
            ],
        },
        "offloaded": {
            "groups": {},
            "blocks": [{"group": None, "medium": "cpu", "hashes": [1, 2]}],
        },
    },
    "request": {"hashes": [1, 2, 3], "num_tokens": 48},
}


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def asked(snapshot: object, *words: str) -> tuple[int, str, str]:
        path = tmp_path / "snapshot.json"
        path.write_text(
            snapshot if isinstance(snapshot, str) else json.dumps(snapshot), encoding="utf-8"
        )
        code = main(["score", *words, str(path)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return asked


def test_every_pod_is_scored_as_computed_by_hand(ask: Any) -> None:
    code, out, _ = ask(SNAPSHOT, "--json")
    assert code == 0
    explained = json.loads(out)
    numbers = {
        name: (pod["hit_blocks"], pod["hit_tokens"], pod["score"])
        for name, pod in explained.items()
    }
    # A window of 32 needs ceil(31 / 16) = 2 blocks. The engine computes token 47 anyway, so
    # ``warm`` may end at 32 or before; there its window would need block 0, which is gone.
    assert numbers == {
        "warm": (3, 0, 3.0),
        "evicted": (2, 32, 2.0),
        "offloaded": (2, 32, 1.6),
    }
    assert explained["warm"]["cut_by"] is None
    assert explained["evicted"]["cut_by"]["group"] == 1
    assert explained["evicted"]["cut_by"]["missing_block"] == 2
    assert explained["offloaded"]["cut_by"]["kind"] == "full_attention"
    assert explained["offloaded"]["cut_by"]["missing_token"] == 32


def test_the_table_shows_the_best_first_and_the_group_that_cut(ask: Any) -> None:
    code, out, _ = ask(SNAPSHOT)
    assert code == 0
    heading, *rows = out.splitlines()
    names = "pod hit_blocks stored hit_tokens score may_pull cut_by"
    assert heading.split() == names.split()
    assert [row.split()[0] for row in rows] == ["warm", "evicted", "offloaded"]
    assert "group 1 (sliding_window): a hit that ends at token 48 needs blocks 1 to 2" in rows[1]


def test_who_could_pull_from_whom_is_shown(ask: Any) -> None:
    """From the pod that holds most in its memory; stored blocks are not lent."""
    snapshot = deepcopy(SNAPSHOT)
    stored = {"group": 0, "medium": "storage", "hashes": [1, 2, 3]}
    snapshot["pods"]["cold"] = {"groups": {"0": FULL}, "blocks": [{**stored, "hashes": [1]}]}
    snapshot["pods"]["store"] = {"groups": {"0": FULL}, "blocks": [stored]}
    snapshot["request"]["num_tokens"] = 49  # so that a hit of all three blocks is one
    _, out, _ = ask(snapshot, "--json")
    pulls = {name: pod["may_pull"] for name, pod in json.loads(out).items()}
    assert pulls == {
        "warm": None,
        "evicted": {"pod": "warm", "tokens": 16},
        "offloaded": {"pod": "warm", "tokens": 16},
        "cold": {"pod": "warm", "tokens": 48},
        "store": {"pod": "warm", "tokens": 48},
    }
    _, out, _ = ask(snapshot)
    (row,) = [line for line in out.splitlines() if line.startswith("cold")]
    assert "48 of warm" in row
    del snapshot["pods"]["warm"]
    _, out, _ = ask(snapshot, "--json")
    # "evicted" and "offloaded" hold two blocks; the one block of "cold" is in a store.
    assert json.loads(out)["cold"]["may_pull"] == {"pod": "evicted", "tokens": 32}


def _with(path: str, value: object) -> dict[str, Any]:
    changed = deepcopy(SNAPSHOT)
    *way, last = path.split("/")
    place: Any = changed
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    place[last] = value
    return changed


@pytest.mark.parametrize(
    ("snapshot", "field", "expected", "seen"),
    [
        ("{", "snapshot", "JSON", "1 bytes"),
        ("[]", "snapshot", "version 1", "array"),
        ({}, "snapshot", "version 1", "missing required field `version`"),
        (_with("version", 2), "version", "1", "2"),
        (_with("hash_block_tokens", 0), "hash_block_tokens", "version 1", ">= 1"),
        (_with("request/hashes", ["a"]), "request.hashes[0]", "version 1", "got `str`"),
        (_with("pods/warm/more", 1), "pods[...]", "version 1", "unknown field `more`"),
        (_with("pods/warm/groups/x", FULL), "pods.warm.groups.x", "the index of a group", "'x'"),
        (
            _with("pods/warm/groups/0", {**FULL, "kind": "fuzzy"}),
            "pods.warm.groups.0.kind",
            "one of full_attention",
            "'fuzzy'",
        ),
        (
            _with("pods/warm/groups/0", {**FULL, "block_tokens": 24}),
            "pods.warm.groups.0.block_tokens",
            "a multiple of hash_block_tokens (16)",
            "24",
        ),
        (_with("weights", {"gpu": -1}), "weights[...]", "version 1", ">= 0"),
    ],
)
def test_a_bad_snapshot_ends_with_2_and_names_the_field(
    ask: Any, snapshot: object, field: str, expected: str, seen: str
) -> None:
    code, out, err = ask(snapshot)
    assert (code, out) == (2, "")
    assert err.startswith(f"pdconn score: {field}: expected {expected}")
    assert seen in err
    assert err.count("\n") == 1


def test_a_missing_file_ends_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["score", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.endswith("none.json: No such file or directory\n")


def test_the_example_in_the_checkout_is_scored(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "examples" / "snapshot.json"
    assert main(["score", "--json", str(example)]) == 0
    explained = json.loads(capsys.readouterr().out)
    hits = {name: (pod["hit_tokens"], pod["score"]) for name, pod in explained.items()}
    # Blocks of 16: four, two behind which the window still has both its blocks, three at 0.8.
    assert hits["warm"] == (64, 4.0)
    assert hits["window-evicted"] == (32, 2.0)
    assert hits["offloaded"] == (48, pytest.approx(2.4))
