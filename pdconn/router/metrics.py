"""The router's counters, built from the table of its metrics.

Each router has a registry of its own, so that two in one process (a test, a notebook) do not
share counts.  Label values come from enums and from the fleet, never from a client: a client
cannot add series, and the series of an engine that leaves the fleet go with it.

Metrics of pods are read when the page is requested, so there is nothing to keep in step.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdconn.router.admission.connections import Dropped
from pdconn.router.events.caches import PrefixCaches
from pdconn.router.events.collector import PodCollector, Statuses
from pdconn.router.exposition import add_process, render
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.latency import RequestTimes
from pdconn.router.metric_table import METRICS, DecisionKind, ReportedTokens, TicketEnd
from pdconn.router.openai.requests import Direct, Route
from pdconn.router.pulls.pull import PrefixPull, PullEnd
from pdconn.router.routing.policy import Role
from pdconn.router.routing.routed_request import Decision, RequestEnd

_ROWS = {row.name.removeprefix("pdconn_router_"): row for row in METRICS}


class RouterMetrics:
    """One router's counters."""

    def __init__(self, engines: EngineRegistry) -> None:
        self.registry = CollectorRegistry()
        self.times = RequestTimes(self.registry)
        add_process(self.registry)
        self._engines = engines
        self._shown: set[tuple[str, str]] = set()
        self._requests = self._counter("requests_total")
        self._handed_over = self._counter("handed_over_requests_total")
        self._direct = self._counter("direct_requests_total")
        self._retries = self._counter("retries_total")
        self._tickets = self._counter("unused_tickets_total")
        self._up = self._gauge("engine_up")
        self._draining = self._gauge("engine_draining")
        self.inflight = self._gauge("inflight_requests")
        self.queued = self._gauge("queued_requests")
        self.queue_seconds = self._histogram("queue_seconds")
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
        for role in Role:
            self._hit_tokens.labels(role.value)
        for family, name in (
            (self._direct, "direct_requests_total"),
            (self._dropped, "connections_dropped_total"),
            (self._tickets, "unused_tickets_total"),
            (self._pulls, "prefix_pulls_total"),
            (self._reported, "reported_tokens_total"),
        ):
            ((label, values),) = _ROWS[name].values.items()
            for one in values:
                family.labels(**{label: one.value})
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
        for decision in DecisionKind:
            self._decisions.labels(policy, decision.value)

    # Requests

    def request_ended(self, route: str, end: RequestEnd) -> None:
        """Count a client's request; ``route`` is a path that the router serves."""
        self._requests.labels(route, end.value).inc()

    def connection_dropped(self, reason: Dropped) -> None:
        """Count a client's connection that the router closed early."""
        self._dropped.labels(reason.value).inc()

    def decode_answered(self, direct: Direct | None) -> None:
        """Count a request that decode answered; ``direct``: why without a ticket."""
        if direct is None:
            self._handed_over.inc()
        else:
            self._direct.labels(direct.value).inc()

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
        kind = DecisionKind.DECODE_ALONE if ranking.alone else DecisionKind.HAND_OVER
        self._decisions.labels(decision.policy, kind.value).inc()
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
            for kind, num_tokens in (
                (ReportedTokens.PREDICTED, decision.hit_tokens(prefill)),
                (ReportedTokens.CACHED, max(0, cached_tokens)),
                (ReportedTokens.PROMPT, decision.num_tokens),
            ):
                self._reported.labels(kind.value).inc(num_tokens)

    def prefix_pulled(self, pull: PrefixPull) -> None:
        """Count a pull that has ended."""
        if pull.end is not None:
            self._pulls.labels(pull.end.value).inc()
        if pull.end is PullEnd.TAKEN:
            self._pulled_tokens.inc(pull.saved)

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return render(self.registry)
