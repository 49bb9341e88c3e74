"""The table of the router's Prometheus metrics, and of their labels' values.

Label values come from enums (``labels``), from the router's own paths and from the fleet, never
from a client.
"""

from __future__ import annotations

from pdconn.router.admission.connections import Dropped
from pdconn.router.exposition import BUILD_INFO, RouterMetric
from pdconn.router.labels import CallRefused, LabelValue, PickEnd, RequestEnd, RoleVerdict
from pdconn.router.openai.requests import Direct
from pdconn.router.pulls.pull_outcome import PullEnd

_ENGINE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DECISION_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 2.5)
_CLIENT_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 15, 30, 60,
    120, 300,
)  # fmt: skip


class TicketEnd(LabelValue):
    """What happened to an unused ticket: the label ``outcome`` of ``unused_tickets_total``."""

    RETURNED = ("returned", "Prefill was asked to free the blocks.")
    REFUSED = ("refused", "Decode did not take it back; the lease frees the blocks.")
    NO_ENGINE = ("no_engine", "No decode engine could take it back; the lease frees the blocks.")
    TOO_MANY = ("too_many", "Too many were being returned; the lease frees the blocks.")


class DecisionKind(LabelValue):
    """The label ``decision`` of ``decisions_total``."""

    HAND_OVER = ("hand_over", "Prefill, then decode.")
    DECODE_ALONE = ("decode_alone", "Decode only.")


class EarlyStart(LabelValue):
    """Whether decode was asked early: the label ``start`` of ``streams_total``."""

    STARTED = ("started", "Decode was asked before prefill answered.")
    QUEUED = (
        "queued",
        "Prefill answered, or failed, before the requests ahead of this one were computed but for "
        "`--stream-chunk` tokens.",
    )
    TOO_MANY = ("too_many", "`--max-streams` requests waited at the decode engine.")
    UNKNOWN_LENDER = (
        "unknown_lender",
        "The prefill engine has issued no ticket since it came up, runs another connector, or "
        "chooses among data-parallel ranks itself.",
    )
    SAME_ENGINE = ("same_engine", "One engine was chosen for both roles.")
    NEEDS_TOKENS = ("needs_tokens", "A chat with `--reuse-tokens`: decode needs prefill's answer.")


class ReportedTokens(LabelValue):
    """The label ``kind`` of ``reported_tokens_total``."""

    PREDICTED = ("predicted", "That the router expected prefill to hold.")
    CACHED = ("cached", "That prefill reported as cached.")
    PROMPT = ("prompt", "All tokens of these prompts.")


class PromiseEnd(LabelValue):
    """What became of a promise to keep a session: the label ``outcome`` of ``promises_total``."""

    MADE = ("made", "A turn's KV is kept for the next turn.")
    USED = ("used", "The next turn has come back to it.")
    BROKEN = ("broken", "It was given up before its time; the session's next answer tells why.")
    REFUSED = ("refused", "The engine keeps nothing: no block is cached, or too many are.")


class PrefetchEnd(LabelValue):
    """What became of a prefetch: the label ``outcome`` of ``prefetches_total``."""

    DONE = ("done", "The engine holds the prompt.")
    HELD = ("held", "The engine held it already.")
    ALONE = ("alone", "A decode engine will serve the request alone, and holds its prefix.")
    FAILED = ("failed", "The engine failed or refused, or none was up.")
    LATE = ("late", "The engine was busy with requests for `--prefetch-timeout`.")
    TOO_MANY = ("too_many", "Its client, or all clients, had as many under way as allowed.")


