"""A proxy's life: bind, wait for engines, serve, drain.

    bind ──► wait (if asked) ──► listen ──► serve ──SIGTERM──► drain ──► gone
      │         │                  │
      └─────────┴──────────────────┴─► CannotListen, EnginesMissing

The address is bound before the wait, so that a port in use is said at once; it
is listened on after it, so that a client that can connect will be served.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from pdconn.router.app import RouterApp
from pdconn.router.config import ProxyConfig
from pdconn.router.debug_page import DebugPage
from pdconn.router.errors import CannotListen, EnginesMissing, Miss
from pdconn.router.events.caches import PrefixCaches
from pdconn.router.events.feeds import EventFeeds
from pdconn.router.fleet.client import EngineClient
from pdconn.router.fleet.health import Health
from pdconn.router.fleet.loads import LoadPoller
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.fleet.sources import Members, Watch
from pdconn.router.handover.abandoned import AbandonedRequests
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.ticket_return import TicketReturner
from pdconn.router.metrics import ProxyMetrics
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.metrics import RoutingMetrics
from pdconn.router.routing.policy import Policy, Role
from pdconn.router.routing.tokenize import Tokeniser

log = logging.getLogger(__name__)

_BACKLOG = 1024
_PROBE_PAUSE_S = 0.5
#: To write the last bytes of what has finished, before all else is cut off.
_CUT_OFF_S = 0.25
#: For tickets on their way back, once the clients are gone.
_FAREWELL_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class EngineReady:
    """Progress of the wait at the start: one more engine answers."""

    engine: str
    after_s: float
    num_ready: int
    num_engines: int


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy that can be asked."""

    config: ProxyConfig
    url: str
    metrics: ProxyMetrics


@asynccontextmanager
async def running_proxy(
    config: ProxyConfig,
    on_ready: Callable[[EngineReady], None] = lambda progress: None,
    policy: Policy | None = None,
) -> AsyncIterator[Running]:
    """Serve while the block runs; leaving it drains.

    Raises:
        CannotListen: the address cannot be had.
        EnginesMissing: a role has no engine after ``config.wait_s``.

    >>> async with running_proxy(ProxyConfig.of([p], [d], port=0)) as proxy:  # doctest: +SKIP
    ...     print(proxy.url)
    """
    sock = _bind(config.host, config.port)
    try:
        async with _services(config, policy or config.make_policy()) as services:
            if config.wait_s is not None:
                await _wait_for_engines(services, config.wait_s, on_ready)
            async with _listening(services.proxy, sock, config):
                yield Running(config, _url_of(config.host, sock), services.metrics)
    finally:
        sock.close()


@dataclass(frozen=True, slots=True)
class _Services:
    """What a proxy is made of, as far as this module needs it again."""

    engines: EngineRegistry
    health: Health
    metrics: ProxyMetrics
    proxy: RouterApp


@asynccontextmanager
async def _services(config: ProxyConfig, policy: Policy) -> AsyncIterator[_Services]:
    engines = EngineRegistry((), ())
    metrics = ProxyMetrics(engines)
    upstream = EngineClient(config.connect_timeout_s)
    health = Health(engines, upstream, metrics)
    farewells = AbandonedRequests(TicketReturner(engines, upstream, metrics))
    caches = PrefixCaches(
        scheme=config.scheme(),
        seed=config.hash_seed,
        weights=config.weights,
        eagle_groups=frozenset(config.eagle_groups),
    )
    feeding = EventFeeds(caches)
    loads = LoadPoller(engines, upstream)
    steering = RequestRouter(
        engines,
        policy,
        caches,
        Tokeniser(engines, upstream),
        loads,
        RoutingMetrics(metrics.registry, policy.name),
    )
    steering.metrics.watch(caches, feeding.statuses)
    handover = Handover(engines, upstream, steering, health, metrics, farewells)
    proxy = RouterApp(handover, DebugPage(steering, feeding.statuses), config.max_body_nbytes)

    def fleet_changed(members: Members) -> None:
        changes = engines.update(members)
        if changes:
            log.info("fleet %s", changes)
        for follower in (health, metrics, loads, steering):
            follower.fleet_changed()
        feeding.fleet_changed(members)

    try:
        async with Watch(config.sources(), fleet_changed), loads:
            yield _Services(engines, health, metrics, proxy)
    finally:
        await farewells.close(min(_FAREWELL_GRACE_S, config.drain_timeout_s))
        await feeding.close()
        await health.close()
        await upstream.close()


@asynccontextmanager
async def _listening(
    proxy: RouterApp, sock: socket.socket, config: ProxyConfig
) -> AsyncIterator[None]:
    app = proxy.app()

    async def drain(app: web.Application) -> None:
        await proxy.drain(config.drain_timeout_s)

    app.on_shutdown.append(drain)  # runs when nothing is listened on any more
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,  # a client that leaves cancels its request
        shutdown_timeout=_CUT_OFF_S,
    )
    await runner.setup()
    try:
        site = web.SockSite(runner, sock, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise CannotListen(config.host, config.port, error.strerror or str(error)) from error
        yield
    finally:
        await runner.cleanup()
        await proxy.drain(_CUT_OFF_S)  # what was cut off says its farewells first


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise CannotListen(host, port, error.strerror or str(error)) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise CannotListen(host, port, error.strerror or str(error)) from error
    return sock


def _url_of(host: str, sock: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{sock.getsockname()[1]}"


async def _wait_for_engines(
    services: _Services, wait_s: float, on_ready: Callable[[EngineReady], None]
) -> None:
    """Until every engine answers, or time is up and some role has none."""
    engines, health = services.engines, services.health
    started_s = time.monotonic()
    ready: set[str] = set()
    while True:
        reasons = await health.probe_all()
        waited_s = time.monotonic() - started_s
        for name in engines.names:
            if reasons[name] is None and name not in ready:
                ready.add(name)
                on_ready(EngineReady(name, waited_s, len(ready), len(engines.names)))
        if all(name in ready for name in engines.names if not engines.is_draining(name)):
            return
        if waited_s >= wait_s:
            break
        await asyncio.sleep(min(_PROBE_PAUSE_S, wait_s - waited_s))
    if not all(ready.intersection(engines.of(role)) for role in Role):
        misses = (Miss(name, reasons[name] or "") for name in engines.names if name not in ready)
        raise EnginesMissing(wait_s, tuple(misses))
