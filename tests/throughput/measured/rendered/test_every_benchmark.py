"""What holds for every benchmark of the catalog: its words, its runs, and a test of its tables."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

from tests.throughput.measured.catalog import BENCHMARKS
from tests.throughput.measured.rendered.made import lines, record
from tests.throughput.render import markdown

OVER_VLLM = "tests.throughput.agents.simulated"
"""It takes seconds to import vLLM, which the tests' process has done."""


def test_above_the_tables_stand_question_configuration_command_and_result() -> None:
    found = lines(markdown(BENCHMARKS["routing"], record("routing", routing=[])))
    assert found[:4] == [
        f"- **Question**: {BENCHMARKS['routing'].question}",
        f"- **Configuration**: {BENCHMARKS['routing'].configuration}",
        "- **Command**: `python`",
        "- **Result**: `tests/throughput/results/routing.json`, 2026-01-02, python unknown.",
    ]


def test_every_benchmark_says_what_is_asked_and_how() -> None:
    for name, each in BENCHMARKS.items():
        assert each.question.endswith("?"), name
        assert each.configuration.endswith("."), name
        runs = {command.name for command in each.commands}
        assert runs == {run for table in each.tables for run in table.runs}, name


def test_every_program_can_be_started() -> None:
    """None is run here, so one that imports what has moved would not be noticed."""
    lines_of = [command.line for each in BENCHMARKS.values() for command in each.commands]
    modules = {line.split()[2] for line in lines_of if line.startswith("python -m ")}
    assert len(modules) > 20
    assert OVER_VLLM in modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's, where it is imported here for the first time
        import_module(OVER_VLLM)
    # In a process of their own: UCX and NIXL each bring their libraries along.
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    names = [_program(name) for name in sorted(modules - {OVER_VLLM})]
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def _program(module: str) -> str:
    return f"{module}.__main__" if Path(*module.split(".")).is_dir() else module


def test_every_table_is_made_in_this_folder() -> None:
    """The control: no benchmark of the catalog is forgotten here."""
    files = [path.stem for path in Path(__file__).parent.glob("test_*.py")]
    tests = {name for file in files for name in vars(import_module(f"{__package__}.{file}"))}
    assert {f"test_{name}" for name in BENCHMARKS} <= tests
