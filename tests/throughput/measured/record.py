"""What a benchmark measured, when, and with what: the file ``results/NAME.json``.

::

    {"benchmark": "waterfall", "measured_at": "2026-11-21T20:00:00+00:00",
     "machine": {...}, "versions": {...},
     "runs": {"pull": {"command": "python -m tests...", "took_s": 12.3, "result": ...}}}

``result`` is the benchmark's own JSON without what no table shows.  Numbers keep six digits.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from transport.errors import FieldError, did_you_mean, shown

_STEP = re.compile(r"\.?(\w+)|\[(\d+)\]|\[(\w+)=([^\]]+)\]")


class TablesError(Exception):
    """A measured table that cannot be made."""


class MissingField(TablesError, FieldError):
    """A result lacks a field, or holds something else there."""


class UnknownBenchmark(TablesError, FieldError):
    """No benchmark has that name."""

    def __init__(self, name: str, known: Collection[str]) -> None:
        hint = did_you_mean(name, known)
        super().__init__("benchmark", f"one of {', '.join(known)}", name, hint)


class NotHere(TablesError):
    """A benchmark needs what this machine does not have."""


class BenchmarkFailed(TablesError):
    """A benchmark ended otherwise than with 0, took too long, or wrote no result."""


@dataclass(frozen=True, slots=True)
class Node:
    """A place in a JSON document that knows its name: ``value`` is what ``json.loads`` gives.

    Every access raises ``MissingField`` where something else is found.

    >>> node = Node("waterfall", {"stages": [{"stage": "claim", "median_s": 0.5}]})
    >>> node.at("stages[stage=claim].median_s").number
    0.5
    >>> node["overhead_s"]
    Traceback (most recent call last):
    tests.throughput.measured.record.MissingField: waterfall.overhead_s: expected a value, got stages
    """  # noqa: E501

    where: str
    value: object

    def __getitem__(self, key: str) -> Node:
        """A field of an object."""
        if key not in self.keys:
            raise MissingField(f"{self.where}.{key}", "a value", ", ".join(self.keys) or "nothing")
        assert isinstance(self.value, dict)
        return Node(f"{self.where}.{key}", self.value[key])

    def at(self, path: str) -> Node:
        """A place below this one: ``a.b``, ``a[0]``, ``a[key=value]``; null below null."""
        node = self
        for name, index, key, value in _STEP.findall(path):
            if node.value is None:
                return node
            if name:
                node = node[name]
            elif key:
                node = node.the(key, value)
            elif int(index) < len(node.rows):
                node = node.rows[int(index)]
            else:
                raise MissingField(f"{node.where}[{index}]", "a value", f"{len(node.rows)} rows")
        return node

    @property
    def keys(self) -> list[str]:
        """An object's names, in their order."""
        if not isinstance(self.value, dict):
            raise self._not("an object")
        return list(self.value)

    @property
    def rows(self) -> list[Node]:
        """The items of a list."""
        if not isinstance(self.value, list):
            raise self._not("a list")
        return [Node(f"{self.where}[{at}]", item) for at, item in enumerate(self.value)]

    def the(self, key: str, value: str) -> Node:
        """The one item of a list whose field ``key`` reads ``value``."""
        found = [row for row in self.rows if str(row[key].value) == value]
        if len(found) != 1:
            raise MissingField(self.where, f"one row with {key}={value}", f"{len(found)} of them")
        return found[0]

    @property
    def number(self) -> float:
        """A finite number."""
        value = self.value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self._not("a number")
        return float(value)

    @property
    def whole(self) -> int:
        """A whole number."""
        if not self.number.is_integer():
            raise self._not("a whole number")
        return int(self.number)

    @property
    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            raise self._not("a string")
        return self.value

    def _not(self, expected: str) -> MissingField:
        return MissingField(self.where, expected, shown(self.value))


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


def replace_text(path: Path, text: str, sync: Callable[[int], object] = os.fsync) -> None:
    """Write ``text`` beside ``path`` and rename it there; on an error nothing has changed."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    beside = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
            file.flush()
            sync(file.fileno())
        beside.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


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
