"""Mooncake's trace: the prompts made of its lines, and a tiny one replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdconn.tools.plan.store.curve import TracedRequest
from tests.throughput.mooncake.__main__ import main
from tests.throughput.mooncake.lines import ideal_reuse, prompt

pytest.importorskip("vllm.v1.core.kv_cache_manager")


def _line(**changed: object) -> str:
    fields = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
    return json.dumps(fields | changed)


def test_equal_ids_are_equal_tokens_and_others_differ() -> None:
    first, second = (prompt(TracedRequest(1000, 1, ids, 512), 32) for ids in ((0, 1), (0, 50_001)))
    assert len(first) == 63  # 62.5
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]


TINY = [
    TracedRequest(1024, 16, (0, 1), 512, 0.0),
    TracedRequest(1536, 16, (0, 1, 2), 512, 1.0),
    TracedRequest(1024, 16, (0, 1), 512, 2.0),
    TracedRequest(1024, 16, (3, 1), 512, 3.0),
]


def test_ideal_reuse_of_a_trace_by_hand() -> None:
    """None; two ids; two but for the last token; none, as the second id has no known prefix."""
    assert ideal_reuse(TINY, 32) == 0 + 64 + 63 + 0


def test_a_tiny_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, rows = tmp_path / "trace.jsonl", tmp_path / "rows.json"
    trace.write_text(
        "\n".join(
            _line(timestamp=1000 * one.at_s, input_length=one.num_tokens, hash_ids=one.ids)
            for one in TINY
        ),
        encoding="utf-8",
    )
    for _ in range(3):  # what an engine holds is known a little later, on a slow machine too late
        assert main(["--trace", str(trace), "--speed-up", "2", "--json", str(rows)]) == 0
        read = json.loads(rows.read_text(encoding="utf-8"))
        if read[1]["computed"] < read[2]["computed"]:
            break
    assert [row["policy"] for row in read] == ["prefix + pulls", "prefix", "round-robin"]
    for row in read:
        assert (row["requests"], row["prompt_tokens"]) == (4, 64 + 96 + 64 + 64)
        assert row["computed"] >= 64 + 32 + 1 + 64
    assert read[1]["computed"] < read[2]["computed"]
    assert "32 tokens for 512; each engine 3906 blocks" in capsys.readouterr().out


def test_no_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "got", "expected"),
    [
        ("--speed-up", "0", "more than 0"),
        ("--speed-up", "inf", "more than 0"),
        ("--requests", "-1", "more than 0"),
        ("--prefill-rate", "nan", "more than 0"),
        ("--cache-tokens", "1000", "at least"),
        ("--tokens-per-block", "24", "a multiple of 16"),
    ],
)
def test_what_makes_no_sense_is_refused(
    option: str, got: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(_line(timestamp=0, input_length=1024, hash_ids=[1, 2]), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["--trace", str(trace), option, got])
    assert f"{option}: expected {expected}" in capsys.readouterr().err


def test_a_file_that_is_no_text_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\xff\xfe{}")
    assert main(["--trace", str(trace)]) == 2
    assert str(trace) in capsys.readouterr().err
