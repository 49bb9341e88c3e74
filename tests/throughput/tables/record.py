"""What a benchmark measured, when, and with what: the file ``results/NAME.json``.

::

    {"benchmark": "waterfall", "measured_at": "2026-11-21T20:00:00+00:00",
     "machine": {...}, "versions": {...},
     "runs": {"pull": {"command": "python -m tests...", "took_s": 12.3, "result": ...}}}

``result`` is the benchmark's own JSON without what no table shows.  Numbers keep six digits.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime

from tests.throughput.tables.errors import MissingField
from tests.throughput.tables.node import Node


@dataclass(frozen=True, slots=True)
class Run:
    """One command of a benchmark: how it reads, how many seconds it took, its JSON."""

    command: str
    took_s: float
    result: object


@dataclass(frozen=True)
class Record:
    """One benchmark's measurements."""

    benchmark: str
    measured_at: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    runs: Mapping[str, Run]

    def result(self, name: str) -> Node:
        """The JSON of the run called ``name``.

        Raises:
            MissingField: there is no such run.
        """
        if name not in self.runs:
            seen = ", ".join(self.runs) or "none"
            raise MissingField(f"{self.benchmark}.runs.{name}", "a run", seen)
        return Node(f"{self.benchmark}.{name}", self.runs[name].result)

    def dumps(self) -> str:
        """As it is written to a file."""
        return json.dumps(_rounded(asdict(self)), indent=1, ensure_ascii=False) + "\n"


def loads(name: str, text: str) -> Record:
    """Read what :meth:`Record.dumps` made, for benchmark ``name``.

    Raises:
        MissingField: it is no JSON, lacks a field, or belongs to another benchmark.
    """
    try:
        root = Node(name, json.loads(text))
    except ValueError as error:
        raise MissingField(name, "JSON", str(error)) from error
    if root["benchmark"].text != name:
        raise MissingField(f"{name}.benchmark", name, root["benchmark"].text)
    return Record(
        name,
        _date(root["measured_at"]),
        _texts(root["machine"]),
        _texts(root["versions"]),
        {key: _run(root["runs"][key]) for key in root["runs"].keys},
    )


def without(document: object, keys: Collection[str]) -> object:
    """``document`` less every field of that name, however deep.

    >>> without([{"all": [1, 2], "median": 1}], {"all"})
    [{'median': 1}]
    """
    if isinstance(document, dict):
        return {key: without(value, keys) for key, value in document.items() if key not in keys}
    if isinstance(document, list):
        return [without(item, keys) for item in document]
    return document


def _run(node: Node) -> Run:
    return Run(node["command"].text, node["took_s"].number, node["result"].value)


def _texts(node: Node) -> dict[str, str]:
    return {key: node[key].text for key in node.keys}


def _date(node: Node) -> str:
    try:
        datetime.fromisoformat(node.text)
    except ValueError:
        raise MissingField(node.where, "a date and time", node.text) from None
    return node.text


def _rounded(document: object) -> object:
    if isinstance(document, float):
        return float(f"{document:.6g}")
    if isinstance(document, dict):
        return {key: _rounded(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [_rounded(item) for item in document]
    return document
