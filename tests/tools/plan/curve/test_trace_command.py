"""``pdconn plan --store --trace``, as a user runs it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from examples.mooncake_trace import requests
from pdconn.tools.cli.main import main
from pdconn.tools.cli.store import traced_store

WORDS = ["plan", "--model", "gpt-oss-20b", "--store", "--engine-cache", "8k"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in requests(120)), encoding="utf-8")
    return path


def run(capsys: Capture, *words: object, code: int = 0) -> str:
    assert main([*WORDS, *map(str, words)]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def document(capsys: Capture, *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *words, "--json"))["store_curve"]
    return found


def test_text_and_json_say_the_same(capsys: Capture, trace: Path) -> None:
    words = "--trace", trace, "--prefill-rate", "12000", "--capacities", "100MiB,400MiB,20GiB"
    text, found = run(capsys, *words), document(capsys, *words)
    tokens = sum(
        json.loads(line)["input_length"] for line in trace.read_text(encoding="utf-8").splitlines()
    )
    assert (found["requests"], found["prompt_tokens"]) == (120, tokens)
    assert f"120 requests, {tokens:,} prompt tokens" in text
    rows = [line.split() for line in text.splitlines() if line.count("iB ") == 1]
    rows = [row for row in rows if len(row) == 8]
    assert [f"{row[0]} {row[1]}" for row in rows] == ["100.00 MiB", "400.00 MiB", "20.00 GiB"]
    for row, point in zip(rows, found["capacities"], strict=True):
        assert row[2] == f"{100 * point['hit_share']:.1f}"
        assert row[3] == f"{point['hit_tokens']:,}"
        assert row[5] == f"{point['saved_s']:,.0f}"
        assert point["hit_share"] == point["hit_tokens"] / tokens
    shares = [point["hit_share"] for point in found["capacities"]]
    assert shares[0] < shares[2]


def test_usual_capacities_are_around_what_the_trace_takes(capsys: Capture, trace: Path) -> None:
    found = document(capsys, "--trace", trace)
    sizes = [point["bytes"] for point in found["capacities"]]
    factors = [b / a for a, b in pairwise(sizes)]
    assert len(sizes) == 8
    assert max(factors) / min(factors) < 1.001
    last = found["capacities"][-1]
    assert last["rows_evicted"] == 0, "the largest keeps everything"
    assert found["enough_bytes"] in sizes
    assert last["saved_s"] is None, "without --prefill-rate"


def test_answers_are_saved_where_the_store_saves_them(capsys: Capture, trace: Path) -> None:
    words = "--trace", trace, "--capacities", "20GiB", "--engine-cache", "0"
    (prompts,) = document(capsys, *words)["capacities"]
    (answers,) = document(capsys, *words, "--store-save", "all")["capacities"]
    assert answers["rows_saved"] > prompts["rows_saved"]
    assert answers["hit_tokens"] > prompts["hit_tokens"]


def test_several_processes_find_what_one_finds(
    capsys: Capture, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--trace", trace, "--capacities", "100MiB,200MiB,400MiB"
    alone = document(capsys, *words)
    monkeypatch.setattr(traced_store, "_ALONE_REQUESTS", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert document(capsys, *words) == alone


def test_the_picture_is_of_the_curve(capsys: Capture, trace: Path, tmp_path: Path) -> None:
    svg = tmp_path / "curve.svg"
    sizes = "--capacities", "100MiB,400MiB,1GiB"
    found = document(capsys, "--trace", trace, *sizes, "--svg", svg)
    root = ET.fromstring(svg.read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    dots = list(root.iter(f"{space}circle"))
    assert len(dots) == 3
    heights = [-float(one.attrib["cy"]) for one in dots]
    assert heights == sorted(heights)
    shares = [f"{100 * point['hit_share']:.1f} %" for point in found["capacities"]]
    said = ["".join(one.itertext()) for one in dots]
    assert all(share in text for share, text in zip(shares, said, strict=True))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--capacities", "1GiB,1GiB"], "--capacities: expected some, each larger"),
        (
            ["--capacities", "1GiB;2GiB"],
            "--capacities: expected sizes with commas between, each a size",
        ),
        (["--trace-requests", "-1"], "--trace-requests: expected a number"),
        (["--trace-block", "0"], "--trace-block: expected a number of tokens above 0"),
        (["--trace-block", "64"], "line 1 hash_ids: expected"),
        (["--store-fixed-ms", "-1"], "--store-fixed-ms: expected milliseconds"),
        (["--trace", "/nowhere"], "--trace: expected a file"),
    ],
)
def test_bad_options_are_named(capsys: Capture, trace: Path, words: list[str], says: str) -> None:
    told = run(capsys, "--trace", trace, *words, code=2)
    assert says in told
    assert ("line 1" in says) == (f"{trace} line" in told)


def test_a_trace_needs_a_store_and_a_request(capsys: Capture, trace: Path, tmp_path: Path) -> None:
    assert main(["plan", "--model", "gpt-oss-20b", "--trace", str(trace)]) == 2
    assert "--trace: expected --store beside it" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.touch()
    assert "expected a request with a whole block" in run(capsys, "--trace", empty, code=2)
