"""``pdconn bench serve --target`` against fake services, and its options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.cli.main import main
from pdconn.tools.lab.ports import free_ports
from tests.fakes.openai_server import MODEL, FakeServer, serving

SMALL = ["--prompt", "20", "--output", "4", "--requests", "3", "--rounds", "2"]
PATIENT = ["--ttft-bound", "60000", "--itl-bound", "60000"]


@pytest.fixture
def one() -> Iterator[FakeServer]:
    with serving() as server:
        yield server


@pytest.fixture
def two() -> Iterator[FakeServer]:
    with serving() as server:
        yield server


def serve(*servers: FakeServer | str, more: list[str] | None = None) -> int:
    urls = [server if isinstance(server, str) else _with_admin(server) for server in servers]
    options = [f"--target={name}={url}" for name, url in zip(("one", "two"), urls, strict=False)]
    return main(["bench", "serve", *options, *SMALL, *PATIENT, *(more or [])])


def _with_admin(server: FakeServer) -> str:
    """As ``--target`` names a service whose requests are explained, if this one explains any."""
    return server.url if server.route is None else f"{server.url},admin={server.url}"


def measured(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    return {one["contestant"]: one for one in document["contestants"]}


def test_equal_services_are_asked_the_same_in_turns_and_found_equal(
    one: FakeServer, two: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert serve(one, two, more=["--json", str(out)]) == 0
    output = capsys.readouterr()
    assert "12 answers: none differs from that of one" in output.out
    assert "round 2 of 2: two: 3 requests" in output.err
    assert [asked["prompt"] for asked in one.asked] == [asked["prompt"] for asked in two.asked]
    assert {(asked["model"], asked["temperature"]) for asked in one.asked} == {(MODEL, 0.0)}
    document = json.loads(out.read_text(encoding="utf-8"))
    assert [(turn["round"], turn["contestant"]) for turn in document["turns"]] == [
        (1, "one"),
        (1, "two"),
        (2, "two"),
        (2, "one"),
    ]
    assert document["manifest"]["machine"]["cores"]
    for summary in document["contestants"]:
        assert (summary["requests"], summary["met"], summary["failed"]) == (6, 6, 0)
        assert summary["goodput_per_s"] == summary["throughput_per_s"] > 0
        assert summary["handover"] is None
        assert 0 < summary["ttft"]["p50_s"] <= summary["ttft"]["p99_s"]


def test_wrong_tokens_end_with_1_and_are_named(
    one: FakeServer, two: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two.wrong_from = len(SMALL)  # somewhere in its second turn
    out = tmp_path / "out.json"
    assert serve(one, two, more=["--json", str(out)]) == 1
    wrong = measured(out)["two"]["wrong"]
    assert 0 < wrong < 6
    assert measured(out)["two"]["met"] == 6 - wrong
    assert measured(out)["one"]["wrong"] == 0
    output = capsys.readouterr()
    assert f"12 answers: {wrong} differ from those of one" in output.out
    assert output.err.count("two: token 1: expected") == wrong


@pytest.mark.parametrize("ends_early", [False, True])
def test_a_server_that_fails_half_way_is_counted_and_the_rest_is_measured(
    one: FakeServer, two: FakeServer, tmp_path: Path, ends_early: bool
) -> None:
    two.breaks_from, two.ends_early = 4, ends_early
    out = tmp_path / "out.json"
    assert serve(one, two, more=["--json", str(out)]) == 1
    found = measured(out)
    assert 0 < found["two"]["failed"] < 6
    assert found["two"]["met"] == 6 - found["two"]["failed"]
    assert (found["one"]["failed"], found["one"]["wrong"], found["two"]["wrong"]) == (0, 0, 0)


def test_a_reference_that_fails_leaves_answers_unchecked(
    one: FakeServer, two: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    one.refuses_from = 4
    assert serve(one, two) == 1
    output = capsys.readouterr()
    assert "could not be compared: one did not answer" in output.out
    assert "no more" in output.err


def test_a_target_that_is_not_there_is_named(
    one: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    assert serve(one, url) == 1
    assert f"two at {url}:" in capsys.readouterr().err.splitlines()[-1]
    assert serve(url, more=["--model", "m"]) == 1
    assert f"one at {url}:" in capsys.readouterr().err.splitlines()[-1]


def test_a_target_that_answers_nothing_is_given_up_at_once(
    one: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    one.refuses_from = 0
    assert serve(one) == 1
    assert "no more" in capsys.readouterr().err
    assert len(one.asked) < 6, "none of the requests that count was sent"


def test_a_service_without_models_or_ids_is_measured_by_its_text(
    one: FakeServer, two: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    one.models = []
    one.tells_ids = False
    assert serve(one) == 1
    assert "one at" in (error := capsys.readouterr().err)
    assert "--model" in error
    assert serve(one, two, more=["--model", "m"]) == 0
    assert one.asked[-1]["model"] == two.asked[-1]["model"] == "m"
    two.wrong_from = len(two.asked)
    assert serve(one, two, more=["--model", "m"]) == 1
    assert "two: character" in capsys.readouterr().err


def test_a_router_is_asked_what_its_handovers_took(
    one: FakeServer, two: FakeServer, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    one.route = {"ticket_ms": 100.0, "first_byte_ms": 25.0}
    two.route = {"ticket_ms": None, "first_byte_ms": 25.0}  # decode served it alone
    assert serve(one, two, more=["--json", str(out)]) == 0
    found = measured(out)
    assert found["one"]["handover"]["p50_s"] == one.route["first_byte_ms"] / 1000
    assert found["two"]["handover"] is None


def test_bounds_that_no_request_meets_leave_no_goodput(one: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert serve(one, more=["--ttft-bound", "0.000001", "--json", str(out)]) == 0
    assert (measured(out)["one"]["met"], measured(out)["one"]["goodput_per_s"]) == (0, 0.0)


def test_json_on_standard_output_is_nothing_but_json(
    one: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(one, more=["--json", "-", "--rate", "200"]) == 0
    document = json.loads(capsys.readouterr().out)
    began = [reply["began_s"] for reply in document["turns"][0]["replies"]]
    assert began == sorted(began)
    assert began[0] == 0.0
    assert document["plan"]["rate"] == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "rounds: expected at least 1"),
        (["--rate", "-1"], "rate: expected more than 0"),
        (["--ttft-bound", "0"], "ttft-bound: expected more than 0"),
        (["--itl-bound", "nan"], "itl-bound: expected more than 0"),
        (["--contestants", "pdcon"], "contestants: expected single, in-tree, in-tree-tuned"),
        (["--contestants", "single,single"], "contestants: expected at least one, each once"),
        (["--contestants", ","], "contestants: expected at least one"),
        (["--model", "gpt-5"], "model: expected tiny, handover, or a --target"),
        (["--prompt", "4090"], "prompt and output: expected at most 4096"),
        (["--target", "http://a:1"], "target: expected NAME=http://HOST:PORT"),
        (["--target", "a=http://[abc"], "target: expected NAME=http://HOST:PORT"),
        (["--target", "a=ftp://a"], "target: expected NAME=http://HOST:PORT"),
        (["--target", "a=http://a", "--target", "a=http://b"], "a twice"),
    ],
)
def test_options_that_make_no_case_end_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["bench", "serve", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
