"""The health service, asked by the client of ``grpcio-health-checking``."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdconn.router.picker.rpc.rpc_health import RpcHealth
from tests.fakes.event_loop import in_loop
from tests.router.picker.rpc.servers import channel_to, ended, serving

STATUS = health_pb2.HealthCheckResponse


def made() -> tuple[RpcHealth, Any]:
    health = RpcHealth(("", "readiness"), ("liveness",))
    return health, serving({}, others=health.handlers)


@in_loop
async def test_services_follow_what_is_ready_and_one_lives() -> None:
    health, server = made()
    async with server as port, channel_to(port) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check

        async def seen() -> list[int]:
            names = ("", "readiness", "liveness")
            asked = [check(health_pb2.HealthCheckRequest(service=name)) for name in names]
            return [answer.status for answer in await asyncio.gather(*asked)]

        assert await seen() == [STATUS.NOT_SERVING, STATUS.NOT_SERVING, STATUS.SERVING]
        health.set_ready(is_ready=True)
        assert await seen() == [STATUS.SERVING] * 3
        health.set_ready(is_ready=False)
        assert await seen() == [STATUS.NOT_SERVING, STATUS.NOT_SERVING, STATUS.SERVING]
        call = check(health_pb2.HealthCheckRequest(service="other"))
        assert await ended(call) == (grpc.StatusCode.NOT_FOUND, "no such service: other")


@in_loop
async def test_who_watches_is_told_of_changes_alone() -> None:
    health, server = made()
    async with server as port, channel_to(port) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        call = watch(health_pb2.HealthCheckRequest(service="readiness"))
        unknown = watch(health_pb2.HealthCheckRequest(service="other"))
        assert (await unknown.read()).status == STATUS.SERVICE_UNKNOWN
        assert (await call.read()).status == STATUS.NOT_SERVING
        health.set_ready(is_ready=False)
        health.set_ready(is_ready=True)
        assert (await call.read()).status == STATUS.SERVING
        for one in (call, unknown):
            one.cancel()


@pytest.mark.parametrize("raw", [b"\xff\xff", b"\x0a\x05a"])
@in_loop
async def test_what_is_no_message_is_refused(raw: bytes) -> None:
    _, server = made()
    async with server as port, channel_to(port) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")(raw)
        assert (await ended(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
