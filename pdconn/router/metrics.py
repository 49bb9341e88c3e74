"""What the proxy counts and times, for Prometheus.

Each proxy has a registry of its own, so that two in one process (a test, a
notebook) do not meet.  Label values come from enums and from the fleet, never
from a client: a client cannot grow the table, and engines that go leave it.
"""

from __future__ import annotations

from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.openai.requests import Direct, Route
from pdconn.router.routing.policy import Role

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Outcome(Enum):
    """How a client's request ended."""

    OK = "ok"
    REFUSED = "refused"
    ENGINE_ERROR = "engine_error"
    NO_ENGINE = "no_engine"
    CLIENT_LEFT = "client_left"
    BROKEN_STREAM = "broken_stream"
    CUT_OFF = "cut_off"


class TicketFate(Enum):
    """What became of a ticket whose request will not use it."""

    RETURNED = "returned"
    REFUSED = "refused"
    NO_ENGINE = "no_engine"
    TOO_MANY = "too_many"


class ProxyMetrics:
    """The proxy's counters, all under ``pdconn_proxy_``."""

    def __init__(self, engines: EngineRegistry) -> None:
        self.registry = CollectorRegistry()
        self._engines = engines
        self._shown: set[tuple[str, str]] = set()
        self._requests = Counter(
            "pdconn_proxy_requests",
            "Requests by route and by how they ended",
            ["route", "outcome"],
            registry=self.registry,
        )
        self._direct = Counter(
            "pdconn_proxy_direct",
            "Requests that decode served without a ticket, by reason",
            ["reason"],
            registry=self.registry,
        )
        self._retries = Counter(
            "pdconn_proxy_retries",
            "Times an engine was asked in vain and the next one was tried",
            ["role", "engine"],
            registry=self.registry,
        )
        self._tickets = Counter(
            "pdconn_proxy_unused_tickets",
            "Tickets whose request did not use them, by what became of them",
            ["fate"],
            registry=self.registry,
        )
        self._up = Gauge(
            "pdconn_proxy_engine_up",
            "1 while an engine is believed to be up",
            ["role", "engine"],
            registry=self.registry,
        )
        self._draining = Gauge(
            "pdconn_proxy_engine_draining",
            "1 while an engine gets nothing new",
            ["role", "engine"],
            registry=self.registry,
        )
        self.inflight = Gauge(
            "pdconn_proxy_inflight",
            "Generating requests that are not finished",
            registry=self.registry,
        )
        self.time_to_ticket = Histogram(
            "pdconn_proxy_time_to_ticket_seconds",
            "From sending a request to prefill until its ticket is here",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.decode_first_byte = Histogram(
            "pdconn_proxy_decode_first_byte_seconds",
            "From sending a request to decode until the first byte of its answer",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._show_everything()

    def _show_everything(self) -> None:
        """A counter that was never touched shows 0 instead of nothing."""
        for route in Route:
            for outcome in Outcome:
                self._requests.labels(route.path, outcome.value)
        for reason in Direct:
            self._direct.labels(reason.value)
        for fate in TicketFate:
            self._tickets.labels(fate.value)
        self.fleet_changed()

    def fleet_changed(self) -> None:
        """Show the engines of now; the counts of those that are gone go with them."""
        shown = {(role.value, name) for role in Role for name in self._engines.of(role)}
        for gone in self._shown - shown:
            for family in (self._retries, self._up, self._draining):
                family.remove(*gone)
        for role, engine in shown:
            self._retries.labels(role, engine)
            self._up.labels(role, engine).set(self._engines.outage(engine) is None)
            self._draining.labels(role, engine).set(self._engines.is_draining(engine))
        self._shown = shown

    def request_ended(self, route: Route, outcome: Outcome) -> None:
        """Count a request by how it ended."""
        self._requests.labels(route.path, outcome.value).inc()

    def went_direct(self, reason: Direct) -> None:
        """Count a request that decode serves without a ticket."""
        self._direct.labels(reason.value).inc()

    def asked_in_vain(self, role: Role, engine: str) -> None:
        """Count an engine that was tried and skipped, unless it is gone by now."""
        if (role.value, engine) in self._shown:
            self._retries.labels(role.value, engine).inc()

    def ticket_unused(self, fate: TicketFate) -> None:
        """Count a ticket that its request did not use."""
        self._tickets.labels(fate.value).inc()

    def engine_up(self, engine: str, up: bool) -> None:
        """Show whether an engine is believed to be up, in each of its roles."""
        for role in self._engines.roles(engine):
            self._up.labels(role.value, engine).set(1 if up else 0)

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)
