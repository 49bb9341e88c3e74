"""The recorded events: every index finds what the caches held, and a broken one is noticed."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from pdconn.router.prefix.compiled import extension
from tests.throughput.index.__main__ import (
    NAMES,
    RIVAL_VARIABLE,
    held_blocks,
    main,
    requests_of,
)
from tests.throughput.index.ours import PlainDict, made
from tests.throughput.index.recording import Fleet, Step, save, steps
from tests.throughput.index.replay import Row, fill, look_up

FLEET = Fleet(pods=4, num_blocks=1500)


@pytest.fixture(scope="module")
def recorded() -> list[Step]:
    return list(steps(requests_of(None, 120), FLEET))


@pytest.fixture
def rows(recorded: list[Step], tmp_path: Path) -> list[Row]:
    save(recorded, tmp_path / "steps")
    found: list[Row] = pickle.loads((tmp_path / "steps").read_bytes())
    return found


def test_the_record_has_hits_evictions_and_pods_that_share_blocks(recorded: list[Step]) -> None:
    assert sum(max(step.matches.values(), default=0) for step in recorded) > 1000
    assert sum(step.removed[0] for step in recorded) > 1000
    assert any(len(step.matches) > 1 for step in recorded)
    assert held_blocks(recorded, windows=False) <= FLEET.pods * FLEET.num_blocks


@pytest.fixture(autouse=True)
def compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes in Python switch the compiled one off, each in a process of its own."""
    monkeypatch.setattr(extension, "module", extension.module)


@pytest.mark.parametrize("name", ["full", "python-full", "dict"])
def test_an_index_finds_what_the_caches_held(name: str, rows: list[Row]) -> None:
    found = look_up(made(name, FLEET.pods), rows)
    assert (found["wrong"], found["shorter"]) == (0, 0)
    assert fill(made(name, FLEET.pods), rows)["ops"] == sum(row[6][0] for row in rows)


def test_windows_only_shorten_matches(rows: list[Row]) -> None:
    found, in_python = (
        look_up(made(name, FLEET.pods), rows) for name in ("windows", "python-windows")
    )
    assert found["wrong"] == in_python["wrong"] == 0
    assert 0 < found["shorter"] == in_python["shorter"] < len(rows)


def test_an_index_that_ignores_removals_is_noticed(rows: list[Row]) -> None:
    class Keeping(PlainDict):
        def apply_batch(self, pod: int, payload: bytes) -> None:
            if b'"removed"' not in payload:
                super().apply_batch(pod, payload)

    assert look_up(Keeping(FLEET.pods), rows)["wrong"] > 0


def test_an_index_that_has_not_applied_the_last_batch_is_refused(rows: list[Row]) -> None:
    last = [row for row in rows if row[5]][-1][5][-1]

    class Late(PlainDict):
        def apply_batch(self, pod: int, payload: bytes) -> None:
            if payload is not last:
                super().apply_batch(pod, payload)

    with pytest.raises(SystemExit, match="not seen"):
        fill(Late(FLEET.pods), rows)


def test_the_program_prints_a_row_for_each_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rival where an environment of it is named."""
    monkeypatch.delenv("PDCONN_MOONCAKE_TRACE", raising=False)
    out = tmp_path / "index.json"
    words = ["--requests", "60", "--pods", "4", "--blocks", "1500", "--rounds", "1", "--json"]
    assert main([*words, str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["index"]
    expected = [key for key in NAMES if key != "dynamo" or RIVAL_VARIABLE in os.environ]
    assert [row["name"] for row in rows] == [NAMES[key] for key in expected]
    assert all(row["wrong"] == 0 and row["kops_s"] > 0 for row in rows)
    assert NAMES["windows"] in capsys.readouterr().out
