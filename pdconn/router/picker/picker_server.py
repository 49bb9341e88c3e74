"""The gRPC server of ``pdconn picker``: a gateway's external processor, and its health.

It needs ``pdconn[gateway]``, and nothing else of the router imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdconn.router.access.listener_tls import HTTP_2
from pdconn.router.admin.probes import Probes
from pdconn.router.binding import url_of
from pdconn.router.picker.ext_proc import METHOD, SERVICE
from pdconn.router.picker.pick import PickedDecode, PickedPasses
from pdconn.router.picker.picker_service import PickerService
from pdconn.router.picker.rpc.gateway_connection import CallRules
from pdconn.router.picker.rpc.rpc_health import RpcHealth
from pdconn.router.picker.rpc.rpc_server import RpcServer
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import CannotListen
from pdconn.router.router_limits import LIMITS, Limits
from pdconn.router.router_server import EngineReady, Running, Services, client_api, running_router
from pdconn.router.routing.policy import Policy

HEALTH_EVERY_S = 1.0
KEEPALIVE_S = 20.0
"""A connection that is silent for this long is probed, and closed after as long again: else the
requests of a gateway whose host has vanished would keep their places."""
LIVENESS, READINESS = "liveness", "readiness"
"""Names of services by which probes of endpoint pickers ask, of the Gateway API's protocol."""
#: Beside the body, a message has a head.
_HEAD_NBYTES = 1 << 20


@asynccontextmanager
async def running_picker(
    config: ProxyConfig,
    on_ready: Callable[[EngineReady], None] = lambda progress: None,
    policy: Policy | None = None,
    limits: Limits = LIMITS,
) -> AsyncIterator[Running]:
    """Serve gateways while the block runs; leaving it drains.

    Raises as :func:`pdconn.router.router_server.running_router`.
    """
    async with running_router(config, _listening, on_ready, policy, limits) as running:
        yield running


@asynccontextmanager
async def _listening(services: Services, sock: socket.socket) -> AsyncIterator[str]:
    config, asked = services.config, services.handover
    decode = PickedDecode(asked.client, asked.router, asked.tries, asked.abandoned)
    passes = PickedPasses(asked.client, asked.router, asked.tries)
    api = client_api(services, asked.with_decode(decode), passes)
    service = PickerService(api, services.probes)
    health = RpcHealth(("", SERVICE, READINESS), (LIVENESS,))
    health.set_ready(is_ready=await services.probes.is_ready())
    tls, listen = services.tls, config.listen
    if tls is not None:
        tls.speak(HTTP_2)
    context = None if tls is None else lambda: tls.context
    server = RpcServer(_rules(service, health, config), sock, context)
    try:
        await server.start()
    except OSError as error:
        raise CannotListen(listen.host, listen.port, error.strerror or str(error)) from error
    reporting = asyncio.create_task(_report_health(health, services.probes))
    try:
        yield url_of("grpc" if tls is None else "grpcs", listen.host, sock)
    finally:
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting
        health.set_ready(is_ready=False)
        stopping = asyncio.create_task(server.stop(config.times.drain_timeout_s))
        await service.drain(config.times.drain_timeout_s)
        await stopping


def _rules(service: PickerService, health: RpcHealth, config: ProxyConfig) -> CallRules:
    return CallRules(
        {METHOD: service.process, **health.handlers},
        config.admission.max_body_nbytes + _HEAD_NBYTES,
        KEEPALIVE_S,
    )


async def _report_health(health: RpcHealth, probes: Probes) -> None:
    """Keep the health of gRPC as that of ``/readyz``."""
    while True:
        health.set_ready(is_ready=await probes.is_ready())
        await asyncio.sleep(HEALTH_EVERY_S)
