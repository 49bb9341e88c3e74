"""The gRPC server of ``pdconn picker``: a gateway's external processor, and its health.

It needs ``pdconn[gateway]``, and nothing else of the router imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health

from pdconn.router.access.listener_tls import ServerTls
from pdconn.router.admin.probes import Probes
from pdconn.router.binding import url_of
from pdconn.router.picker.ext_proc import CALL, SERVICE, ProcessingRequest, ProcessingResponse
from pdconn.router.picker.pick import PickedDecode, PickedPasses
from pdconn.router.picker.picker_service import PickerService
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import CannotListen
from pdconn.router.router_limits import LIMITS, Limits
from pdconn.router.router_server import EngineReady, Running, Services, client_api, running_router
from pdconn.router.routing.policy import Policy

HEALTH_EVERY_S = 1.0
KEEPALIVE_S = 20.0
"""A connection that is silent for this long is probed, and closed after as long again: else the
requests of a gateway whose host has vanished would keep their places."""
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
    health = grpc_health.HealthServicer()
    server = _server(service, health, config)
    url = _listen(server, config, sock, services.tls)
    await server.start()
    reporting = asyncio.create_task(_report_health(health, services.probes))
    try:
        yield url
    finally:
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting
        await health.enter_graceful_shutdown()
        stopping = asyncio.create_task(server.stop(config.times.drain_timeout_s))
        await service.drain(config.times.drain_timeout_s)
        await stopping


def _server(service: PickerService, health: Any, config: ProxyConfig) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", config.admission.max_body_nbytes + _HEAD_NBYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
            ("grpc.keepalive_timeout_ms", round(KEEPALIVE_S * 1000)),
            ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_S * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    )
    handler = grpc.stream_stream_rpc_method_handler(
        service.process,
        request_deserializer=ProcessingRequest.FromString,
        response_serializer=ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {CALL: handler}),)
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


def _listen(
    server: grpc.aio.Server, config: ProxyConfig, sock: socket.socket, tls: ServerTls | None
) -> str:
    """Listen on the address of ``sock``, which is closed: gRPC binds sockets of its own."""
    host = config.listen.host
    url = url_of("grpc" if tls is None else "grpcs", host, sock)
    port = sock.getsockname()[1]
    sock.close()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(tls))
    except RuntimeError as error:
        raise CannotListen(host, port, str(error)) from error
    return url


def _credentials(tls: ServerTls) -> Any:
    """Credentials that change with the files, which SIGHUP reads again."""

    def configuration(pair: tuple[bytes, bytes]) -> Any:
        return grpc.ssl_server_certificate_configuration([pair])

    used = [tls.pair]

    def fetch() -> Any:
        if tls.pair == used[0]:
            return None
        used[0] = tls.pair
        return configuration(tls.pair)

    return grpc.dynamic_ssl_server_credentials(configuration(tls.pair), fetch)


async def _report_health(health: Any, probes: Probes) -> None:
    """Keep the health of gRPC as that of ``/readyz``."""
    while True:
        ready = await probes.is_ready()
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await health.set(name, status.SERVING if ready else status.NOT_SERVING)
        await asyncio.sleep(HEALTH_EVERY_S)
