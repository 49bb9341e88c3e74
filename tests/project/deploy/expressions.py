"""What alerts and ScaledObjects ask Prometheus, and which metrics the documentation has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from tests.project.deploy.manifests import EXAMPLES
from tests.project.docker.dashboard import TARGET_LABELS, Exported

ROOT = EXAMPLES.parents[1]
ALERTS = EXAMPLES / "components/monitoring/alerts.yaml"
SCALED = ("keda", "keda-roles")
"""Components with ScaledObjects."""

#: What the Prometheus Operator puts on a series beside what our relabelling does.
SCRAPED = TARGET_LABELS | {"namespace", "pod", "container", "endpoint"}

_ROW = re.compile(r"^\| `([\w:]+)` \| (counter|gauge|histogram) \| ([^|]*) \|", re.M)


def groups() -> list[Any]:
    """The groups of the PrometheusRule."""
    return list(yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["spec"]["groups"])


def rules() -> dict[str, str]:
    """Alerts and their expressions."""
    return {one["alert"]: one["expr"] for group in groups() for one in group["rules"]}


def scalers() -> dict[str, str]:
    """Triggers of ScaledObjects and their queries."""
    pages = {name: EXAMPLES / "components" / name / "scaled-objects.yaml" for name in SCALED}
    return {
        f"{name} {one['metadata']['name']} {trigger['name']}": trigger["metadata"]["query"]
        for name, page in pages.items()
        for one in yaml.safe_load_all(page.read_text(encoding="utf-8"))
        for trigger in one["spec"]["triggers"]
    }


def documented(page: Path = ROOT / "docs/metrics.md") -> Exported:
    """Series of the generated tables, with their labels."""
    series: dict[str, frozenset[str]] = {}
    for name, kind, labels in _ROW.findall(page.read_text(encoding="utf-8")):
        own = frozenset(re.findall(r"`(\w+)`", labels))
        if kind == "histogram":
            series[f"{name}_bucket"] = own | {"le"}
            series |= {f"{name}_{suffix}": own for suffix in ("sum", "count")}
        else:
            series[name] = own
    return series


def asked_for(expression: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Each series of an expression, with the labels that it is asked by.

    Raises:
        ValueError: Prometheus would not take the expression.
    """
    tree = promql_parser.parse(expression)
    found: list[promql_parser.VectorSelector] = []
    grouped: set[str] = set()

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        return True

    promql_parser.walk(tree, visit)
    for one in found:
        labels = {matcher.name for matcher in one.matchers.matchers}
        yield str(one.name), frozenset(labels | grouped)


def unexported(queries: Mapping[str, str], exported: Exported) -> list[str]:
    """Series, and labels of series, that a query names and nothing exports."""
    wrong = []
    for title, expression in queries.items():
        for name, labels in asked_for(expression):
            if name not in exported:
                wrong.append(f"{title}: {name}")
            elif strange := labels - exported[name] - SCRAPED:
                wrong.append(f"{title}: {sorted(strange)} of {name}")
    return wrong
