"""``pdconn doctor`` as a user runs it: text, exit codes, a probe between two processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.cli.main import main
from pdconn.tools.doctor.diagnosis import Diagnosis
from pdconn.tools.doctor.findings import Checked, Finding, Severity, fault, note, warning
from pdconn.tools.doctor.probe import ProbeFacts, judge_probe, read_probe
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.plan.link import parse_link
from tests.fakes.event_loop import in_loop
from tests.tools.doctor.healthy import healthy

FAULT = fault("a.b", "one", "expected 1, got 2", "make it 1")
WARNING = warning("c.d", "two", "slow", "make it fast")
NOTE = note("e.f", "three", "odd", "look at it")


def test_only_faults_make_it_unhealthy_and_the_worst_come_first() -> None:
    calm = Diagnosis([Checked("x", ("seen",), (NOTE, WARNING))])
    assert calm.is_healthy
    assert [one.id for one in calm.findings] == ["c.d", "e.f"]
    ill = Diagnosis([*calm.checks, Checked("y", (), (FAULT,)), Checked("z", skipped="no")])
    assert not ill.is_healthy
    assert ill.findings[0] is FAULT
    assert [check.outcome for check in ill.checks] == ["warning", "fault", "skipped"]


def test_each_finding_is_a_line_and_a_remedy() -> None:
    text = Diagnosis([Checked("x", ("seen", "more"), (WARNING, FAULT))]).text()
    assert "fault    a.b: one: expected 1, got 2\nremedy   make it 1" in text
    assert "warning  c.d: two: slow\nremedy   make it fast" in text
    assert text.splitlines()[:2] == ["fault    x  seen", "            more"]
    assert text.endswith("not healthy: 1 checks, 0 skipped; 1 fault, 1 warning, 0 notes")


def test_a_finding_of_several_lines_is_refused_and_foreign_text_is_made_one() -> None:
    with pytest.raises(ValueError, match="single lines"):
        Finding("a", Severity.NOTE, "b", "two\nlines", "c")
    assert fault("a", "b", "two\nlines\x1b[0m", "c").message == "two lines [0m"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "{oops"], "--config: expected JSON"),
        (["--prefill", "localhost:8100"], "--prefill: expected http://HOST:PORT"),
        (["--fleet", "/nowhere/fleet.toml"], "/nowhere/fleet.toml: expected a file to read"),
        (["--prefill-channel", "p0"], "--prefill-channel: expected"),
        (["--golden"], "--golden: expected --prefill and --decode"),
        (["--golden", "--prefill", "http://a:1"], "beside it, got one of them"),
        (["--no-local"], "--no-local: expected engines"),
        (["--probe", "10.0.0.1"], "--probe: expected"),
        (["--no-local", "--probe", "127.0.0.1:1", "--link", "fast"], "link: expected"),
        (["--no-local", "--prefill", "http://a:1", "--api-key-file", "/nowhere"], "--api-key-file"),
        (["--serve", "192.0.2.1:7788"], "--serve: expected an address to listen at"),
    ],
)
def test_a_bad_question_ends_with_2_and_one_line(
    words: list[str], message: str, capsys: Any
) -> None:
    assert main(["doctor", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("pdconn doctor: ")
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


@in_loop
async def test_a_fleet_file_names_the_engines_and_text_says_what_was_seen(
    tmp_path: Path, capsys: Any
) -> None:
    import asyncio

    async with healthy(tmp_path) as pair:
        fleet = tmp_path / "fleet.toml"
        fleet.write_text(
            f'[[engine]]\nurl = "{pair.prefill.url}"\nroles = ["prefill"]\n'
            f'[[engine]]\nurl = "{pair.decode.url}"\nroles = ["decode"]\n',
            encoding="utf-8",
        )
        code = await asyncio.to_thread(main, ["doctor", "--no-local", "--fleet", str(fleet)])
    text = capsys.readouterr().out
    assert code == 0
    assert f"{pair.prefill.url} (prefill): vLLM 0.32.0, m of 4096 tokens" in text
    assert "skipped  events" in text
    assert "skipped  channels" in text
    assert text.rstrip().endswith("healthy: 2 checks, 2 skipped; 0 faults, 0 warnings, 0 notes")


@pytest.mark.parametrize(("tls", "named"), [("tcp", "tcp/lo"), ("self,sysv,cma,tcp", "cma/memory")])
def test_a_probe_reads_real_bytes_and_tells_by_which_transport(
    tls: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    (port,) = free_ports(1)
    serve = ["pdconn.tools.cli.main", "doctor", "--serve", f"127.0.0.1:{port}"]
    # A background job's children ignore SIGINT otherwise.
    command = ["env", "--default-signal=INT", sys.executable, "-m", *serve]
    steps: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as lender:
        try:
            assert lender.stdout is not None
            assert "listening" in lender.stdout.readline()
            facts = read_probe("127.0.0.1", port, steps.append, prompt_tokens=64)
        finally:
            lender.send_signal(signal.SIGINT)
            assert lender.wait(30) == 0
    assert facts.error is None
    assert facts.nbytes == 64 * 131072  # tokens by bytes a token of the model
    assert min(facts.pull_bytes_per_s, facts.read_bytes_per_s) > 0
    assert named in facts.used[0][0]
    assert facts.used[0][1] > 0
    assert any(re.match("round 3 of 3", step) for step in steps)


def test_a_probe_without_a_server_is_a_fault_and_a_slow_one_a_warning() -> None:
    (port,) = free_ports(1)
    unanswered = read_probe("127.0.0.1", port, lambda text: None)
    assert [one.id for one in judge_probe(unanswered)] == ["probe.failed"]
    facts = ProbeFacts("h:1", 1 << 28, pull_bytes_per_s=9e9, read_bytes_per_s=10e9)
    assert list(judge_probe(facts)) == []
    assert list(judge_probe(facts, parse_link("100Gb/s"))) == []
    assert [one.id for one in judge_probe(facts, parse_link("400Gb/s"))] == ["probe.link"]
    slow = ProbeFacts("h:1", 1 << 28, pull_bytes_per_s=4e9, read_bytes_per_s=10e9)
    assert [one.id for one in judge_probe(slow)] == ["probe.pull"]
