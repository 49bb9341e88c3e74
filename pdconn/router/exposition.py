"""The descriptions of the router's metrics, and their exposition.

A ``RouterMetric`` is a row of the tables from which metrics are built.  Beside the router's own,
whose names all begin with ``pdconn_router_``, the page has the process metrics under the usual
names of Prometheus exporters (``process_cpu_seconds_total``).

Prometheus' client adds a ``_created`` series to each counter and histogram.  Disabling that is
global to a process, which may host an engine too, so the series are removed when the page is made.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from pdconn import __version__
from pdconn.router.labels import IndexKind, LabelValue


@dataclass(frozen=True, slots=True)
class RouterMetric:
    """A row of a table of metrics.

    Attributes:
        buckets: bucket bounds of a histogram.
        values: the enum of each label's values; values of other labels are engines or paths.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    values: Mapping[str, type[LabelValue]] = field(default_factory=dict)


BUILD_INFO = RouterMetric(
    "pdconn_router_build_info",
    "gauge",
    ("version", "python", "index"),
    "1; the versions of pdconn and Python that serve, and what the prefix index is made of",
    values={"index": IndexKind},
)


def add_process(registry: CollectorRegistry, index: IndexKind) -> None:
    """Register the version and process metrics."""
    ProcessCollector(registry=registry)
    row = BUILD_INFO
    build = Gauge(row.name, row.help, row.labels, registry=registry)
    build.labels(version=__version__, python=platform.python_version(), index=index.value).set(1)


@dataclass(frozen=True, slots=True)
class _WithoutCreated:
    """A registry's families without the ``_created`` series."""

    registry: CollectorRegistry

    def collect(self) -> Iterator[Metric]:
        for family in self.registry.collect():
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


def render(registry: CollectorRegistry) -> bytes:
    """The page in Prometheus' text format."""
    return generate_latest(_WithoutCreated(registry))
