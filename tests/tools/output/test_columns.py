"""A fact is described once: what a table shows, a program can read too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pdconn.tools.bench.serving import serve_report
from pdconn.tools.bench.transfer import transfer_report
from pdconn.tools.cli.store import store_report
from pdconn.tools.lab import demo_report
from pdconn.tools.output.columns import Column, cells, document, headings, of_part, text_table
from pdconn.tools.output.progress_line import ProgressLine
from pdconn.tools.plan import forecast_report, shapes_report
from pdconn.tools.plan.store import store_forecast_report


@dataclass(frozen=True)
class Part:
    runs: int


@dataclass(frozen=True)
class Row:
    name: str
    part: Part


PART: list[Column[Part]] = [Column("runs", "runs", lambda part: part.runs, "{:,}".format)]
COLUMNS: list[Column[Row]] = [
    Column("", "name", lambda row: row.name),
    *of_part(PART, lambda row: row.part),
    Column(None, "many.runs", lambda row: row.part.runs > 99, write=int),
]
ROWS = [Row("a", Part(1200)), Row("b", Part(7))]


def test_a_row_is_a_line_of_the_table_and_an_object_of_the_document() -> None:
    assert headings(COLUMNS) == ["", "runs"]
    assert [cells(COLUMNS, row) for row in ROWS] == [["a", "1,200"], ["b", "7"]]
    assert document(COLUMNS, ROWS[0]) == {"name": "a", "runs": 1200, "many": {"runs": 1}}
    assert text_table(COLUMNS, ROWS).splitlines()[-1].split() == ["b", "7"]


def code(column: Column[Any]) -> tuple[object, ...]:
    """Of the function that reads the fact."""
    read = column.value.__code__
    return read.co_code, read.co_names, read.co_consts


def facts_of_text_alone(columns: Iterable[Column[Any]]) -> list[str]:
    """Headings of facts that no key of the document has."""
    columns = list(columns)
    keyed = [code(column) for column in columns if column.key is not None]
    return [
        str(column.heading)
        for column in columns
        if column.key is None and code(column) not in keyed
    ]


EVERY: dict[str, Sequence[Column[Any]]] = {
    "store ls": store_report._namespace_columns(0.0),
    "store ls --rows": store_report._row_columns(0.0),
    "store stat": store_report._ROOT,
    "plan": forecast_report._GROUP,
    "plan, costs": forecast_report._COST,
    "plan, links": (*forecast_report._LINK, *forecast_report._OVER),
    "plan --list": shapes_report._SORT,
    "plan --store": store_forecast_report._STORE,
    "bench serve": serve_report._SUMMARY,
    "bench transfer": transfer_report._METHOD,
    "demo": demo_report._DEMO,
}
DERIVED = {"store stat": ["all rows"], "bench transfer": ["KiB\nper run"]}
"""What a program computes itself: sums and ratios of facts that it has."""


@pytest.mark.parametrize("name", EVERY)
def test_what_a_table_shows_is_in_the_document(name: str) -> None:
    keys = [column.key for column in EVERY[name] if column.key is not None]
    assert len(set(keys)) == len(keys)
    assert facts_of_text_alone(EVERY[name]) == DERIVED.get(name, [])


def test_a_fact_that_only_people_see_is_found() -> None:
    """Negative control."""
    assert facts_of_text_alone([*PART, Column("mean", None, lambda part: part.runs / 2)]) == [
        "mean"
    ]


def test_without_a_terminal_no_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("step: ")
    line.show_step("one")
    line.erase()
    assert not line.shown
    assert capsys.readouterr() == ("", "")
