"""The standard health service of gRPC.

Source: https://github.com/grpc/grpc/blob/master/doc/health-checking.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError

from pdconn.router.picker.ext_proc import HealthCheckRequest, HealthCheckResponse
from pdconn.router.picker.rpc.call import INVALID_ARGUMENT, NOT_FOUND, Call, CallFailed
from pdconn.router.picker.rpc.gateway_connection import Handler

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
_SERVICE = "/grpc.health.v1.Health"


class RpcHealth:
    """Whether services are ready.

    Args:
        services: which follow ``set_ready``; they are not ready at first.
        living: services that are as long as this process answers.
    """

    def __init__(self, services: Iterable[str], living: Iterable[str]) -> None:
        self._status = dict.fromkeys(services, NOT_SERVING) | dict.fromkeys(living, SERVING)
        self._following = tuple(services)
        self._changed = asyncio.Event()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of the service's methods, by path."""
        return {f"{_SERVICE}/Check": self._check, f"{_SERVICE}/Watch": self._watch}

    def set_ready(self, *, is_ready: bool) -> None:
        """Services are ready, or are not."""
        status = SERVING if is_ready else NOT_SERVING
        for service in self._following:
            self._status[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _check(self, call: Call) -> None:
        service = await _asked(call)
        if service not in self._status:
            raise CallFailed(NOT_FOUND, f"no such service: {service}")
        await _tell(call, self._status[service])

    async def _watch(self, call: Call) -> None:
        service = await _asked(call)
        told: int | None = None
        while True:
            changed, status = self._changed, self._status.get(service, SERVICE_UNKNOWN)
            if status != told:
                await _tell(call, status)
                told = status
            await changed.wait()


async def _asked(call: Call) -> str:
    """The service that a call asks for."""
    raw = await call.read()
    try:
        return str(HealthCheckRequest.FromString(raw or b"").service)
    except DecodeError as error:
        raise CallFailed(INVALID_ARGUMENT, str(error)) from error


async def _tell(call: Call, status: int) -> None:
    await call.write(HealthCheckResponse(status=status).SerializeToString())
