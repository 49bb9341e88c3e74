"""The HTTP side of the proxy: routes, refusals and how each request ended."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from pdconn.router.debug_page import DebugPage
from pdconn.router.errors import BadBody, BodyTooLarge, Miss, NoEngineLeft, NoSuchRoute, Refusal
from pdconn.router.fleet.client import ConnectFailed, ConnectionLost, EngineAnswer
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.stream import REQUEST_ID_HEADER, Ending, relay
from pdconn.router.metrics import Outcome
from pdconn.router.openai.headers import keep_end_to_end
from pdconn.router.openai.requests import Exchange, Route, parse_request
from pdconn.router.routing.policy import Role

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
#: What clients sent is in our answers: no browser is to guess that they are something else.
_AS_SAID = {"X-Content-Type-Options": "nosniff"}

_ENDINGS = {Ending.ENGINE_DIED: Outcome.BROKEN_STREAM, Ending.CLIENT_LEFT: Outcome.CLIENT_LEFT}


class RouterApp:
    """Answers clients; everything it needs is given to it."""

    def __init__(self, handover: Handover, board: DebugPage, max_body_nbytes: int) -> None:
        self._handover = handover
        self._board = board
        self._engines = handover.engines
        self._health = handover.health
        self._metrics = handover.metrics
        self._max_body_nbytes = max_body_nbytes
        self._page_body = _PAGE.read_bytes()
        self._page_headers = _page_headers(self._page_body)
        self._num_inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def app(self) -> web.Application:
        """The routes, as an aiohttp application."""
        app = web.Application(client_max_size=self._max_body_nbytes, middlewares=[_refusals])
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
        """Wait until no generating request is left, or time is up."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def _generating(self, route: Route) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            outcome = Outcome.REFUSED
            self._count_inflight(1)
            try:
                response, outcome = await self._generate(route, http)
            except NoEngineLeft as refusal:
                outcome = Outcome.NO_ENGINE
                log.warning("%s path=%s", refusal, route.path)
                raise
            except asyncio.CancelledError:
                outcome = Outcome.CUT_OFF if self._draining else Outcome.CLIENT_LEFT
                raise
            finally:
                self._count_inflight(-1)
                self._metrics.request_ended(route, outcome)
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
    ) -> tuple[web.StreamResponse, Outcome]:
        request = parse_request(route, await self._read_body(http))
        exchange = Exchange(request, *_identify(http))
        answer = await self._handover.answer(exchange)
        return await self._pass_on(http, answer, exchange)

    async def _pass_on(
        self, http: web.Request, answer: EngineAnswer, exchange: Exchange
    ) -> tuple[web.StreamResponse, Outcome]:
        response, ending = await relay(http, answer, exchange.request_id)
        if ending is Ending.ENGINE_DIED:
            why = "died in the middle of an answer"
            self._health.report_down(answer.engine, why, exchange.request_id)
            log.error("stream broken engine=%s request=%s", answer.engine, exchange.request_id)
        ok = Outcome.OK if answer.status < 400 else Outcome.ENGINE_ERROR
        return response, _ENDINGS.get(ending, ok)

    async def _read_body(self, http: web.Request) -> bytes:
        """The body, refused before it is read where its length is announced."""
        if (http.content_length or 0) > self._max_body_nbytes:
            raise BodyTooLarge(self._max_body_nbytes)
        try:
            return await http.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise BodyTooLarge(self._max_body_nbytes) from error
        except (web.RequestPayloadError, ConnectionError) as error:
            raise BadBody("body", "as many bytes as announced", "fewer") from error

    async def _models(self, http: web.Request) -> web.StreamResponse:
        request_id, headers = _identify(http)
        misses: list[Miss] = []
        for engine in self._engines.live(Role.DECODE):
            try:
                answer = await self._handover.upstream.get(engine, "/v1/models", headers)
            except (ConnectFailed, ConnectionLost) as error:
                self._metrics.asked_in_vain(Role.DECODE, engine)
                self._health.report_down(engine, str(error), request_id)
                misses.append(Miss(engine, str(error)))
                continue
            response, _ = await relay(http, answer, request_id)
            return response
        raise NoEngineLeft(Role.DECODE.value, self._engines.misses(Role.DECODE, misses))

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
        return _json(self._board.state())

    async def _route(self, http: web.Request) -> web.StreamResponse:
        request_id = http.match_info["request_id"]
        if http.query.get("snapshot"):
            return _json(self._board.snapshot(request_id))
        return _json(self._board.route(request_id))

    async def _report_metrics(self, http: web.Request) -> web.StreamResponse:
        del http
        return web.Response(
            body=self._metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _page_headers(page: bytes) -> dict[str, str]:
    """Nothing runs on the page but its own script and style, and it asks nobody but us.

    It shows what clients sent.  Should that ever get into it as a script, a browser would not
    find its digest here.
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
        **_AS_SAID,
    }


def _json(body: bytes) -> web.Response:
    return web.json_response(body=body, headers={"Cache-Control": "no-store", **_AS_SAID})


def _identify(http: web.Request) -> tuple[str, CIMultiDict[str]]:
    """A request's id, the client's if it brought one, and the headers to send."""
    headers = keep_end_to_end(http.headers)
    request_id = headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex
    headers[REQUEST_ID_HEADER] = request_id
    # We have read the body as JSON, and vLLM refuses it under any other name.
    headers["Content-Type"] = "application/json"
    return request_id, headers


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors of the proxy's own, in the shape that OpenAI clients read."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return _refuse(refusal)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        return _refuse(NoSuchRoute(request.method, request.path, _SERVED))


def _refuse(refusal: Refusal) -> web.Response:
    headers = {"Retry-After": "1"} if isinstance(refusal, NoEngineLeft) else {}
    return web.json_response(body=refusal.body(), status=refusal.status, headers=headers)
