"""The demo's table, its verdict and its refusal; that it works is shown by running it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.multinode import demo
from tests.multinode.demo import Outcome, Row, main, render

_ROWS = [
    Row("p1", "10.213.0.11", "prefill", 1_500_000, 3, 0, 0),
    Row("d1", "10.213.0.21", "decode", 2_500_000, 0, 3, 2_000_000),
]


def outcome(*wrong: str) -> Outcome:
    return Outcome(_ROWS, 3, 990, 10, list(wrong))


def ran(monkeypatch: pytest.MonkeyPatch, seen: Outcome) -> None:
    monkeypatch.setattr(demo, "why_not", lambda: None)
    monkeypatch.setattr(demo, "run", lambda *_: seen)


def test_every_machine_has_a_line_with_its_address() -> None:
    lines = render(outcome()).splitlines()
    assert lines[3].split() == ["p1", "10.213.0.11", "prefill", "1.500", "3", "0", "0.000"]
    assert lines[4].split() == ["d1", "10.213.0.21", "decode", "2.500", "0", "3", "2.000"]
    assert lines[-1].startswith("3 of 3 answers")
    assert "10 of 1000 packets" in lines[-1]


def test_a_wrong_answer_is_reported_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(monkeypatch, outcome("7 tokens: token differs"))
    assert main([]) == 1
    captured = capsys.readouterr()
    assert "2 of 3 answers" in captured.out
    assert "token differs" in captured.err


def test_it_can_be_read_by_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(monkeypatch, outcome())
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["address"] for row in report["rows"]] == ["10.213.0.11", "10.213.0.21"]


def test_where_no_network_can_be_made_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "why_not", lambda: "no root")
    assert main(["--directory", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == "multinode: no root\n"
    assert not (tmp_path / "new").exists()
