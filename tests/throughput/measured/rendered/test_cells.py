"""What cells are made with: a path to a field, and how a number is written."""

from __future__ import annotations

import re

import pytest

from tests.throughput.measured.record import MissingField, Node
from tests.throughput.measured.rendered.made import made
from tests.throughput.render import digits, filled, spaced


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"rows": {}}, "one.rows: expected a list, got {}"),
        ([], r"one: expected an object, got \[\]"),
        ({}, "one.rows: expected a value, got nothing"),
        ({"rows": [{"what": 1, "ms": 1}]}, r"one.rows\[0\].what: expected a string, got 1"),
        ({"rows": [{"what": "a", "ms": True}]}, r"one.rows\[0\].ms: expected a number, got True"),
        ({"rows": [{"what": "a", "ms": float("nan")}]}, "ms: expected a number, got nan"),
        ({"rows": [{"what": "a"}]}, r"one.rows\[0\].ms: expected a value, got what"),
    ],
)
def test_a_field_that_is_missing_or_strange_is_named(document: object, message: str) -> None:
    def read(node: Node) -> list[str]:
        return [filled("{what:s} {ms:3}", each) for each in node["rows"].rows]

    assert read(Node("one", {"rows": [{"what": "a", "ms": 2}]})) == ["a 2.00"]
    with pytest.raises(MissingField, match=message):
        read(Node("one", document))


@pytest.mark.parametrize("rows", [[], [{"a": 1}, {"a": 1}]])
def test_a_row_that_is_not_there_once_is_named(rows: list[object]) -> None:
    message = f"one: expected one row with a=1, got {len(rows)} of them"
    with pytest.raises(MissingField, match=re.escape(message)):
        Node("one", rows).at("[a=1]")


def test_a_run_that_is_missing_is_named() -> None:
    with pytest.raises(MissingField, match=r"handover\.runs\.apart: expected a run, got reserved"):
        made("handover", reserved={"measured": [], "ratios": []})


def test_a_path_finds_fields_rows_and_items() -> None:
    node = Node("one", {"a": [{"k": "x", "v": [7, 8]}, {"k": "y", "v": None}], "n": 2})
    assert node.at("a[k=x].v[1]").whole == 8
    assert node.at("a[1].v[0].w").value is None, "below null is null"
    assert filled("{a[k=x].v[1]/n:.1f}, {a[k=x].v[0]*n}", node) == "4.0, 14"
    assert filled("{n} {a[1].v[0]:3}", node) == "", "a cell with a null is empty"
    with pytest.raises(MissingField, match=re.escape("one.a[2]: expected a value, got 2 rows")):
        node.at("a[2]")


@pytest.mark.parametrize(
    ("number", "written"),
    [(0, "0"), (0.0006, "0.000600"), (9.996, "10.0"), (99.96, "100"), (999.6, "1 000"),
     (-1.5, "-1.50")],
)  # fmt: skip
def test_numbers_are_written_with_three_digits_that_count(number: float, written: str) -> None:
    assert digits(number) == written


def test_thousands_are_set_apart_and_a_bar_does_not_end_a_cell() -> None:
    assert [spaced(number) for number in (999, 1000, 1_048_576)] == ["999", "1 000", "1 048 576"]
    rows = [{"what": "b | c", "ours": 1, "scan": None, "unit": "x"}]
    assert made("routing", routing=rows)[2] == "| b \\| c | 1.00 x | |"
