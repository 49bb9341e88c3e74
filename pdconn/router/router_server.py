"""The life cycle of a router: bind, wait for engines, serve, drain.

    bind ──► wait (--wait) ──► listen ──► serve ──SIGTERM──► not ready ──► drain ──► exit
      │         │ (--warm-up)    │                     (--drain-delay)  (--drain-timeout)
      └─────────┴────────────────┴─► CannotListen, EnginesMissing

Addresses are bound before the wait, so that a port in use is reported at once, and listening starts
after it, so that every accepted client is served.  The admin pages are available from before the
wait until after the drain.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from multidict import CIMultiDict

from pdconn.router.access.api_keys import ApiKeys, EngineKey
from pdconn.router.access.listener_tls import ServerTls
from pdconn.router.admin.admin_app import AdminApp
from pdconn.router.admin.debug_page import DebugPage
from pdconn.router.admin.probes import Probes
from pdconn.router.admission.connections import ClientAdmission
from pdconn.router.admission.listener import ADMIN_LIMITS, AdmittingSite, limits_of_process
from pdconn.router.admission.places import AdmissionQueue, BodyBudget, BodyReader
from pdconn.router.admission.server_log import ServerLog
from pdconn.router.assembly import make_handover, make_roles, make_router
from pdconn.router.binding import bind, bind_admin, cannot_listen_admin, url_of
from pdconn.router.events.feeds import EventFeeds
from pdconn.router.events.subscriber import FILES_A_SUBSCRIBER
from pdconn.router.fleet.engine_client import EngineAnswer, EngineClient
from pdconn.router.fleet.engine_registry import EngineRegistry, FleetFollower
from pdconn.router.fleet.health import Health
from pdconn.router.fleet.member import Role
from pdconn.router.fleet.sources import FleetWatch, Members
from pdconn.router.fleet.warm_up import FleetWarmUp
from pdconn.router.front.app import RouterApp
from pdconn.router.front.client_api import A, Admission, ClientApi, Passes
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.passing import PassThrough
from pdconn.router.handover.tries import EngineTries
from pdconn.router.openai.requests import Route, parse_body
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.pulls.planner import PullPlanner
from pdconn.router.reload import Reloader
from pdconn.router.router_errors import BadSetting, CannotListen, EngineFailure, EnginesMissing
from pdconn.router.router_limits import LIMITS, Limits
from pdconn.router.router_metrics import RouterMetrics
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Policy
from pdconn.router.routing.routed_request import RoutedRequest
from pdconn.router.tracing.spans import Tracing

log = logging.getLogger(__name__)

_BACKLOG = 1024
#: Seconds to write the last bytes of finished answers, before the others are cut off.
_CUT_OFF_S = 0.25
#: Seconds to read the rest of a refused body, so that the client reads the refusal before the
#: reset.
_UNREAD_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineReady:
    """One more engine answers, during the wait at the start."""

    engine: str
    after_s: float
    num_ready: int
    num_engines: int


@dataclass(frozen=True, slots=True)
class Running:
    """A serving router; ``reload`` reloads its files and returns the mistakes."""

    config: ProxyConfig
    url: str
    admin_url: str
    metrics: RouterMetrics
    router: RequestRouter
    reload: Callable[[], Awaitable[tuple[BadSetting, ...]]]


Listening = Callable[["Services", socket.socket], AbstractAsyncContextManager[str]]
"""Serves clients on a bound socket while the block runs; gives the URL, and drains at its end."""


@asynccontextmanager
async def running_proxy(
    config: ProxyConfig,
    on_ready: Callable[[EngineReady], None] = lambda progress: None,
    policy: Policy | None = None,
    limits: Limits = LIMITS,
) -> AsyncIterator[Running]:
    """Serve HTTP while the block runs; leaving it drains.  Raises as ``running_router``.

    >>> config = ProxyConfig.from_options([p], [d], port=0)  # doctest: +SKIP
    >>> async with running_proxy(config) as proxy:  # doctest: +SKIP
    ...     print(proxy.url)
    """
    async with running_router(config, _listening, on_ready, policy, limits) as running:
        yield running


@asynccontextmanager
async def running_router(
    config: ProxyConfig,
    listening: Listening,
    on_ready: Callable[[EngineReady], None] = lambda progress: None,
    policy: Policy | None = None,
    limits: Limits = LIMITS,
) -> AsyncIterator[Running]:
    """Serve by a front end while the block runs; leaving it drains.

    Raises:
        CannotListen: the address is not available.
        EnginesMissing: a role has no engine after ``config.times.wait_s``.
    """
    with ExitStack() as stack:
        sock = stack.enter_context(bind(config.listen.host, config.listen.port))
        admin = stack.enter_context(bind_admin(config))
        async with (
            _services(config, policy or config.routing.make_policy(), limits) as services,
            _serving_admin(services.admin, admin, config),
        ):
            if config.times.wait_s is not None:
                await _wait_for_engines(services, config, limits.ready_pause_s, on_ready)
            await services.warm_up.wait_until_warm()
            async with listening(services, sock) as url:
                yield Running(
                    config,
                    url,
                    url_of("http", config.listen.admin_host, admin),
                    services.handover.metrics,
                    services.handover.router,
                    services.reloader.reload_all,
                )
                services.probes.start_draining()
                await asyncio.sleep(config.times.drain_delay_s)


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a router that front ends, and this module, need."""

    config: ProxyConfig
    handover: Handover[EngineAnswer]
    bodies: BodyReader
    keys: ApiKeys | None
    engine_key: EngineKey
    tracing: Tracing | None
    admin: AdminApp
    probes: Probes
    tls: ServerTls | None
    reloader: Reloader
    warm_up: FleetWarmUp


