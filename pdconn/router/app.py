"""HTTP routes of the router, its refusals, and how each request ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict

from pdconn.router.access.keys import ApiKeys, requiring
from pdconn.router.access.log import current, logging_access
from pdconn.router.admin.probes import Probes
from pdconn.router.admission.bodies import BodyReader
from pdconn.router.admission.budget import HeldBody
from pdconn.router.admission.connections import ClientAdmission
from pdconn.router.config import ProxyConfig
from pdconn.router.errors import Busy, EngineFailure, NoEngineLeft
from pdconn.router.fleet.client import (
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    OutOfResources,
)
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.stream import StreamEnd, relay
from pdconn.router.openai.headers import REQUEST_ID_HEADER, from_client
from pdconn.router.openai.requests import Route, parse_body
from pdconn.router.refusals import refusing
from pdconn.router.routing.policy import Role
from pdconn.router.routing.routed_request import RequestEnd, RoutedRequest
from pdconn.router.routing.timeline import Timeline
from pdconn.sidechannel.quiet_log import QuietLog

log = logging.getLogger(__name__)

_SERVED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/health",
    "/livez",
    "/readyz",
)

_ENDS = {
    StreamEnd.ENGINE_FAILED: RequestEnd.BROKEN_STREAM,
    StreamEnd.CLIENT_LEFT: RequestEnd.CLIENT_LEFT,
}


class RouterApp:
    """Answers clients."""

    def __init__(
        self,
        handover: Handover,
        probes: Probes,
        bodies: BodyReader,
        config: ProxyConfig,
        keys: ApiKeys | None,
    ) -> None:
        self._handover = handover
        self._probes = probes
        self._bodies = bodies
        self._xargs: Collection[str] = config.xargs
        self._busy_log = QuietLog(log)
        self._config = config
        self._keys = keys
        self._engines = handover.engines
        self._health = handover.health
        self._metrics = handover.metrics
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
        middlewares = [
            self.admission.observing,
            logging_access(self._ended),
            refusing(_SERVED, name_engines=self._config.show_engines),
            *([] if self._keys is None else [requiring(self._keys)]),
        ]
        app = web.Application(middlewares=middlewares)
        for route in Route:
            app.router.add_post(route.path, self._generating(route), expect_handler=_continue)
        app.router.add_get("/v1/models", self._models, allow_head=False, expect_handler=_continue)
        self._probes.add_to(app, name_engines=self._config.show_engines)
        return app

    def _ended(self, request: RoutedRequest) -> None:
        """Keep the final outcome for the admin pages, and count it."""
        outcome = request.outcome()
        if request.decision is not None:
            self._handover.router.decisions.end(request.decision, outcome)
        self._metrics.times.ended(request.body.route, outcome)

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
                current().end = end
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
        if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
            self._metrics.times.first_token(route, time.perf_counter() - current().began_s)
        response, end = await relay(http, answer, request_id, name_engine=self._config.show_engines)
        if end is StreamEnd.ENGINE_FAILED:
            why = "failed in the middle of an answer"
            self._health.report_down(answer.engine, why, request_id)
            log.error("pdconn: stream broken engine=%s request=%s", answer.engine, request_id)
        ok = RequestEnd.OK if answer.status < 400 else RequestEnd.ENGINE_ERROR
        return response, _ENDS.get(end, ok)

    async def _answer(self, route: Route, http: web.Request) -> tuple[EngineAnswer, str]:
        """An engine's answer, and the request's id; the body is held no longer than that."""
        request_id, headers = self._identify(http)
        with HeldBody(self._bodies.budget) as held:
            body = parse_body(route, await self._bodies.read(http, held), self._xargs)
            request = current().routed = RoutedRequest(
                request_id, headers, body, held, timeline=Timeline(current().began_s)
            )
            held.when_free = request.drop_body
            del body
            return await self._handover.answer(request), request_id

    async def _models(self, http: web.Request) -> web.StreamResponse:
        request_id, headers = self._identify(http)
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
            response, _ = await relay(
                http, answer, request_id, name_engine=self._config.show_engines
            )
            return response
        raise NoEngineLeft(Role.DECODE.value, self._engines.failures(Role.DECODE, failures))

    def _identify(self, http: web.Request) -> tuple[str, CIMultiDict[str]]:
        """The request's id, the client's if it sent one, and the headers for engines."""
        headers = from_client(http.headers)
        request_id = current().request_id = headers[REQUEST_ID_HEADER]
        if not self._config.passes_authorization:
            headers.popall("Authorization", None)
        return request_id, headers


async def _continue(http: web.Request) -> None:
    """Ask for the body where the client waits for that; other expectations are ignored.

    RFC 9110, section 10.1.1.  aiohttp's own handler refuses them before any middleware runs,
    so that neither the access log nor the metrics tell of the request.
    """
    if http.version >= HttpVersion11 and http.headers["Expect"].lower() == "100-continue":
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # of the answer, which begins after this
