"""What holds for every benchmark of the catalog: its words, its runs, and a test of its tables."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.throughput.measured.catalog import BENCHMARKS
from tests.throughput.measured.rendered.made import lines, record
from tests.throughput.render import markdown


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


def test_every_table_is_made_in_this_folder() -> None:
    """The control: no benchmark of the catalog is forgotten here."""
    files = [path.stem for path in Path(__file__).parent.glob("test_*.py")]
    tests = {name for file in files for name in vars(import_module(f"{__package__}.{file}"))}
    assert {f"test_{name}" for name in BENCHMARKS} <= tests
