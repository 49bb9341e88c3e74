"""Alerts evaluated over series that are given: the part of PromQL that our rules use.

Parsed by Prometheus' grammar (``promql_parser``), evaluated here, a minute a sample, in the form
of promtool's tests: ``0+10x30`` is 0, 10, ... 300.  What our rules do not use is an error.  Where
``promtool`` is installed, ``test_monitoring`` compares the two.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import promql_parser

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Samples = Mapping[Labels, list[float]]

_SERIES = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?")
_VALUES = re.compile(r"(?P<start>[\d.]+)(?:\+(?P<step>[\d.]+))?x(?P<more>\d+)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {">": operator.gt, "==": operator.eq}
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "/": lambda a, b: a / b if b else math.nan,
}
_GATHER: dict[str, Callable[[list[float]], float]] = {"sum": sum, "min": min, "max": max}


def samples(series: Mapping[str, str]) -> Samples:
    """Series in promtool's notation, by their labels; ``__name__`` is the name."""
    made = {}
    for text, values in series.items():
        found = _SERIES.fullmatch(text)
        assert found is not None, text
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found["labels"] or ""))
        made[frozenset({**labels, "__name__": found["name"]}.items())] = [
            float(part["start"]) + step * float(part["step"] or 0)
            for part in _VALUES.finditer(values)
            for step in range(int(part["more"]) + 1)
        ]
    return made


def fires(rule: Mapping[str, Any], series: Samples, minute: int) -> bool:
    """Whether an alert is firing: its expression has held, for some labels, for its ``for``."""
    lasted = int(str(rule.get("for", "0m")).removesuffix("m"))
    tree = promql_parser.parse(rule["expr"])
    held = [set(_evaluate(tree, series, at)) for at in range(minute - lasted, minute + 1)]
    return bool(set.intersection(*held))


def _evaluate(node: Any, series: Samples, minute: int) -> Any:
    """A vector, or a number."""
    match node:
        case promql_parser.NumberLiteral():
            return node.val
        case promql_parser.ParenExpr():
            return _evaluate(node.expr, series, minute)
        case promql_parser.VectorSelector():
            return {
                labels: values[minute]
                for labels, values in _selected(node, series).items()
                if minute < len(values)
            }
        case promql_parser.Call():
            return _called(node, series, minute)
        case promql_parser.AggregateExpr():
            return _gathered(node, _evaluate(node.expr, series, minute))
        case promql_parser.BinaryExpr():
            left = _evaluate(node.lhs, series, minute)
            return _combined(node, left, _evaluate(node.rhs, series, minute))
    raise NotImplementedError(type(node).__name__)


def _selected(node: Any, series: Samples) -> Samples:
    return {
        labels: values
        for labels, values in series.items()
        if dict(labels)["__name__"] == node.name
        and all(_meets(one, dict(labels).get(one.name, "")) for one in node.matchers.matchers)
    }


def _meets(matcher: Any, value: str) -> bool:
    kind = str(matcher.op).removeprefix("MatchOp.")
    equal = re.fullmatch(matcher.value, value) if "Re" in kind else value == matcher.value
    return bool(equal) != kind.startswith("Not")


def _called(node: Any, series: Samples, minute: int) -> Vector:
    (argument,) = node.args
    if node.func.name == "absent":
        return {} if _evaluate(argument, series, minute) else {frozenset(): 1.0}
    if node.func.name not in ("rate", "increase"):
        raise NotImplementedError(node.func.name)
    minutes = int(argument.range.total_seconds() // 60)
    made = {}
    for labels, values in _selected(argument.vector_selector, series).items():
        window = values[max(0, minute - minutes) : minute + 1]
        if len(window) > 1:
            grown = sum(max(0.0, b - a) for a, b in pairwise(window))
            made[_named(labels)] = grown / (minutes * 60) if node.func.name == "rate" else grown
    return made


def _named(labels: Labels) -> Labels:
    """Labels without the name, which a function or an operator takes away."""
    return frozenset(one for one in labels if one[0] != "__name__")


def _gathered(node: Any, vector: Vector) -> Vector:
    by = set() if node.modifier is None else set(node.modifier.labels)
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        groups.setdefault(frozenset(one for one in labels if one[0] in by), []).append(value)
    return {labels: _GATHER[str(node.op)](values) for labels, values in groups.items()}


def _combined(node: Any, left: Vector, right: Vector | float) -> Vector:
    if node.modifier is not None and node.modifier.matching is not None:
        raise NotImplementedError("on and ignoring")
    word = str(node.op)
    ours = {_named(labels): value for labels, value in left.items()}
    theirs = right if isinstance(right, dict) else dict.fromkeys(ours, right)
    theirs = {_named(labels): value for labels, value in theirs.items()}
    if word == "or":
        return {**theirs, **ours}
    if word == "unless":
        return {labels: value for labels, value in ours.items() if labels not in theirs}
    both = {labels: (ours[labels], theirs[labels]) for labels in ours.keys() & theirs.keys()}
    if word in _COMPARE:
        return {labels: a for labels, (a, b) in both.items() if _COMPARE[word](a, b)}
    return {labels: _ARITHMETIC[word](a, b) for labels, (a, b) in both.items()}
