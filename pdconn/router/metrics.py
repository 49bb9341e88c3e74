"""The router's Prometheus metrics: one table, and the counters built from it.

Each router has a registry of its own, so that two in one process (a test, a notebook) do not
share counts.  Label values come from enums and from the fleet, never from a client: a client
cannot add series, and the series of an engine that leaves the fleet go with it.

Metrics of pods are read when the page is requested, so there is nothing to keep in step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdconn.router.admission.connections import Dropped
from pdconn.router.events.caches import PrefixCaches
from pdconn.router.events.collector import PodCollector, Statuses
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.openai.requests import Direct, Route
from pdconn.router.pulls.pull import PrefixPull, PullEnd
from pdconn.router.routing.policy import Role
from pdconn.router.routing.routed_request import Decision, RequestEnd

_ENGINE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DECISION_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 2.5)


@dataclass(frozen=True, slots=True)
class RouterMetric:
    """A row of ``METRICS``; ``buckets`` are a histogram's."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


METRICS = (
    RouterMetric(
        "pdconn_router_requests_total",
        "counter",
        ("route", "outcome"),
        "Client requests by route and outcome",
    ),
    RouterMetric(
        "pdconn_router_inflight_requests",
        "gauge",
        (),
        "Client requests that have not finished",
    ),
    RouterMetric(
        "pdconn_router_connections",
        "gauge",
        (),
        "Open connections of clients",
    ),
    RouterMetric(
        "pdconn_router_connections_dropped_total",
        "counter",
        ("reason",),
        "Connections of clients that the router closed early, by reason; accept_failed: it could "
        "not open one (file descriptors)",
    ),
    RouterMetric(
        "pdconn_router_body_bytes",
        "gauge",
        (),
        "Bytes of request bodies that are held until an engine's answer begins",
    ),
    RouterMetric(
        "pdconn_router_direct_requests_total",
        "counter",
        ("reason",),
        "Requests that decode served without a ticket, by reason; no_prefill: prefill is down",
    ),
    RouterMetric(
        "pdconn_router_retries_total",
        "counter",
        ("role", "engine"),
        "Retries on another engine after a failure of this one",
    ),
    RouterMetric(
        "pdconn_router_unused_tickets_total",
        "counter",
        ("outcome",),
        "Tickets that their requests did not use; returned: prefill was asked to free the blocks",
    ),
    RouterMetric(
        "pdconn_router_engine_up",
        "gauge",
        ("role", "engine"),
        "1 while the engine is up, 0 from a failure until its /health answers 200",
    ),
    RouterMetric(
        "pdconn_router_engine_draining",
        "gauge",
        ("role", "engine"),
        "1 while the engine finishes its requests and gets no new ones",
    ),
    RouterMetric(
        "pdconn_router_time_to_ticket_seconds",
        "histogram",
        (),
        "Time from sending a request to prefill until its ticket arrived",
        _ENGINE_SECONDS,
    ),
    RouterMetric(
        "pdconn_router_decode_first_byte_seconds",
        "histogram",
        (),
        "Time from sending a request to decode until the first byte of the answer's body",
        _ENGINE_SECONDS,
    ),
    RouterMetric(
        "pdconn_router_decisions_total",
        "counter",
        ("policy", "decision"),
        "Routing decisions; hand_over: prefill, then decode; decode_alone: decode only",
    ),
    RouterMetric(
        "pdconn_router_decision_seconds",
        "histogram",
        (),
        "Time from a complete request body to a decision, tokenizing included",
        _DECISION_SECONDS,
    ),
    RouterMetric(
        "pdconn_router_decisions_without_lookup_total",
        "counter",
        (),
        "Routing decisions without a lookup of the prompt's prefix",
    ),
    RouterMetric(
        "pdconn_router_prompt_tokens_total",
        "counter",
        (),
        "Tokens of the prompts whose prefix was looked up",
    ),
    RouterMetric(
        "pdconn_router_predicted_hit_tokens_total",
        "counter",
        ("role",),
        "Of those, tokens predicted to be cached at the first choice of each role",
    ),
    RouterMetric(
        "pdconn_router_reported_tokens_total",
        "counter",
        ("kind",),
        "Prompt tokens where prefill reported its cache hit: predicted, cached, prompt (all)",
    ),
    RouterMetric(
        "pdconn_router_prefix_pulls_total",
        "counter",
        ("outcome",),
        "Prefixes that prefill was to pull from another engine (--pull-above), by what came of it",
    ),
    RouterMetric(
        "pdconn_router_prefix_pull_tokens_total",
        "counter",
        (),
        "Tokens that prefill pulled from another engine instead of computing them",
    ),
    RouterMetric(
        "pdconn_router_pod_blocks",
        "gauge",
        ("pod",),
        "Blocks in the pod's prefix cache",
    ),
    RouterMetric(
        "pdconn_router_pod_unknown_removals_total",
        "counter",
        ("pod",),
        "Removals of blocks that the pod was not known to hold",
    ),
    RouterMetric(
        "pdconn_router_pod_refused_blocks_total",
        "counter",
        ("pod",),
        "Stored blocks that were ignored because the pod already holds the maximum",
    ),
    RouterMetric(
        "pdconn_router_pod_event_lag_seconds",
        "gauge",
        ("pod",),
        "Time from the pod's latest event to its arrival in the index",
    ),
    RouterMetric(
        "pdconn_router_pod_complete",
        "gauge",
        ("pod",),
        "1 while everything in the pod's prefix cache is known",
    ),
    RouterMetric(
        "pdconn_router_pod_events_total",
        "counter",
        ("pod",),
        "KV events applied",
    ),
    RouterMetric(
        "pdconn_router_pod_undecodable_events_total",
        "counter",
        ("pod",),
        "KV events skipped because they could not be decoded",
    ),
    RouterMetric(
        "pdconn_router_pod_malformed_messages_total",
        "counter",
        ("pod",),
        "KV event messages that could not be decoded at all",
    ),
    RouterMetric(
        "pdconn_router_pod_event_gaps_total",
        "counter",
        ("pod",),
        "Gaps in the pod's sequence of KV event batches",
    ),
    RouterMetric(
        "pdconn_router_pod_event_replays_total",
        "counter",
        ("pod",),
        "Replays of KV events requested from the pod",
    ),
    RouterMetric(
        "pdconn_router_pod_restarts_total",
        "counter",
        ("pod",),
        "Engine restarts noticed in the pod's KV events",
    ),
)
"""Every metric of the router, as ``GET /metrics`` names it."""

