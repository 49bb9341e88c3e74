"""A forked command is to itself, to its keeper and to us what a started one is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.lab.process import Process
from tests.forked.engines import ForkedProcess
from tests.forked.server import variables_read


class ForkedSample(ForkedProcess):
    """:mod:`tests.forked.sample`, forked from a process that has imported what it imports."""

    module = "tests.forked.sample"
    preloaded = ("tests.forked.sample_import",)


def sample(log: Path, *words: str, kind: type[Process] = ForkedSample, **env: str) -> Process:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", ForkedSample.module, *words]
    return kind("sample", command, log, env={**inherited, **env})


def wait_until(true: Callable[[], object]) -> None:
    give_up = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.02)


def found(process: Process, lines: int = 2) -> dict[str, Any]:
    """What it found itself to be."""
    wait_until(lambda: process.log.read_text(encoding="utf-8").count("\n") >= lines)
    return dict(json.loads(process.log.read_text(encoding="utf-8").splitlines()[0]))


def is_alive(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


@pytest.mark.parametrize("kind", [ForkedSample, Process])
def test_it_has_arguments_environment_session_and_files_of_its_own(
    tmp_path: Path, kind: type[Process]
) -> None:
    with sample(tmp_path / "log", "sleep", "--then", kind=kind, FORKED_OWN="mine") as process:
        seen = found(process)
        assert seen["arguments"] == ["sleep", "--then"]
        assert seen["own"] == "mine"
        assert seen["session"] == seen["pid"] == process.pid
        assert seen["input"] == ""
        assert seen["handler"]
        assert process.tail().splitlines()[1:] == ["said in passing"]
        assert os.path.isdir(seen["temporary"])
    assert not os.path.isdir(seen["temporary"])
    ended = process.end_all()
    assert (ended.exit_code, ended.killed) == (-signal.SIGTERM, ())
    assert process.ended() is ended


def test_what_was_imported_is_not_imported_anew_and_yet_each_draws_other_numbers(
    tmp_path: Path,
) -> None:
    with (
        sample(tmp_path / "one", "sleep") as one,
        sample(tmp_path / "two", "sleep") as two,
        sample(tmp_path / "started", "sleep", kind=Process) as started,
    ):
        first, second, other = found(one), found(two), found(started)
    assert first["imported by"] == second["imported by"] not in (first["pid"], second["pid"])
    assert first["random"] != second["random"]
    assert first["frozen"] > 0, "no collection looks through what was imported"
    assert first["temporary"] != second["temporary"]
    assert other["imported by"] == other["pid"], "control: a started one imports for itself"
    assert other["frozen"] == 0


def test_a_variable_that_imports_read_makes_it_start_as_others_do(tmp_path: Path) -> None:
    with (
        sample(tmp_path / "same", "sleep", FORKED_OWN="other") as same,
        sample(tmp_path / "differs", "sleep", FORKED_SETTING="some") as differs,
    ):
        assert found(same)["imported with"] == "none"
        assert found(differs)["imported with"] == "some"
        assert isinstance(same, ForkedProcess)
        assert isinstance(differs, ForkedProcess)
        assert (same.forked, differs.forked) == (True, False)


def test_variables_are_noted_whether_they_are_there_or_not(monkeypatch: Any) -> None:
    monkeypatch.setenv("FORKED_THERE", "1")
    with variables_read() as names:
        os.environ.get("FORKED_THERE")
        os.getenv("FORKED_ABSENT")
    os.getenv("FORKED_LATER")
    assert {name for name in names if name.startswith("FORKED")} == {
        "FORKED_THERE",
        "FORKED_ABSENT",
    }


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("exit", 7, "said at the end"),
        ("exit with words", 1, "no such port"),
        ("raise", 1, "ValueError"),
    ],
)
@pytest.mark.parametrize("kind", [ForkedSample, Process])
def test_its_exit_status_and_last_words_are_seen(
    tmp_path: Path, how: str, code: int, last: str, kind: type[Process]
) -> None:
    with sample(tmp_path / "log", how, kind=kind) as process:
        wait_until(process.ended)
        ended = process.ended()
    assert ended is not None
    assert ended.exit_code == code
    assert last in process.tail(1)


def test_what_it_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    with sample(tmp_path / "log", "leave a child") as process:
        wait_until(process.ended)
    child = int(process.log.read_text(encoding="utf-8").splitlines()[2])
    assert not is_alive(child)


def test_a_killed_one_and_a_killed_keeper_are_gone(tmp_path: Path) -> None:
    with sample(tmp_path / "one", "sleep") as process:
        found(process)
        assert process.kill_command().exit_code == -signal.SIGKILL
    with sample(tmp_path / "two", "sleep") as process:
        found(process)
        process._keeper.kill()
        wait_until(lambda: not is_alive(process.pid))
        assert process.end_all().exit_code is None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_the_process_that_asked_for_it(
    tmp_path: Path, how: signal.Signals
) -> None:
    starter = f"""
import pathlib, time
from tests.forked import engines
from tests.forked.test_forked import sample
process = sample(pathlib.Path({str(tmp_path / "log")!r}), "sleep")
[server] = engines._servers.values()
print(process.pid, process._keeper.pid, server._process.pid, process.forked, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        *pids, forked = parent.stdout.readline().split()
        parent.send_signal(how)
    assert forked == b"True"
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids))
