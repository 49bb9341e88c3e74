"""The kit's runner, with steps that are made up: limits, failures, and what is kept of them."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.kit.build import LIMIT_S, command_of
from tests.gpu.kit.run import PARTS, TOTAL_S, Step, environment, main, run_steps, steps_of

_WRITES = """
import json, sys, pathlib, time
path = pathlib.Path(sys.argv[sys.argv.index("--found") + 1])
path.write_text(json.dumps({"gb_s": 3}))
"""


def step(name: str, code: str, limit_s: float = 20.0) -> Step:
    """A step that runs Python code."""
    return Step(name, [sys.executable, "-c", _WRITES + code], limit_s)


def ran(tmp_path: Path, *steps: Step, total_s: float = 60.0) -> dict[str, dict[str, object]]:
    """Outcomes by name, as the file of results has them."""
    run_steps(steps, tmp_path, total_s, os.environ)
    results = json.loads((tmp_path / "results.json").read_text())
    return {one["step"]: one for one in results}


def test_a_step_that_fails_costs_only_itself(tmp_path: Path) -> None:
    found = ran(tmp_path, step("one", "sys.exit('no card')"), step("two", ""))
    assert found["one"]["state"] == "failed"
    assert found["two"]["state"] == "ok"
    assert "no card" in str(found["one"]["log"])
    assert found["two"]["log"] == ""


def test_a_step_that_takes_too_long_is_ended_and_keeps_what_it_found(tmp_path: Path) -> None:
    found = ran(tmp_path, step("slow", "time.sleep(60)", 1.0), step("next", ""))
    assert found["slow"]["state"] == "too long"
    assert found["slow"]["found"] == {"gb_s": 3}
    assert found["next"]["state"] == "ok"


def test_children_of_a_step_end_with_it_even_if_they_ignore_the_first_signal(
    tmp_path: Path,
) -> None:
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    code = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", {child!r}])
path.write_text(json.dumps({{"pid": child.pid}}))
time.sleep(60)
"""
    found = ran(tmp_path, step("parent", code, 2.0))
    pid = found["parent"]["found"]["pid"]  # type: ignore[index]
    until = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < until, "the child runs on"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether it is a process that is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_all_steps_together_keep_the_limit_and_the_rest_is_skipped(tmp_path: Path) -> None:
    began = time.monotonic()
    sleepers = [step(name, "time.sleep(60)", 50.0) for name in ("a", "b")]
    found = ran(tmp_path, *sleepers, total_s=6.0)
    assert time.monotonic() - began < 20
    assert found["a"]["state"] == "too long"
    assert str(found["b"]["state"]).startswith("skipped")


def test_a_step_that_writes_nothing_readable_has_found_nothing(tmp_path: Path) -> None:
    found = ran(tmp_path, step("torn", "path.write_text('{\"gb')"))
    assert found["torn"] | {"seconds": 0} == {
        "step": "torn",
        "state": "ok",
        "seconds": 0,
        "limit_s": 20.0,
        "found": {},
        "log": "",
    }


def test_the_limits_end_before_the_commands_own(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, tmp_path, "cuda")
    limits = {one.name: one.limit_s for one in steps}
    assert list(limits) == ["unpack", *PARTS[0], *PARTS[1]]
    for part in PARTS:
        assert limits["unpack"] + sum(limits[name] for name in part) <= TOTAL_S < LIMIT_S < 600
    commands = command_of(Path(".gpu-kit")).splitlines()
    assert all(one.startswith(f"timeout -k 5 {LIMIT_S} ") for one in commands)
    assert [one.rpartition(" ")[2].split(",") for one in commands] == [list(part) for part in PARTS]


def test_a_step_runs_where_no_checkout_comes_before_the_kit(tmp_path: Path) -> None:
    code = "import os; path.write_text(json.dumps({'at': os.getcwd()}))"
    assert ran(tmp_path, step("where", code))["where"]["found"] == {"at": str(tmp_path)}


def test_on_a_card_nothing_is_interpreted_and_no_network_is_looked_for(tmp_path: Path) -> None:
    on_card = environment(tmp_path, tmp_path, "cuda")
    assert "TRITON_INTERPRET" not in on_card.keys() - os.environ.keys()
    assert on_card["HF_HUB_OFFLINE"] == "1"
    assert on_card["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert environment(tmp_path, tmp_path, "cpu")["TRITON_INTERPRET"] == "1"


def test_a_kit_that_cannot_be_unpacked_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", "--out", str(tmp_path / "out"), "--steps", "none"])
    assert main() == 1
    assert "unpack: failed" in capsys.readouterr().out
