"""``pdconn bench serve`` with engines of its own, as small as it goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdconn.tools.cli.main import main

WORDS = ["--model", "tiny", "--cores", "one-process", "--prompt", "200", "--output", "4"]
FEW = ["--requests", "3", "--rounds", "2", "--concurrency", "2"]


@pytest.mark.matrix
def test_it_starts_engines_measures_them_in_turns_and_finds_their_tokens_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    files = ["--directory", str(tmp_path / "lab"), "--json", str(out)]
    code = main(["bench", "serve", "--contestants", "pdconn,single", *WORDS, *FEW, *files])
    captured = capsys.readouterr()
    assert code == 0, captured
    assert "12 answers: none differs from that of single" in captured.out
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["reference"] == "single"
    pd, single = document["contestants"]
    assert (pd["contestant"], pd["failed"], pd["wrong"]) == ("pdconn", 0, 0)
    assert single["handover"] is None
    for turn in document["turns"]:
        assert turn["others"] is not None
        for reply in turn["replies"]:
            assert reply["tokens"] == 4
            if turn["contestant"] == "pdconn":
                assert 0 < reply["handover_s"] < reply["arrivals_s"][0]
