"""How long clients wait: histograms for Prometheus, and the last moments for the admin page.

::

    request ────────────► first token ──► end
       ├─ time_to_first_token ─┤   of streamed answers: others come as a whole
       └─ request_seconds ─────────────┤   of requests that ended well

Both count from a request's arrival, so that its body, the decision, prefill and the hand-over are
in them.  ``take`` hands what was seen since the last call to ``admin/history.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram

from pdconn.router.exposition import RouterMetric
from pdconn.router.openai.requests import Route
from pdconn.router.routing.routed_request import Outcome, RequestEnd

_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 15, 30, 60,
    120, 300,
)  # fmt: skip
MOST_KEPT = 4096
"""Times to a first token that are kept between two calls of ``take``; more are not."""

REQUEST_SECONDS = RouterMetric(
    "pdconn_router_request_seconds",
    "histogram",
    ("route",),
    "Time from a request's arrival to the last byte of its answer, of those that ended ok",
    _SECONDS,
)
FIRST_TOKEN_SECONDS = RouterMetric(
    "pdconn_router_time_to_first_token_seconds",
    "histogram",
    ("route",),
    "Time from a request's arrival to the first byte of its answer, of streamed answers",
    _SECONDS,
)
LATENCY_METRICS = (REQUEST_SECONDS, FIRST_TOKEN_SECONDS)


@dataclass(slots=True)
class Moment:
    """Requests that ended between two calls of ``take``, and first tokens that were sent.

    ``served`` had an answer of decode that is no error, ``handed_over`` those of them for which
    decode had a ticket; ``failed`` ended badly, and not by their client.
    """

    ended: int = 0
    failed: int = 0
    served: int = 0
    handed_over: int = 0
    first_tokens_s: list[float] = field(default_factory=list)


class RequestTimes:
    """One router's histograms, and the present moment."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests, self._first_tokens = (
            Histogram(row.name, row.help, row.labels, registry=registry, buckets=row.buckets)
            for row in LATENCY_METRICS
        )
        for route in Route:  # 0 instead of no data until the first one
            self._requests.labels(route.path)
            self._first_tokens.labels(route.path)
        self._moment = Moment()

    def first_token(self, route: Route, seconds: float) -> None:
        """The first byte of a streamed answer goes to its client."""
        self._first_tokens.labels(route.path).observe(seconds)
        if len(self._moment.first_tokens_s) < MOST_KEPT:
            self._moment.first_tokens_s.append(seconds)

    def ended(self, route: Route, outcome: Outcome) -> None:
        """A request whose body was good is over."""
        if outcome.end is RequestEnd.OK and outcome.total_s is not None:
            self._requests.labels(route.path).observe(outcome.total_s)
        moment = self._moment
        moment.ended += 1
        moment.failed += outcome.end is None or outcome.end.is_failure
        if outcome.decode is not None and (outcome.status or 0) < 400:
            moment.served += 1
            moment.handed_over += outcome.ticket_s is not None

    def take(self) -> Moment:
        """What happened since the last call."""
        taken, self._moment = self._moment, Moment()
        return taken
