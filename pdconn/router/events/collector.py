"""Metrics of pods, collected when the page is requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdconn.router.events.caches import PrefixCaches
from pdconn.router.events.subscriber import Status
from pdconn.router.events.tracker import State

if TYPE_CHECKING:
    from pdconn.router.exposition import RouterMetric

Statuses = Callable[[], Mapping[str, Status]]


@dataclass(frozen=True, slots=True, eq=False)
class PodCollector:
    """A Prometheus collector of per-pod metrics."""

    caches: PrefixCaches
    statuses: Statuses
    rows: Mapping[str, RouterMetric]

    def collect(self) -> Iterator[Metric]:
        pods, statuses = self.caches.index.pods, self.statuses()
        live = {name: one.state is State.LIVE for name, one in statuses.items()}
        lags = {name: one.lag_s for name, one in statuses.items() if one.lag_s is not None}
        values: dict[str, Mapping[str, float]] = {
            "blocks": {name: pod.num_blocks for name, pod in pods.items()},
            "unknown_removals_total": {name: pod.unknown_removals for name, pod in pods.items()},
            "refused_blocks_total": {name: pod.refused for name, pod in pods.items()},
            "event_lag_seconds": lags,
            "complete": live,
            "events_total": {name: one.events for name, one in statuses.items()},
            "undecodable_events_total": {name: one.undecodable for name, one in statuses.items()},
            "malformed_messages_total": {name: one.malformed for name, one in statuses.items()},
            "event_gaps_total": {name: one.gaps for name, one in statuses.items()},
            "event_replays_total": {name: one.replays for name, one in statuses.items()},
            "restarts_total": {name: one.restarts for name, one in statuses.items()},
        }
        for name, per_pod in values.items():
            yield _family(self.rows[f"pod_{name}"], per_pod)


def _family(row: RouterMetric, per_pod: Mapping[str, float]) -> Metric:
    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    family = kind(row.name, row.help, labels=row.labels)
    for pod, value in per_pod.items():
        family.add_metric([pod], float(value))
    return family