@asynccontextmanager
async def _services(config: ProxyConfig, policy: Policy, limits: Limits) -> AsyncIterator[Services]:
    keys, engine_key = _keys(config)
    tls, tracing = config.listen.make_tls(), config.traces.make_tracing()
    engines = EngineRegistry(first_backoff_s=limits.first_backoff_s)
    metrics = RouterMetrics(engines)
    client = EngineClient(config.times.connect_timeout_s)
    alone, timeout_s = config.engines.decodes_alone, config.times.health_timeout_s
    health = Health(engines, client, metrics.engine_up, decodes_alone=alone, timeout_s=timeout_s)
    probes, planner = Probes(health), PullPlanner.from_floor(config.routing.pull_above or 1)
    router = make_router(
        config,
        policy,
        engines=engines,
        client=client,
        planner=planner,
        limits=limits,
        engine_key=engine_key,
    )
    feeds = EventFeeds(router.caches, computed=router.not_found)
    metrics.watch_pods(router.caches, feeds.statuses, policy.name)
    tries = EngineTries(engines, health, metrics, config.times.most_tries, alone)
    roles = make_roles(config, engines, router, metrics)
    watchers = (roles.meter,) if roles.is_on else ()
    handover = make_handover(
        config, client, router, tries, planner, limits=limits, watchers=watchers
    )
    warm_up = FleetWarmUp(
        engines, client, config.times.warm_up_s, partial(_send, handover), engine_key.authorization
    )
    health.when_up, roles.when_changed = warm_up.engine_up, warm_up.fleet_changed
    admin = AdminApp(DebugPage(router, feeds.statuses, roles.state), metrics, probes)
    fleet_changed = partial(
        _fleet_changed, engines, feeds, (health, metrics, router.loads, router, roles, warm_up)
    )
    try:
        watch = FleetWatch(config.engines.sources(), fleet_changed, limits.fleet_interval_s)
        async with watch, router.loads, roles:
            bodies = _admission(config, metrics, _files_of_fleet(engines, feeds))
            reloader = Reloader(config.engines.fleet, watch, keys, engine_key, tls)
            yield Services(
                config,
                handover,
                bodies,
                keys,
                engine_key,
                tracing,
                admin,
                probes,
                tls,
                reloader,
                warm_up,
            )
    finally:
        await warm_up.close()
        await _close(handover, limits)
        await feeds.close()
        await health.close()
        await client.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _keys(config: ProxyConfig) -> tuple[ApiKeys | None, EngineKey]:
    """The keys of clients, if they are checked, and the engines' key."""
    path = config.listen.api_key_file
    return None if path is None else ApiKeys(path), EngineKey(config.listen.engine_key_file)


async def _close(handover: Handover[EngineAnswer], limits: Limits) -> None:
    """End what is under way in the background."""
    await handover.prefetches.close()
    await handover.prefill.pulls.close(limits.patience_s)
    await handover.abandoned.close(limits.last_returns_s)
    await handover.router.tokeniser.models.close()


def _fleet_changed(
    engines: EngineRegistry,
    feeds: EventFeeds,
    followers: Iterable[FleetFollower],
    members: Members,
) -> None:
    changes = engines.update(members)
    if changes:
        log.info("pdconn: fleet changed %s", changes)
    for follower in followers:
        follower.fleet_changed()
    feeds.fleet_changed(members)


async def _send(handover: Handover[EngineAnswer], raw: bytes, headers: CIMultiDict[str]) -> None:
    """Send a body of the router's own through the hand-over."""
    request = RoutedRequest("pdconn-warm-up", headers, parse_body(Route.COMPLETIONS, raw))
    async with await handover.answer_request(request) as answer:
        await answer.read_rest()


