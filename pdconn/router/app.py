"""HTTP routes of the router, its refusals, and how each request ended."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec
from aiohttp import web

from pdconn.router.admission.bodies import BodyReader
from pdconn.router.admission.budget import HeldBody
from pdconn.router.admission.connections import ClientAdmission
from pdconn.router.admission.log import QuietLog
from pdconn.router.debug_page import DebugPage
from pdconn.router.errors import Busy, EngineFailure, NoEngineLeft, NotFound, Refusal
from pdconn.router.fleet.client import (
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    OutOfResources,
)
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.stream import StreamEnd, relay
from pdconn.router.metrics import RequestEnd
from pdconn.router.openai.headers import REQUEST_ID_HEADER, from_client
from pdconn.router.openai.requests import Route, parse_body
from pdconn.router.routing.policy import Role
from pdconn.router.routing.routed_request import RoutedRequest

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SERVED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/health",
    "/metrics",
    "/",
    "/debug/state",
    "/debug/route/ID",
)
_PAGE = Path(__file__).with_name("page.html")
#: Answers contain what clients sent: browsers must not guess another content type.
_NOSNIFF = {"X-Content-Type-Options": "nosniff"}

_ENDS = {
    StreamEnd.ENGINE_FAILED: RequestEnd.BROKEN_STREAM,
    StreamEnd.CLIENT_LEFT: RequestEnd.CLIENT_LEFT,
}


class RouterApp:
    """Answers clients."""

    def __init__(
        self, handover: Handover, debug_page: DebugPage, bodies: BodyReader, xargs: Collection[str]
    ) -> None:
        self._handover = handover
        self._debug_page = debug_page
        self._engines = handover.engines
        self._health = handover.health
        self._metrics = handover.metrics
        self._bodies = bodies
        self._xargs = xargs
        self._busy_log = QuietLog(log)
        self._page_body = _PAGE.read_bytes()
        self._page_headers = _page_headers(self._page_body)
        self._num_inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def admission(self) -> ClientAdmission:
        """Of the connections that its requests come from."""
        return self._bodies.admission

    def app(self) -> web.Application:
        """The routes, as an aiohttp application."""
        app = web.Application(middlewares=[self.admission.observing, _refusals])
        for route in Route:
            app.router.add_post(route.path, self._generating(route))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._report_health)
        app.router.add_get("/metrics", self._report_metrics)
        app.router.add_get("/", self._page)
        app.router.add_get("/debug/state", self._state)
        app.router.add_get("/debug/route/{request_id:.+}", self._route)
        return app

    async def drain(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` until no generating request is left."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def _generating(self, route: Route) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            end = RequestEnd.REFUSED
            self._count_inflight(1)
            try:
                with self._bodies.budget.request():
                    response, end = await self._generate(route, http)
            except Busy as refusal:
                end = RequestEnd.BUSY
                self._busy_log.warning("pdconn: %s path=%s", refusal, route.path)
                raise
            except NoEngineLeft as refusal:
                end = RequestEnd.NO_ENGINE
                log.warning("pdconn: %s path=%s", refusal, route.path)
                raise
            except asyncio.CancelledError:
                end = RequestEnd.CUT_OFF if self._draining else RequestEnd.CLIENT_LEFT
                raise
            finally:
                self._count_inflight(-1)
                self._metrics.request_ended(route, end)
            return response

        return handle

    def _count_inflight(self, step: int) -> None:
        self._num_inflight += step
        self._metrics.inflight.set(self._num_inflight)
        if self._num_inflight == 0:
            self._idle.set()
        else:
            self._idle.clear()

    async def _generate(
        self, route: Route, http: web.Request
    ) -> tuple[web.StreamResponse, RequestEnd]:
        answer, request_id = await self._answer(route, http)
        response, end = await relay(http, answer, request_id)
        if end is StreamEnd.ENGINE_FAILED:
            why = "failed in the middle of an answer"
            self._health.report_down(answer.engine, why, request_id)
            log.error("pdconn: stream broken engine=%s request=%s", answer.engine, request_id)
        ok = RequestEnd.OK if answer.status < 400 else RequestEnd.ENGINE_ERROR
        return response, _ENDS.get(end, ok)

    async def _answer(self, route: Route, http: web.Request) -> tuple[EngineAnswer, str]:
        """An engine's answer, and the request's id; the body is held no longer than that."""
        with HeldBody(self._bodies.budget) as held:
            body = parse_body(route, await self._bodies.read(http, held), self._xargs)
            headers = from_client(http.headers)
            request = RoutedRequest(headers[REQUEST_ID_HEADER], headers, body, held)
            held.when_free = request.drop_body
            del body
            return await self._handover.answer(request), request.request_id

    async def _models(self, http: web.Request) -> web.StreamResponse:
        headers = from_client(http.headers)
        request_id = headers[REQUEST_ID_HEADER]
        failures: list[EngineFailure] = []
        for engine in self._engines.live(Role.DECODE):
            try:
                answer = await self._handover.client.get(engine, "/v1/models", headers)
            except OutOfResources:
                raise  # our own fault, and no engine's
            except (ConnectFailed, ConnectionLost) as error:
                self._metrics.retried(Role.DECODE, engine)
                self._health.report_down(engine, str(error), request_id)
                failures.append(EngineFailure(engine, str(error)))
                continue
            response, _ = await relay(http, answer, request_id)
            return response
        raise NoEngineLeft(Role.DECODE.value, self._engines.failures(Role.DECODE, failures))

    async def _report_health(self, http: web.Request) -> web.StreamResponse:
        del http
        page = await self._health.page()
        status = 200 if page["status"] == "ok" else 503
        return web.json_response(body=msgspec.json.encode(page), status=status)

    async def _page(self, http: web.Request) -> web.StreamResponse:
        del http
        return web.Response(body=self._page_body, headers=self._page_headers)

    async def _state(self, http: web.Request) -> web.StreamResponse:
        del http
        return _json(self._debug_page.state())

    async def _route(self, http: web.Request) -> web.StreamResponse:
        request_id = http.match_info["request_id"]
        if http.query.get("snapshot"):
            return _json(self._debug_page.snapshot(request_id))
        return _json(self._debug_page.route(request_id))

    async def _report_metrics(self, http: web.Request) -> web.StreamResponse:
        del http
        return web.Response(
            body=self._metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _page_headers(page: bytes) -> dict[str, str]:
    """A policy that allows the page's own script and style, and requests to this router.

    The page shows what clients sent.  If that ever got into it as a script, its digest would
    not be in the policy.
    """
    digests = {}
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        digest = hashlib.sha256(inside[1] if inside else b"").digest()
        digests[tag] = base64.b64encode(digest).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digests['script']}'; "
        f"style-src 'sha256-{digests['style']}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        **_NOSNIFF,
    }


def _json(body: bytes) -> web.Response:
    return web.json_response(body=body, headers={"Cache-Control": "no-store", **_NOSNIFF})


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The router's own errors, in the shape that OpenAI clients read."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return _refuse(refusal)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        seen = f"{request.method} {request.path}"
        return _refuse(NotFound("path", f"one of {', '.join(_SERVED)}", seen))


def _refuse(refusal: Refusal) -> web.Response:
    return web.json_response(body=refusal.body(), status=refusal.status, headers=refusal.headers)
