"""The demo's table and its refusals; that it works is shown by running it."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pdconn.tools.cli.demo_command import _draw
from pdconn.tools.cli.main import main
from pdconn.tools.lab.demo_report import DemoReport, DemoRow
from pdconn.tools.lab.demo_run import DemoPlan, curl, demo_specs, draw
from pdconn.tools.lab.starting import StartingEngines
from pdconn.tools.output.table import table


def row(mismatch: str | None = None) -> DemoRow:
    return DemoRow("p", 1000, 2_000_000, 500_000, 7_000_000, 0, 12, 0.004, 0.001, 0.02, mismatch)


def test_the_table_shows_bytes_times_and_verdicts() -> None:
    report = DemoReport([row(), row("token differs")])
    lines = report.text().splitlines()
    assert lines[-2].split() == [
        "1000", "2.000", "0.500", "7.000", "0.000", "12", "4.00", "2.50", "20.0", "yes"
    ]  # fmt: skip
    assert lines[-1].split()[-1] == "NO"
    assert report.document()[0]["gb_per_s"] == pytest.approx(2.5)


def test_columns_line_up() -> None:
    text = table(["a", "two\nlines"], [["1", "2"], ["333333333", "4"]])
    assert len({len(line) for line in text.splitlines()[1:]}) == 1


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw([row(), row()], tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_a_table_and_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _draw([row()], tmp_path / "demo.png")
    assert "picture: " in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    _draw([row()], tmp_path / "other.png")
    assert capsys.readouterr().err.startswith("no picture: ")
    assert not (tmp_path / "other.png").exists()


def test_three_engines_two_of_them_with_the_connector() -> None:
    specs = demo_specs(DemoPlan("m", Path("d"), 100, decode_extra_config={"huge_pages": False}))
    roles = [(spec.kv_transfer_config or {}).get("kv_role") for spec in specs]
    assert roles == ["kv_producer", "kv_consumer", None]
    assert len({spec.port for spec in specs}) == 3


def test_progress_names_who_is_starting_and_no_tail_of_a_log() -> None:
    said: list[str] = []
    progress = StartingEngines(said.append)
    for second in range(12):
        for name in ("prefill", "decode", "alone")[: 3 if second < 8 else 1]:
            progress.show(name, second, "...k/site-packages/torch/x.py:5: UserWarning: half a l")
    assert said == [
        "still starting after 5 s: prefill, decode, alone",
        "still starting after 10 s: prefill",
    ]


def test_the_curl_that_is_named_asks_for_the_model_that_is_served() -> None:
    words = shlex.split(curl("http://h:1"))
    assert words[:2] == ["curl", "http://h:1/v1/completions"]
    (served,) = {spec.command()[spec.command().index("--served-model-name") + 1]
                 for spec in demo_specs(DemoPlan("m", Path("d"), 100))}  # fmt: skip
    assert json.loads(words[-1])["model"] == served


def test_a_taken_port_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = main(["demo", "--port", str(port), "--model", "m", "--directory", str(tmp_path)])
    assert code == 1
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err


def test_a_missing_dependency_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)  # as if it were not installed
    assert main(["demo", "--model", "m", "--directory", str(tmp_path)]) == 1
    assert "nixl is not installed; 'make venv' installs" in capsys.readouterr().err


_KEPT = """
import sys
from pdconn.tools.cli import demo_command
from pdconn.tools.cli.main import main
from pdconn.tools.lab.demo_report import DemoRow
from pdconn.tools.lab.demo_run import DemoAddresses

def run(plan, say, ended):
    wrong = "token differs" if sys.argv[2] == "wrong" else None
    row = DemoRow("p", 9, 1, 1, 1, 1, 1, 0.1, 0.1, 0.1, wrong)
    ended([row], DemoAddresses("http://h:1", "http://h:2"))
    say("stopping")

demo_command.check_dependencies = lambda: None
demo_command.run_demo = run
demo_command._draw = lambda rows, path: None
sys.exit(main(["demo", "--keep", "--model", "m", "--directory", sys.argv[1]]))
"""


@pytest.mark.parametrize(("answers", "code"), [("right", 0), ("wrong", 1)])
def test_a_kept_demo_says_where_the_page_is_and_stops_at_ctrl_c_with_its_verdict(
    tmp_path: Path, answers: str, code: int
) -> None:
    # A background job's children ignore SIGINT otherwise.
    command = ["env", "--default-signal=INT", sys.executable, "-c", _KEPT, str(tmp_path), answers]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as kept:
        assert kept.stdout is not None
        lines = iter(kept.stdout.readline, "")
        last = next(line for line in lines if line.startswith("live page"))
        assert last == "live page: http://h:2/ (API: http://h:1/v1; Ctrl-C stops everything)\n"
        with pytest.raises(subprocess.TimeoutExpired):  # it goes on running
            kept.wait(0.5)
        kept.send_signal(signal.SIGINT)
        _, err = kept.communicate(timeout=30)
    assert kept.returncode == code
    assert err.endswith("stopping\n")
