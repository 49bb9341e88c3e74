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

import msgspec
from aiohttp import web

from pdconn.router.fleet.health import Health

UNAVAILABLE = "unavailable"


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

        async def report_health(http: web.Request) -> web.StreamResponse:
            del http
            page = await self._health.page(name_engines=name_engines)
            return _answer(page, ok=page["status"] != UNAVAILABLE)

        app.router.add_get("/livez", self._live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/health", report_health)

    async def _live(self, http: web.Request) -> web.StreamResponse:
        del http
        return _answer({"status": "ok"}, ok=True)

    async def _ready(self, http: web.Request) -> web.StreamResponse:
        del http
        if self._draining:
            return _answer({"status": "draining"}, ok=False)
        status = (await self._health.page(name_engines=False))["status"]
        return _answer({"status": status}, ok=status != UNAVAILABLE)


def _answer(page: dict[str, object], *, ok: bool) -> web.Response:
    body = msgspec.json.encode(page)
    headers = {"Cache-Control": "no-store"}
    return web.json_response(body=body, status=200 if ok else 503, headers=headers)
