"""What Prometheus scrapes and Grafana asks for, and whether anybody says it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from prometheus_client.core import Metric

from tests.project.docker.stack import DOCKER, Stack, option

#: Every series' name, with the labels that it may have.
Exported = Mapping[str, frozenset[str]]

#: What Prometheus itself puts on a series, and our scrape configuration.
TARGET_LABELS = frozenset({"job", "instance", "role"})

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_WORDS = {"by", "without", "and", "or", "unless", "on", "ignoring", "offset", "bool"}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_NAME = re.compile(r"[a-zA-Z_:][\w:]*(?!\w|\s*\()")
_MATCHERS = re.compile(r"\{([^}]*)\}")


@dataclass(frozen=True)
class Asked:
    """What an expression is about: names of series, and of labels."""

    names: frozenset[str]
    labels: frozenset[str]


def asked(expression: str) -> Asked:
    """Take an expression of Prometheus' language apart.

    >>> sorted(asked('sum by (le) (rate(a_bucket{b="c"}[5m]))').names)
    ['a_bucket']
    """
    labels = {word.strip() for group in _GROUPING.findall(expression) for word in group.split(",")}
    for matchers in _MATCHERS.findall(expression):
        labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', "", matchers)))
    bare = re.sub(r"\[[^\]]*\]", "", _MATCHERS.sub("", _GROUPING.sub("", expression)))
    names = {name for name in _NAME.findall(bare) if name not in _WORDS}
    return Asked(frozenset(names), frozenset(labels))


def dashboard() -> dict[str, Any]:
    """The one that Grafana is provisioned with."""
    return dict(json.loads((DOCKER / "grafana/dashboards/pdconn.json").read_text(encoding="utf-8")))


def expressions(board: Mapping[str, Any]) -> Iterator[str]:
    """Every query of every panel."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def unknown(board: Mapping[str, Any], exported: Exported, names: str) -> list[str]:
    """Series whose names match ``names`` and labels that are not exported, with their query."""
    wrong = []
    for expression in expressions(board):
        about = asked(expression)
        mine = {name for name in about.names if re.match(names, name)}
        labels = TARGET_LABELS.union(*(exported.get(name, ()) for name in mine))
        unexported = (mine - exported.keys()) | (about.labels - labels if mine else set())
        wrong += [f"{name} in {expression}" for name in sorted(unexported)]
    return wrong


def exported_by(families: Iterable[Metric]) -> Exported:
    """The series of metrics as ``prometheus_client`` collects them."""
    series: dict[str, frozenset[str]] = {}
    for family in families:
        labels = set(getattr(family, "_labelnames", ()))
        labels |= {label for sample in family.samples for label in sample.labels}
        for suffix in _SUFFIXES[family.type]:
            more = {"le"} if suffix == "_bucket" else set()
            series[family.name + suffix] = frozenset(labels | more)
    return series


def unscraped(stack: Stack, scraping: Mapping[str, Any]) -> list[str]:
    """Targets that are no service's port, and engines and routers that are no target."""
    served = {
        f"{name}:{port}"
        for name, service in stack.services.items()
        if name in stack.engines() or "proxy" in service.get("command", ())
        if (port := _metrics_port(service["command"]))
    }
    targets = {
        target
        for job in scraping["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    return sorted(served ^ targets)


def _metrics_port(words: list[str]) -> str | None:
    """Where a command shows metrics: the router on its admin pages, engines where they serve."""
    return option(words, "admin-port" if "proxy" in words else "port")


def scraping() -> dict[str, Any]:
    """Prometheus' configuration."""
    return dict(yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8")))


def provisioned(name: str) -> dict[str, Any]:
    """One of the files that Grafana is provisioned with."""
    return dict(
        yaml.safe_load((DOCKER / "grafana/provisioning" / name).read_text(encoding="utf-8"))
    )