_ROWS = {row.name.removeprefix("pdconn_router_"): row for row in METRICS}


class TicketEnd(Enum):
    """What happened to an unused ticket: the label ``outcome`` of ``unused_tickets_total``."""

    RETURNED = "returned"
    REFUSED = "refused"
    NO_ENGINE = "no_engine"
    TOO_MANY = "too_many"


class RouterMetrics:
    """One router's counters."""

    def __init__(self, engines: EngineRegistry) -> None:
        self.registry = CollectorRegistry()
        self._engines = engines
        self._shown: set[tuple[str, str]] = set()
        self._requests = self._counter("requests_total")
        self._direct = self._counter("direct_requests_total")
        self._retries = self._counter("retries_total")
        self._tickets = self._counter("unused_tickets_total")
        self._up = self._gauge("engine_up")
        self._draining = self._gauge("engine_draining")
        self.inflight = self._gauge("inflight_requests")
        self.connections = self._gauge("connections")
        self.body_bytes = self._gauge("body_bytes")
        self._dropped = self._counter("connections_dropped_total")
        self.time_to_ticket = self._histogram("time_to_ticket_seconds")
        self.decode_first_byte = self._histogram("decode_first_byte_seconds")
        self._decisions = self._counter("decisions_total")
        self._decision_seconds = self._histogram("decision_seconds")
        self._without_lookup = self._counter("decisions_without_lookup_total")
        self._prompt_tokens = self._counter("prompt_tokens_total")
        self._hit_tokens = self._counter("predicted_hit_tokens_total")
        self._reported = self._counter("reported_tokens_total")
        self._pulls = self._counter("prefix_pulls_total")
        self._pulled_tokens = self._counter("prefix_pull_tokens_total")
        self._touch_all()

    def _counter(self, name: str) -> Counter:
        row = _ROWS[name]
        return Counter(row.name, row.help, row.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        row = _ROWS[name]
        return Gauge(row.name, row.help, row.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        row = _ROWS[name]
        return Histogram(
            row.name, row.help, row.labels, registry=self.registry, buckets=row.buckets
        )

    def _touch_all(self) -> None:
        """Make every series exist: 0 instead of no data until it first counts."""
        for route in Route:
            for ended in RequestEnd:
                self._requests.labels(route.path, ended.value)
        for reason in Direct:
            self._direct.labels(reason.value)
        for dropped in Dropped:
            self._dropped.labels(dropped.value)
        for ticket in TicketEnd:
            self._tickets.labels(ticket.value)
        for end in PullEnd:
            self._pulls.labels(end.value)
        for role in Role:
            self._hit_tokens.labels(role.value)
        for kind in ("predicted", "cached", "prompt"):
            self._reported.labels(kind)
        self.fleet_changed()

    # The fleet

    def fleet_changed(self) -> None:
        """Show the engines of the fleet; the series of engines that left are removed."""
        shown = {(role.value, name) for role in Role for name in self._engines.of(role)}
        for gone in self._shown - shown:
            for family in (self._retries, self._up, self._draining):
                family.remove(*gone)
        for role, engine in shown:
            self._retries.labels(role, engine)
            self._up.labels(role, engine).set(self._engines.outage(engine) is None)
            self._draining.labels(role, engine).set(self._engines.is_draining(engine))
        self._shown = shown

    def engine_up(self, engine: str, up: bool) -> None:
        """Show whether an engine is up, in each of its roles."""
        for role in self._engines.roles(engine):
            self._up.labels(role.value, engine).set(1 if up else 0)

    def watch(self, caches: PrefixCaches, statuses: Statuses, policy: str) -> None:
        """Show the pods too, and the policy's decisions from the start."""
        self.registry.register(PodCollector(caches, statuses, _ROWS))
        for alone in (False, True):
            self._decisions.labels(policy, _decision(alone))

    # Requests

    def request_ended(self, route: str, end: RequestEnd) -> None:
        """Count a client's request; ``route`` is a path that the router serves."""
        self._requests.labels(route, end.value).inc()

    def connection_dropped(self, reason: Dropped) -> None:
        """Count a client's connection that the router closed early."""
        self._dropped.labels(reason.value).inc()

    def served_direct(self, reason: Direct) -> None:
        """Count a request that decode serves without a ticket."""
        self._direct.labels(reason.value).inc()

    def retried(self, role: Role, engine: str) -> None:
        """Count a retry on another engine; of an engine that left the fleet, nothing."""
        if (role.value, engine) in self._shown:
            self._retries.labels(role.value, engine).inc()

    def ticket_unused(self, end: TicketEnd) -> None:
        """Count a ticket that its request did not use."""
        self._tickets.labels(end.value).inc()

    def decided(self, decision: Decision) -> None:
        """Count a decision."""
        ranking = decision.ranking
        self._decisions.labels(decision.policy, _decision(ranking.alone)).inc()
        self._decision_seconds.observe(decision.took_s)
        if decision.lookup is None:
            self._without_lookup.inc()
            return
        self._prompt_tokens.inc(decision.num_tokens)
        for role, ordered in ((Role.PREFILL, ranking.prefill), (Role.DECODE, ranking.decode)):
            if ordered:
                self._hit_tokens.labels(role.value).inc(ordered[0].candidate.hit.tokens)

    def reported(self, decision: Decision, prefill: str, cached_tokens: int) -> None:
        """Count what prefill reported as cached, beside what was predicted."""
        if decision.lookup is not None:
            self._reported.labels("predicted").inc(decision.hit_tokens(prefill))
            self._reported.labels("cached").inc(max(0, cached_tokens))
            self._reported.labels("prompt").inc(decision.num_tokens)

    def prefix_pulled(self, pull: PrefixPull) -> None:
        """Count a pull that has ended."""
        if pull.end is not None:
            self._pulls.labels(pull.end.value).inc()
        if pull.end is PullEnd.TAKEN:
            self._pulled_tokens.inc(pull.saved)

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)


def _decision(alone: bool) -> str:
    return "decode_alone" if alone else "hand_over"
