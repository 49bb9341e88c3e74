"""The router's metrics, built from ``metric_table``.

Each router has its own registry, so that two in one process (a test, a notebook) do not share
counts.  Label values come from enums and from the fleet, never from a client: a client cannot add
series, and the series of an engine that leaves the fleet are removed.

The metrics of a routed request are derived from its events::

    request ────────────► first token ──► end
       ├─ time_to_first_token ─┤   of streamed answers: others come as a whole
       └─ request_seconds ─────────────┤   of requests that ended well

Both count from the request's arrival, so that its body, the decision, prefill and the hand-over are
included.  ``take_moment`` passes the counts since the previous call to ``admin/history.py``.

Metrics of pods are collected when the page is requested, so they cannot be out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdconn.router.admission.connections import Dropped
from pdconn.router.events.caches import PrefixCaches
from pdconn.router.events.collector import PodCollector, Statuses
from pdconn.router.exposition import add_process, render
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Role
from pdconn.router.labels import CallRefused, PickEnd, RequestEnd, RoleVerdict
from pdconn.router.metric_table import (
    METRICS,
    DecisionKind,
    PrefetchEnd,
    PromiseEnd,
    ReportedTokens,
    TicketEnd,
)
from pdconn.router.openai.requests import Route
from pdconn.router.prefix.compiled import extension
from pdconn.router.pulls.pull_outcome import PrefixPull, PullEnd
from pdconn.router.roles.role_controller import RoleDecision
from pdconn.router.routing.policy import Decision
from pdconn.router.routing.request_events import (
    Decided,
    Event,
    FirstByte,
    FirstToken,
    Passed,
    Prefilled,
    Pulled,
    RequestEnded,
    Streamed,
)
from pdconn.router.routing.routed_request import Outcome, RoutedRequest, first_byte_s

_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
_ROWS = {row.name.removeprefix("pdconn_router_"): row for row in METRICS}
_READ_LATER = ("pod_", "build_info")
"""Prefixes of the names of metrics that other collectors export."""
_OF_ENGINES = ("retries_total", "engine_up", "engine_draining")
MOST_KEPT = 4096
"""First-token times that are kept between two calls of ``take_moment``."""


@dataclass(slots=True)
class Moment:
    """Requests that ended between two calls of ``take_moment``, and their first tokens.

    ``served`` had a good answer of decode, ``handed_over`` those among them whose decode had a
    ticket; ``failed`` ended badly, and not because of their client.
    """

    ended: int = 0
    failed: int = 0
    served: int = 0
    handed_over: int = 0
    first_tokens_s: list[float] = field(default_factory=list)


class RouterMetrics:
    """The metrics of one router."""

    kinds: ClassVar[frozenset[type[Event]]] = frozenset(
        (Decided, Prefilled, FirstByte, Streamed, Passed, Pulled, FirstToken, RequestEnded)
    )

    def __init__(self, engines: EngineRegistry) -> None:
        self.registry = CollectorRegistry()
        add_process(self.registry, extension.index_kind())
        self._engines = engines
        self._shown: set[tuple[str, str]] = set()
        self._moment = Moment()
        self._roles_follow = False
        self._families: dict[str, Any] = {}
        for name, row in _ROWS.items():
            if not name.startswith(_READ_LATER):
                buckets = {"buckets": row.buckets} if row.kind == "histogram" else {}
                kind: Any = _KINDS[row.kind]
                self._families[name] = kind(
                    row.name, row.help, row.labels, registry=self.registry, **buckets
                )
        self._touch_all()

    def _touch_all(self) -> None:
        """Create every series: 0 instead of no data until the first count."""
        for route in Route:
            for ended in RequestEnd:
                self._families["requests_total"].labels(route.path, ended.value)
            for name in ("request_seconds", "time_to_first_token_seconds"):
                self._families[name].labels(route.path)
        for role in Role:
            self._families["predicted_hit_tokens_total"].labels(role.value)
            self._families["role_changes_total"].labels(role.value)
        for name, row in _ROWS.items():
            if len(row.labels) == 1 and row.labels[0] in row.values:
                for one in row.values[row.labels[0]]:
                    self._families[name].labels(one.value)
        self.fleet_changed()

    def show(self, name: str, read: Callable[[], float]) -> None:
        """Read a gauge, by its name in the table, whenever the page is requested."""
        self._families[name].set_function(read)

    # The fleet

    def roles_decided(self, decision: RoleDecision) -> None:
        """Note a step of the controller of roles."""
        self._roles_follow = True
        self._families["role_verdicts_total"].labels(decision.verdict.value).inc()
        for role in Role:
            serving = sum(one is role for one in decision.serves.values())
            self._families["role_engines"].labels(role.value).set(serving)
            self._families["role_engines_wanted"].labels(role.value).set(decision.wanted[role])
        if decision.verdict is RoleVerdict.BEGAN and decision.move is not None:
            self._families["role_changes_total"].labels(decision.move.goal.value).inc()

    def fleet_changed(self) -> None:
        """Add the series of new engines; remove those of engines that left."""
        retries, up, draining = (self._families[name] for name in _OF_ENGINES)
        shown = {(role.value, name) for role in Role for name in self._engines.in_role(role)}
        for gone in self._shown - shown:
            for family in (retries, up, draining):
                family.remove(*gone)
        for role, engine in shown:
            retries.labels(role, engine)
            up.labels(role, engine).set(self._engines.outage(engine) is None)
            draining.labels(role, engine).set(self._engines.is_draining(engine))
        self._shown = shown
        if not self._roles_follow:  # nothing else is wanted then
            for one in Role:
                number = len(self._engines.in_role(one))
                self._families["role_engines"].labels(one.value).set(number)
                self._families["role_engines_wanted"].labels(one.value).set(number)

    def engine_up(self, engine: str, up: bool) -> None:
        """Set whether an engine is up, in each of its roles."""
        for role in self._engines.roles(engine):
            self._families["engine_up"].labels(role.value, engine).set(1 if up else 0)

    def watch_pods(self, caches: PrefixCaches, statuses: Statuses, policy: str) -> None:
        """Export the metrics of pods, and the policy's decisions from the start."""
        self.registry.register(PodCollector(caches, statuses, _ROWS))
        for decision in DecisionKind:
            self._families["decisions_total"].labels(policy, decision.value)

    # Requests

    def request_ended(self, route: str, end: RequestEnd) -> None:
        """Count a client's request; ``route`` is a path that the router serves."""
        self._families["requests_total"].labels(route, end.value).inc()

    def request_queued(self, seconds: float) -> None:
        """Count a request that has waited for a place."""
        self._families["queue_seconds"].observe(seconds)

    def connection_dropped(self, reason: Dropped) -> None:
        """Count a client's connection that the router closed early."""
        self._families["connections_dropped_total"].labels(reason.value).inc()

    def call_refused(self, reason: CallRefused) -> None:
        """Count a gateway's call that was refused."""
        self._families["gateway_calls_refused_total"].labels(reason.value).inc()

    def pick_answered(self, end: PickEnd) -> None:
        """Count an answer to a request that a gateway was told where to send."""
        self._families["picks_total"].labels(end.value).inc()

    def retried(self, role: Role, engine: str) -> None:
        """Count a retry on another engine; ignores engines that left the fleet."""
        if (role.value, engine) in self._shown:
            self._families["retries_total"].labels(role.value, engine).inc()

    def ticket_unused(self, end: TicketEnd) -> None:
        """Count a ticket that its request did not use."""
        self._families["unused_tickets_total"].labels(end.value).inc()

    def promise_ended(self, end: PromiseEnd) -> None:
        """Count what became of a promise to keep a session."""
        self._families["promises_total"].labels(end.value).inc()

    def prefetch_ended(self, end: PrefetchEnd) -> None:
        """Count a prefetch."""
        self._families["prefetches_total"].labels(end.value).inc()

    def saw(self, request: RoutedRequest, event: Event) -> None:
        """Count an event of a routed request."""
        match event:
            case Decided(decision=decision, is_choice=True):
                self._decided(decision)
            case Prefilled():
                self._families["time_to_ticket_seconds"].observe(event.waited_s)
                if event.cached_tokens is not None and not event.has_borrowed:
                    self._reported(request.decision, event.engine, event.cached_tokens)
            case FirstByte(is_good=True):
                waited_s = first_byte_s(request.events, event)
                self._families["decode_first_byte_seconds"].observe(waited_s)
            case Streamed(start=start):
                self._families["streams_total"].labels(start.value).inc()
            case Passed(is_served=True, status=status) if status < 400:
                direct = request.direct
                if direct is None:
                    self._families["handed_over_requests_total"].inc()
                else:
                    self._families["direct_requests_total"].labels(direct.value).inc()
            case Pulled(pull=pull) if pull.end is not None:
                self._pulled(pull, pull.end)
            case FirstToken():
                self.first_token(request.body.route, event.at_s - request.arrived_s)
            case RequestEnded():
                self.routed_request_ended(request.body.route, request.outcome())

    def _decided(self, decision: Decision) -> None:
        ranking = decision.ranking
        kind = DecisionKind.DECODE_ALONE if ranking.alone else DecisionKind.HAND_OVER
        self._families["decisions_total"].labels(decision.policy, kind.value).inc()
        self._families["decision_seconds"].observe(decision.took_s)
        if decision.lookup is None:
            self._families["decisions_without_lookup_total"].inc()
            return
        self._families["prompt_tokens_total"].inc(decision.num_tokens)
        hits = self._families["predicted_hit_tokens_total"]
        for role, ordered in ((Role.PREFILL, ranking.prefill), (Role.DECODE, ranking.decode)):
            if ordered:
                hits.labels(role.value).inc(ordered[0].candidate.hit.tokens)

    def _reported(self, decision: Decision | None, prefill: str, cached_tokens: int) -> None:
        """Count the tokens that prefill reported as cached, beside the predicted ones."""
        if decision is not None and decision.lookup is not None:
            for kind, num_tokens in (
                (ReportedTokens.PREDICTED, decision.hit_tokens(prefill)),
                (ReportedTokens.CACHED, max(0, cached_tokens)),
                (ReportedTokens.PROMPT, decision.num_tokens),
            ):
                self._families["reported_tokens_total"].labels(kind.value).inc(num_tokens)

    def _pulled(self, pull: PrefixPull, end: PullEnd) -> None:
        self._families["prefix_pulls_total"].labels(end.value).inc()
        if end is PullEnd.TAKEN:
            self._families["prefix_pull_tokens_total"].inc(pull.saved)

    def first_token(self, route: Route, seconds: float) -> None:
        """Observe the time to the first byte of a streamed answer."""
        self._families["time_to_first_token_seconds"].labels(route.path).observe(seconds)
        if len(self._moment.first_tokens_s) < MOST_KEPT:
            self._moment.first_tokens_s.append(seconds)

    def routed_request_ended(self, route: Route, outcome: Outcome) -> None:
        """Observe a routed request that has ended."""
        if outcome.end is RequestEnd.OK and outcome.total_s is not None:
            self._families["request_seconds"].labels(route.path).observe(outcome.total_s)
        moment = self._moment
        moment.ended += 1
        moment.failed += outcome.end is None or outcome.end.is_failure
        if outcome.decode is not None and (outcome.status or 0) < 400:
            moment.served += 1
            moment.handed_over += outcome.had_ticket

    def take_moment(self) -> Moment:
        """The counts since the previous call."""
        taken, self._moment = self._moment, Moment()
        return taken

    def render(self) -> bytes:
        """The page in Prometheus' text format."""
        return render(self.registry)
