"""Liveness, readiness and health of the router, for orchestrators and load balancers.

=========  ==========================================================================
/livez     200 while the process runs, also while it drains and without engines
/readyz    200 while it accepts new requests: not while it drains, nor while no engine could
           serve one; ``/ready`` is the same
/health    200 while it can serve requests, with the state of each engine; ``degraded`` without
           prefill
=========  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from pdconn.router.access.access_log import PROBES
from pdconn.router.fleet.health import Health

UNAVAILABLE = "unavailable"
_HEADERS: Mapping[str, str] = {"Cache-Control": "no-store"}


@dataclass(frozen=True, slots=True)
class ProbePage:
    """An answer to a probe, as JSON."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: _HEADERS)


class Probes:
    """Answers ``/livez``, ``/readyz`` and ``/health``, on any listener."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._draining = False

    def start_draining(self) -> None:
        """Report not ready from now on."""
        self._draining = True

    def add_to(self, app: web.Application, *, name_engines: bool) -> None:
        """Register the routes; ``name_engines``: ``/health`` shows addresses and reasons."""

        async def report(http: web.Request) -> web.StreamResponse:
            page = await self.page(http.path, name_engines=name_engines)
            return web.json_response(body=page.body, status=page.status, headers=page.headers)

        for path in PROBES:
            app.router.add_get(path, report)

    async def is_ready(self) -> bool:
        """Whether new requests can be served."""
        return (await self.page("/readyz", name_engines=False)).status == 200

    async def page(self, path: str, *, name_engines: bool) -> ProbePage:
        """The page at one of ``PROBES``."""
        if path == "/livez":
            return _page({"status": "ok"}, ok=True)
        if path == "/health":
            page = await self._health.page(name_engines=name_engines)
            return _page(page, ok=page["status"] != UNAVAILABLE)
        if self._draining:
            return _page({"status": "draining"}, ok=False)
        status = (await self._health.page(name_engines=False))["status"]
        return _page({"status": status}, ok=status != UNAVAILABLE)


def _page(page: dict[str, object], *, ok: bool) -> ProbePage:
    return ProbePage(200 if ok else 503, msgspec.json.encode(page))
