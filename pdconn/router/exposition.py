"""How the router's metrics are described and exposed.

A ``RouterMetric`` is a row of the tables that metrics are built from.  Beside the router's own,
whose names all begin with ``pdconn_router_``, the page has the process's, under the names that
every Prometheus exporter gives them (``process_cpu_seconds_total``).

Prometheus' client adds a ``_created`` series to each counter and histogram.  Switching that off is
global to a process, and an engine may share it, so they are left out where the page is made.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from pdconn import __version__
from pdconn.router.labels import LabelValue


@dataclass(frozen=True, slots=True)
class RouterMetric:
    """A row of a table of metrics.

    Attributes:
        buckets: of a histogram.
        values: by label the enum of its values; of other labels the fleet or a path decides.
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
    ("version", "python"),
    "1; the versions of pdconn and Python that serve",
)


def add_process(registry: CollectorRegistry) -> None:
    """Show what serves, and what it takes of the machine."""
    ProcessCollector(registry=registry)
    row = BUILD_INFO
    build = Gauge(row.name, row.help, row.labels, registry=registry)
    build.labels(version=__version__, python=platform.python_version()).set(1)


@dataclass(frozen=True, slots=True)
class _WithoutCreated:
    """A registry's families, without the times at which their series began."""

    registry: CollectorRegistry

    def collect(self) -> Iterator[Metric]:
        for family in self.registry.collect():
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


def render(registry: CollectorRegistry) -> bytes:
    """The page that Prometheus reads."""
    return generate_latest(_WithoutCreated(registry))
