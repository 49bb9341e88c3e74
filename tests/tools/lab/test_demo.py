"""The demo's table and its refusals; that it works is shown by running it."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.cli import demo_command
from pdconn.tools.cli.demo_command import _draw
from pdconn.tools.cli.main import main
from pdconn.tools.cli.proxy import proxy_command
from pdconn.tools.lab import demo_run
from pdconn.tools.lab.demo_report import DemoReport, DemoRow, EarlyPart
from pdconn.tools.lab.demo_run import DemoPlan, curl, demo_specs, draw
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_errors import LabError
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


# Streams


def followed(seconds: float = 0.003) -> DemoRow:
    """A pull of 4 ms of which so much lay behind prefill."""
    return replace(row(), early=EarlyPart(True, 1_000_000, seconds))


def test_with_streams_a_pull_is_what_lay_behind_prefill_and_what_came_after_it() -> None:
    report = DemoReport([followed(), row()], streams=True)
    table_lines, summary = report.text().split("\n\n")
    assert table_lines.splitlines()[-2].split()[6:10] == ["4.00", "3.00", "1.00", "1.000"]
    assert table_lines.splitlines()[-1].split()[6:10] == ["4.00", "0.00", "4.00", "0.000"]
    assert summary == (
        "streams: 1 of 2 pulls followed prefill: 1.000 of 2.500 MB were read behind it; "
        "3.0 ms of their time lay behind it, and 1.0 ms came after it"
    )
    for one in report.document():
        assert one["hidden_s"] + one["visible_s"] == pytest.approx(one["pull_s"])
    none = DemoReport([row()], streams=True).text()
    assert none.endswith("\n\nstreams: 0 of 1 pulls followed prefill")


def test_without_streams_the_text_is_no_longer_and_the_document_has_the_same_keys() -> None:
    off, on = DemoReport([row()]), DemoReport([row()], streams=True)
    assert "behind" not in off.text()
    assert "behind" in on.text()  # the control
    assert off.document() == on.document()
    assert off.document()[0]["is_followed"] is False


COUNTED = dict.fromkeys((*demo_run._COUNTED, "handover_s"), 0.0)


def test_only_a_pull_that_followed_has_a_part_behind_prefill() -> None:
    """Sums of equal times differ by rounding, and may not pass for something hidden."""
    after = COUNTED | {"pull_s": 0.5, "visible_s": 0.125, "early_bytes": 64.0, "followed": 1.0}
    made = demo_run._row("p", 9, COUNTED, after, None)
    assert (made.early, made.visible_s) == (EarlyPart(True, 64, 0.375), 0.125)
    alone = demo_run._row("p", 9, COUNTED, after | {"followed": 0.0}, None)
    assert (alone.early, alone.visible_s) == (EarlyPart(), 0.5)


def test_what_the_demo_reads_is_what_engines_and_router_export() -> None:
    """A name that no engine has counts as 0."""
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()

    def is_exported(sample: str) -> bool:
        return f"`{sample.removesuffix('_sum')}`" in documented

    assert all(is_exported(sample) for sample in demo_run._COUNTED.values())
    assert not is_exported("pdconn:early_byte_total")  # the control


def test_the_option_is_the_proxys_in_name_words_and_default() -> None:
    def streams_option(configure: Callable[[argparse.ArgumentParser], None]) -> tuple[object, ...]:
        parser = argparse.ArgumentParser()
        configure(parser)
        found = parser._option_string_actions["--streams"]
        return found.help, found.default, tuple(found.choices or ())

    assert streams_option(demo_command.configure) == streams_option(proxy_command.configure)


@pytest.mark.parametrize(
    ("words", "passed"),
    [((), ()), (("--streams", "off"), ()), (("--streams", "on"), ("--streams", "on"))],
)
def test_the_proxy_is_started_with_streams_only_if_they_are_asked_for(
    words: tuple[str, ...],
    passed: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []

    def start_proxy(
        prefill: object, decode: object, folder: object, port: object, args: object
    ) -> None:
        started.append(args)
        raise LabError

    engines = [Engine(spec, tmp_path) for spec in demo_specs(DemoPlan("m", tmp_path, 100))]
    monkeypatch.setattr(demo_run, "_engines", lambda *_: nullcontext(engines))
    monkeypatch.setattr(demo_run, "running_proxy", start_proxy)
    monkeypatch.setattr(demo_command, "check_dependencies", lambda: None)
    assert main(["demo", "--model", "m", "--directory", str(tmp_path), *words]) == 1
    assert started == [passed]


def test_the_picture_draws_what_lay_behind_prefill_below_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)

    def lowest(*rows: DemoRow) -> float:
        draw(rows, tmp_path / "demo.png")
        _, time_axes = figures[-1].axes
        return float(min(bar.get_y() + bar.get_height() for bar in time_axes.patches))

    assert lowest(followed(0.003), row()) == pytest.approx(-3.0)
    assert lowest(row()) >= 0  # the control
    monkeypatch.undo()
    for figure in figures:
        plt.close(figure)


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
