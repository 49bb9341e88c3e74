"""Builds the parts of a router from its settings."""

from __future__ import annotations

import logging
import time

from pdconn.router.access.api_keys import EngineKey
from pdconn.router.events.caches import PrefixCaches
from pdconn.router.fleet.engine_client import EngineAnswer, EngineClient
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.loads import LoadPoller
from pdconn.router.handover.abandoned import AbandonedRequests
from pdconn.router.handover.decode import AskedDecode
from pdconn.router.handover.early_leg import EarlyLegs
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.prefetch import Prefetches
from pdconn.router.handover.prefill import Prefill
from pdconn.router.handover.prefix_pull import PrefixPulls
from pdconn.router.handover.prompt_meter import PromptMeter
from pdconn.router.handover.role_follower import EngineReporter, RoleFollower
from pdconn.router.handover.ticket_return import TicketReturner
from pdconn.router.handover.tries import EngineTries
from pdconn.router.openai.requests import REPORT_MODE
from pdconn.router.prefix.compiled import extension
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.pulls.planner import PullPlanner
from pdconn.router.pulls.prefill_patience import PrefillPatience
from pdconn.router.router_limits import Limits
from pdconn.router.router_metrics import RouterMetrics
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Policy
from pdconn.router.routing.routed_request import EventWatcher
from pdconn.router.routing.session_table import SessionTable
from pdconn.router.routing.tokenize import Tokeniser

log = logging.getLogger(__name__)


def make_handover(
    config: ProxyConfig,
    client: EngineClient,
    router: RequestRouter,
    tries: EngineTries,
    planner: PullPlanner,
    *,
    limits: Limits,
    watchers: tuple[EventWatcher, ...] = (),
) -> Handover[EngineAnswer]:
    """The hand-over of requests through prefill and decode."""
    tickets = TicketReturner(
        tries.engines,
        client,
        tries.metrics,
        give_up_s=config.times.lease_s / 3,  # later, the lease frees the blocks soon enough
        most_returns=limits.most_ticket_returns,
    )
    pulls = PrefixPulls(planner, client, tries.health, tickets)
    abandoned = AbandonedRequests(tickets, limits.patience_s, limits.late_prefill_s)
    reuses_tokens, streams = config.routing.reuse_tokens, config.streams
    prefill = Prefill(
        client,
        router,
        pulls,
        tries,
        PrefillPatience(config.times.prefill_timeout_s, time.monotonic),
        reuses_tokens,
        streams.are_on,
    )
    early = EarlyLegs(
        tries,
        abandoned,
        router.decisions,
        streams.stream_chunk,
        streams.max_streams,
        reuses_tokens,
    )
    return Handover(
        tries.engines,
        client,
        router,
        tries.metrics,
        abandoned,
        prefill,
        tries,
        Prefetches(client, router, pulls, tries.metrics, config.sessions),
        AskedDecode(client, router, tries, abandoned),
        early if streams.are_on else None,
        watchers,
    )


def make_roles(
    config: ProxyConfig, engines: EngineRegistry, router: RequestRouter, metrics: RouterMetrics
) -> RoleFollower:
    """The component that lets roles follow the load."""
    reporter = EngineReporter(engines, router.loads, router.sessions)
    meter = PromptMeter(router.loads.inflight)
    return RoleFollower(config.roles, engines, reporter, meter, metrics)


def make_router(
    config: ProxyConfig,
    policy: Policy,
    *,
    engines: EngineRegistry,
    client: EngineClient,
    planner: PullPlanner,
    limits: Limits,
    engine_key: EngineKey,
) -> RequestRouter:
    """The component that decides where each request goes."""
    return RequestRouter(
        engines,
        policy,
        _caches(config),
        _tokeniser(engines, client, config, limits, engine_key),
        LoadPoller(engines, client, lease_s=config.times.lease_s),
        decodes_alone=config.engines.decodes_alone,
        pulls=None if config.routing.pull_above is None else planner,
        sessions=SessionTable(config.sessions.max_sessions),
    )


def _caches(config: ProxyConfig) -> PrefixCaches:
    if extension.module is None:
        why = extension.why_not
        log.info(
            "pdconn: prefix index=python, which takes several times the processor time: %s", why
        )
    return PrefixCaches(
        scheme=config.routing.scheme(),
        seed=config.routing.hash_seed,
        weights=config.routing.weights,
        eagle_groups=frozenset(config.routing.eagle_groups),
        counts_copies=REPORT_MODE not in config.admission.allow_xargs,
    )


def _tokeniser(
    engines: EngineRegistry,
    client: EngineClient,
    config: ProxyConfig,
    limits: Limits,
    engine_key: EngineKey,
) -> Tokeniser:
    return Tokeniser(
        engines,
        client,
        timeout_s=config.times.tokenize_timeout_s,
        most_tokens=limits.most_tokens,
        max_nbytes=limits.most_token_nbytes,
        authorization=engine_key.authorization,
        shows_models=config.listen.shows_models,
    )