METRICS = (
    RouterMetric(
        "pdconn_router_sessions",
        "gauge",
        (),
        "Sessions that clients have named, of those that the router remembers",
    ),
    RouterMetric(
        "pdconn_router_promises_total",
        "counter",
        ("outcome",),
        "Promises of engines to keep a session, as their answers told, by outcome",
        values={"outcome": PromiseEnd},
    ),
    RouterMetric(
        "pdconn_router_prefetches_total",
        "counter",
        ("outcome",),
        "Prefetches by outcome",
        values={"outcome": PrefetchEnd},
    ),
    RouterMetric(
        "pdconn_router_prefetches_running",
        "gauge",
        (),
        "Prefetches under way, those that wait for their engine among them",
    ),
    RouterMetric(
        "pdconn_router_requests_total",
        "counter",
        ("route", "outcome"),
        "Client requests by route and outcome",
        values={"outcome": RequestEnd},
    ),
    RouterMetric(
        "pdconn_router_gateway_calls_refused_total",
        "counter",
        ("reason",),
        "Calls of gateways that the picker refused, or ended for a fault in them, by reason",
        values={"reason": CallRefused},
    ),
    RouterMetric(
        "pdconn_router_picks_total",
        "counter",
        ("answered_by",),
        "Answers to requests that the picker sent on, by what the gateway made of its choice",
        values={"answered_by": PickEnd},
    ),
    RouterMetric(
        "pdconn_router_inflight_requests",
        "gauge",
        (),
        "Client requests that have not finished, those that wait for a place among them",
    ),
    RouterMetric(
        "pdconn_router_queued_requests",
        "gauge",
        (),
        "Client requests that wait for a place (--max-queue)",
    ),
    RouterMetric(
        "pdconn_router_queue_seconds",
        "histogram",
        (),
        "Time that requests waited for a place, of those that found none free",
        _ENGINE_SECONDS,
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
        "Connections of clients that the router closed early, or could not open, by reason",
        values={"reason": Dropped},
    ),
    RouterMetric(
        "pdconn_router_body_bytes",
        "gauge",
        (),
        "Bytes of request bodies that are held until an engine's answer begins",
    ),
    RouterMetric(
        "pdconn_router_handed_over_requests_total",
        "counter",
        (),
        "Requests that decode answered with a ticket of prefill",
    ),
    RouterMetric(
        "pdconn_router_streams_total",
        "counter",
        ("start",),
        "Requests to be handed over, by whether decode was asked early (--streams)",
        values={"start": EarlyStart},
    ),
    RouterMetric(
        "pdconn_router_direct_requests_total",
        "counter",
        ("reason",),
        "Requests that decode answered without a ticket, by reason",
        values={"reason": Direct},
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
        "Tickets that their requests did not use, by outcome",
        values={"outcome": TicketEnd},
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
        "Time from sending a request to decode, or from prefill's answer if decode was asked "
        "before it (--streams), until the first byte of decode's answer; 0 if decode was first",
        _ENGINE_SECONDS,
    ),
    RouterMetric(
        "pdconn_router_decisions_total",
        "counter",
        ("policy", "decision"),
        "Routing decisions by policy and kind",
        values={"decision": DecisionKind},
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
        "Prompt tokens where prefill reported its cache hit",
        values={"kind": ReportedTokens},
    ),
    RouterMetric(
        "pdconn_router_prefix_pulls_total",
        "counter",
        ("outcome",),
        "Prefixes that prefill was to pull from another engine (--pull-above), by outcome",
        values={"outcome": PullEnd},
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
    RouterMetric(
        "pdconn_router_request_seconds",
        "histogram",
        ("route",),
        "Time from a request's arrival to the last byte of its answer, of those that ended ok",
        _CLIENT_SECONDS,
    ),
    RouterMetric(
        "pdconn_router_time_to_first_token_seconds",
        "histogram",
        ("route",),
        "Time from a request's arrival to the first byte of its answer, of streamed answers",
        _CLIENT_SECONDS,
    ),
    RouterMetric(
        "pdconn_router_role_engines",
        "gauge",
        ("role",),
        "Engines that serve a role now; one that changes its role (--roles) serves none",
    ),
    RouterMetric(
        "pdconn_router_role_engines_wanted",
        "gauge",
        ("role",),
        "Engines that a role needs to keep its target, whatever it has (--roles); with static "
        "roles those that it has",
    ),
    RouterMetric(
        "pdconn_router_role_changes_total",
        "counter",
        ("role",),
        "Changes of an engine to a role that have begun (--roles)",
    ),
    RouterMetric(
        "pdconn_router_role_verdicts_total",
        "counter",
        ("verdict",),
        "Steps of the controller of roles, by what it decided, or why it moved nothing (--roles)",
        values={"verdict": RoleVerdict},
    ),
    BUILD_INFO,
)
"""Every metric of the router, as ``GET /metrics`` names it; the process metrics are separate."""