@asynccontextmanager
async def _serving_admin(
    admin: AdminApp, sock: socket.socket, config: ProxyConfig
) -> AsyncIterator[None]:
    admission = ClientAdmission(ADMIN_LIMITS)
    app = admin.app(admission.observing)
    runner = web.AppRunner(app, access_log=None, logger=ServerLog(log), shutdown_timeout=_CUT_OFF_S)
    await runner.setup()
    try:
        try:
            await AdmittingSite(runner, sock, admission, backlog=_BACKLOG).start()
        except OSError as error:
            raise cannot_listen_admin(config, error) from error
        yield
    finally:
        await runner.cleanup()


def _files_of_fleet(engines: EngineRegistry, feeds: EventFeeds) -> int:
    """File descriptors for polling each engine's load and following each rank's KV events."""
    return len(engines.names) + FILES_A_SUBSCRIBER * len(feeds.statuses())


def _admission(config: ProxyConfig, metrics: RouterMetrics, num_reserved: int) -> BodyReader:
    """The limits of clients, from the options and this process's limits."""
    limits = limits_of_process(config.admission.stall_timeout_s, num_reserved)
    log.info("pdconn: admission connections=%d per_host=%d", limits.connections, limits.per_host)
    admission = ClientAdmission(limits, metrics.connection_dropped)
    budget = BodyBudget(config.admission.max_bodies_nbytes)
    queue = AdmissionQueue(
        config.admission.max_requests,
        config.admission.max_queue,
        config.admission.queue_timeout_s,
        metrics.request_queued,
    )
    metrics.show("queued_requests", lambda: len(queue))
    metrics.show("connections", lambda: len(admission))
    metrics.show("body_bytes", lambda: budget.nbytes)
    return BodyReader(admission, budget, queue, config.admission.max_body_nbytes)


def client_api(services: Services, handover: Handover[A], passes: Passes[A]) -> ClientApi[A]:
    """What a front end answers, by a hand-over of its own."""
    return ClientApi(
        handover,
        passes,
        Admission(services.bodies.queue, services.bodies.budget),
        services.config,
        keys=services.keys,
        engine_key=services.engine_key,
        tracing=services.tracing,
    )


@asynccontextmanager
async def _listening(services: Services, sock: socket.socket) -> AsyncIterator[str]:
    config, tls, handover = services.config, services.tls, services.handover
    api = client_api(services, handover, PassThrough(handover))
    router_app = RouterApp(api, services.probes, services.bodies)
    app = router_app.app()

    async def drain(app: web.Application) -> None:
        await api.drain_requests(config.times.drain_timeout_s)

    app.on_shutdown.append(drain)  # runs after the socket is closed
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=ServerLog(log),
        auto_decompress=False,  # compressed bodies are refused
        handler_cancellation=True,  # cancels the handler of a client that leaves
        lingering_time=_UNREAD_S,
        shutdown_timeout=_CUT_OFF_S,
    )
    await runner.setup()
    try:
        context = None if tls is None else lambda: tls.context
        site = AdmittingSite(runner, sock, router_app.admission, context=context, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise CannotListen(
                config.listen.host, config.listen.port, error.strerror or str(error)
            ) from error
        yield url_of("http" if tls is None else "https", config.listen.host, sock)
    finally:
        await runner.cleanup()
        await api.drain_requests(_CUT_OFF_S)  # requests that were cut off are counted


async def _wait_for_engines(
    services: Services,
    config: ProxyConfig,
    pause_s: float,
    on_ready: Callable[[EngineReady], None],
) -> None:
    """Wait until every engine answers and each role has one, or ``wait_s`` if each role has one."""
    engines, health, wait_s = (
        services.handover.engines,
        services.handover.tries.health,
        config.times.wait_s or 0.0,
    )
    started_s = time.monotonic()
    ready: set[str] = set()
    while True:
        reasons = await health.probe_all()
        waited_s = time.monotonic() - started_s
        for name in engines.names:
            if reasons[name] is None and name not in ready:
                ready.add(name)
                on_ready(EngineReady(name, waited_s, len(ready), len(engines.names)))
        complete = all(ready.intersection(engines.in_role(role)) for role in Role)
        if complete and all(name in ready or engines.is_draining(name) for name in engines.names):
            return
        if waited_s >= wait_s:
            break
        await asyncio.sleep(min(pause_s, wait_s - waited_s))
    if not complete:
        missing = (name for name in engines.names if name not in ready)
        failures = [EngineFailure(name, reasons[name] or "") for name in missing]
        failures += [_no_engine(role, config) for role in Role if not engines.in_role(role)]
        raise EnginesMissing(wait_s, tuple(failures))
    health.report_failed(reasons, "start")


def _no_engine(role: Role, config: ProxyConfig) -> EngineFailure:
    """The failure of a role without engines: a DNS name without addresses, or a file."""
    words = config.engines.prefill if role is Role.PREFILL else config.engines.decode
    sources = [*words, *([] if config.engines.fleet is None else [config.engines.fleet])]
    return EngineFailure(", ".join(sources), f"no {role.value} engine")
