"""The dashboard imports anywhere: what it asks, it asks of what its variables name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from tests.project.docker.dashboard import dashboard, expressions

ROUTERS = {"job": "$job", "instance": "$instance"}
ENGINES = {**ROUTERS, "model_name": "$model"}


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Every series that an expression asks for."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def unbound(board: dict[str, Any]) -> Iterator[str]:
    """Panels and queries that a variable should choose, and does not."""
    for panel in board["panels"]:
        if panel["type"] != "row" and panel["datasource"] != {
            "type": "prometheus", "uid": "${datasource}"
        }:  # fmt: skip
            yield f"{panel['title']}: datasource"
    for expression in expressions(board):
        for one in selectors(expression):
            wanted = ROUTERS if str(one.name).startswith("pdconn_router_") else ENGINES
            bound = {
                each.name: each.value
                for each in one.matchers.matchers
                if str(each.op) == "MatchOp.Re"
            }
            yield from (
                f"{name} of {one.name} in {expression}"
                for name, value in wanted.items()
                if bound.get(name) != value
            )


def test_every_panel_asks_by_the_variables() -> None:
    board = dashboard()
    assert list(unbound(board)) == []
    assert len(list(expressions(board))) > 40


@pytest.mark.parametrize(
    ("true", "false"),
    [
        ("${datasource}", "pdconn-prometheus"),
        (', model_name=~\\"$model\\"', ""),
        ('instance=~\\"$instance\\"', 'instance=~\\"router.*\\"'),
        ('job=~\\"$job\\"', 'job=\\"$job\\"'),
    ],
)
def test_a_panel_that_names_its_own_source_is_noticed(true: str, false: str) -> None:
    """Negative control."""
    text = json.dumps(dashboard())
    assert true in text
    assert list(unbound(json.loads(text.replace(true, false)))) != []


def test_variables_are_defined_before_they_are_used_and_all_is_the_beginning() -> None:
    variables = dashboard()["templating"]["list"]
    names = [one["name"] for one in variables]
    assert names == ["datasource", "job", "model", "instance"]
    for at, one in enumerate(variables):
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(one).replace("$__all", "")))
        assert used <= set(names[:at])
        if one["type"] == "query":
            assert one["current"]["value"] == ["$__all"]
            assert one["allValue"] == ".*"
    assert variables[0]["query"] == "prometheus"


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    cells = [
        (x, y)
        for one in panels
        for x in range(one["gridPos"]["x"], one["gridPos"]["x"] + one["gridPos"]["w"])
        for y in range(one["gridPos"]["y"], one["gridPos"]["y"] + one["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
