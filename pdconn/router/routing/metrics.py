"""What steering counts, for Prometheus: decisions, hits, and how the events of each pod fare.

What is known per pod is read when the page is asked for, so nothing has to be kept in step;
a pod that has left the fleet is not on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdconn.router.events.caches import PrefixCaches
from pdconn.router.events.subscriber import Status
from pdconn.router.events.tracker import State
from pdconn.router.routing.decision_log import RouteRecord
from pdconn.router.routing.policy import Role

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 2.5)

_KINDS = ("handed over", "alone")

Statuses = Callable[[], Mapping[str, Status]]


class RoutingMetrics:
    """The router's counters, all under ``pdconn_router_``."""

    def __init__(self, registry: CollectorRegistry, policy: str) -> None:
        self.registry = registry
        self._decisions = Counter(
            "pdconn_router_decisions",
            "Requests by what was decided: handed over, by decode alone",
            ["policy", "decision"],
            registry=registry,
        )
        self._unknown = Counter(
            "pdconn_router_unknown_prompts",
            "Requests that were routed without knowing where their prefix is",
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "pdconn_router_prompt_tokens",
            "Tokens of prompts whose prefix was looked for",
            registry=registry,
        )
        self._hit_tokens = Counter(
            "pdconn_router_hit_tokens",
            "Of those, tokens that the first choice of a role was predicted to hold",
            ["role"],
            registry=registry,
        )
        self._reported = Counter(
            "pdconn_router_reported_tokens",
            "Tokens of prompts whose prefill told what it had cached (predicted, cached, all)",
            ["what"],
            registry=registry,
        )
        self.decision_seconds = Histogram(
            "pdconn_router_decision_seconds",
            "From a whole body to a decision, tokenizing included",
            buckets=_SECONDS,
            registry=registry,
        )
        for kind in _KINDS:
            self._decisions.labels(policy, kind)
        for role in Role:
            self._hit_tokens.labels(role.value)
        for what in ("predicted", "cached", "all"):
            self._reported.labels(what)

    def watch(self, caches: PrefixCaches, statuses: Statuses) -> None:
        """Show what is known of each pod too."""
        self.registry.register(_Pods(caches, statuses))

    def decided(self, course: RouteRecord) -> None:
        """Count a decision."""
        self._decisions.labels(course.policy, _KINDS[course.decision.alone]).inc()
        self.decision_seconds.observe(course.took_s)
        if course.looked is None:
            self._unknown.inc()
            return
        self._prompt_tokens.inc(course.num_tokens)
        for role, ordered in (
            (Role.PREFILL, course.decision.prefill),
            (Role.DECODE, course.decision.decode),
        ):
            if ordered:
                self._hit_tokens.labels(role.value).inc(ordered[0].candidate.hit.tokens)

    def reported(self, course: RouteRecord) -> None:
        """Count what prefill said that it had cached."""
        if course.cached_tokens is not None and course.looked is not None:
            self._reported.labels("predicted").inc(course.hit_tokens(course.prefill))
            self._reported.labels("cached").inc(max(0, course.cached_tokens))
            self._reported.labels("all").inc(course.num_tokens)


@dataclass(frozen=True, slots=True)
class _Pods:
    """A collector of what is known of each pod now."""

    caches: PrefixCaches
    statuses: Statuses

    def collect(self) -> Iterator[Metric]:
        pods = self.caches.index.pods
        blocks = {name: float(pod.num_blocks) for name, pod in pods.items()}
        yield _gauge("blocks", "Blocks that a pod holds", blocks)
        removed = {name: pod.unknown_removals for name, pod in pods.items()}
        yield _count("unknown_removals", "Removals of blocks that it did not hold", removed)
        refused = {name: pod.refused for name, pod in pods.items()}
        yield _count("refused_blocks", "Stored blocks beyond what a pod can hold", refused)
        statuses = self.statuses()
        lags = {name: one.lag_s for name, one in statuses.items() if one.lag_s is not None}
        yield _gauge("event_lag_seconds", "From an engine's event to the index, the last one", lags)
        complete = {name: float(one.state is State.LIVE) for name, one in statuses.items()}
        yield _gauge("complete", "1 while all that a pod holds is known", complete)
        for field, what in _COUNTED.items():
            counts = {name: getattr(status, field) for name, status in statuses.items()}
            yield _count(field, what, counts)


_COUNTED = {
    "events": "Events applied",
    "undecodable": "Events that could not be read and were skipped",
    "malformed": "Messages that could not be read at all",
    "gaps": "Times that messages were missing",
    "replays": "Replays asked for",
    "restarts": "Times that the engine was another one",
}


def _gauge(name: str, what: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"pdconn_router_pod_{name}", what, labels=["pod"])
    for pod, value in values.items():
        family.add_metric([pod], value)
    return family


def _count(name: str, what: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"pdconn_router_pod_{name}", what, labels=["pod"])
    for pod, value in values.items():
        family.add_metric([pod], value)
    return family
