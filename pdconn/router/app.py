"""HTTP routes of the router, its refusals, and the outcome of each request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict

from pdconn.router.access.api_keys import ApiKeys, EngineKey, authorization_of, requiring
from pdconn.router.access.cors import allowing
from pdconn.router.access.middlewares import (
    Served,
    checking_heads,
    current,
    logging_access,
    refusing,
)
from pdconn.router.admin.probes import Probes
from pdconn.router.admission.connections import ClientAdmission
from pdconn.router.admission.places import BodyReader, HeldBody
from pdconn.router.fleet.engine_client import (
    EngineAnswer,
)
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.listing import ListedModels, Listing
from pdconn.router.handover.passing import Passing, PassThrough
from pdconn.router.handover.stream import ENGINE_HEADER, StreamEnd, relay
from pdconn.router.handover.tries import end_of
from pdconn.router.labels import RequestEnd
from pdconn.router.openai.bodies import AnswerReader
from pdconn.router.openai.forms import check_form
from pdconn.router.openai.passed import PASSED, Asks, PassedRoute
from pdconn.router.openai.requests import (
    KEY_HEADER,
    REQUEST_ID_HEADER,
    Route,
    asking,
    checked_fields,
    from_client,
    parse_any_body,
    parse_body,
    text,
)
from pdconn.router.openai.session_orders import (
    BROKEN_HEADER,
    KEPT_HEADER,
    SESSION_FIELD,
    SESSION_HEADER,
    SessionName,
    session_name,
    take_order,
    tenant_of,
)
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import (
    BadBody,
    Busy,
    HandoverRequired,
    NoEngineLeft,
    RequestTimedOut,
)
from pdconn.router.routing.request_events import Event, FirstToken, Received, TurnKept
from pdconn.router.routing.routed_request import RoutedRequest
from pdconn.router.tracing.spans import NOT_TRACED, RequestSpans, Tracing
from pdconn.sidechannel.quiet_log import QuietLog
from transport.errors import shown

log = logging.getLogger(__name__)

_MODEL_NAME = "/v1/models/{name}"
_ACCEPTED = 202
_PREFETCH, _RELEASE = "/v1/kv/prefetch", "/v1/kv/release"
_SERVED = (
    *(route.path for route in Route),
    _PREFETCH,
    _RELEASE,
    "/v1/models",
    _MODEL_NAME,
    "/health",
    "/livez",
    "/readyz",
    "/ready",
    *(route.name for route in PASSED),
)

_Answered = tuple[EngineAnswer | Listing, str]
"""The answer of an engine, or a list of models, and the request's id."""

_ENDS = {
    StreamEnd.ENGINE_FAILED: RequestEnd.BROKEN_STREAM,
    StreamEnd.CLIENT_LEFT: RequestEnd.CLIENT_LEFT,
    StreamEnd.TIMED_OUT: RequestEnd.TIMED_OUT,
}


class _OpenRequests:
    """Counts the requests that an engine answers or is asked to answer."""

    def __init__(self) -> None:
        self.number = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.is_draining = False

    def count_open(self, step: int) -> None:
        self.number += step
        if self.number == 0:
            self.idle.set()
        else:
            self.idle.clear()


class RouterApp:
    """Answers clients."""

    def __init__(
        self,
        handover: Handover,
        probes: Probes,
        bodies: BodyReader,
        config: ProxyConfig,
        keys: ApiKeys | None,
        *,
        engine_key: EngineKey,
        tracing: Tracing | None,
    ) -> None:
        self._tracing = tracing
        self._handover = handover
        self._passes = PassThrough(handover)
        self._listed = ListedModels(handover)
        self._probes = probes
        self._bodies = bodies
        self._busy_log = QuietLog(log)
        self._config = config
        self._passes_authorization = config.listen.passes_authorization
        self._keys = keys
        self._engine_key = engine_key
        self._open = _OpenRequests()
        handover.metrics.show("inflight_requests", lambda: self._open.number)

    @property
    def admission(self) -> ClientAdmission:
        """The admission of the connections that requests arrive on."""
        return self._bodies.admission

    def app(self) -> web.Application:
        """The routes, as an aiohttp application."""
        middlewares = [
            self.admission.observing,
            logging_access(self._ended, with_blocks=self._config.traces.log_blocks),
            refusing(_SERVED, name_engines=self._config.listen.show_engines),
            checking_heads,
            *([] if self._keys is None else [requiring(self._keys)]),
        ]
        app = web.Application()
        if self._config.listen.cors_origins:
            middlewares.insert(2, allowing(app, self._config.listen.cors_origins))
        app.middlewares.extend(middlewares)
        for route in Route:
            handler = self._counting(route.path, partial(self._answer, route))
            app.router.add_post(route.path, handler, expect_handler=_continue)
        for passed in PASSED:
            handler = self._counting(passed.name, partial(self._pass, passed))
            app.router.add_route(passed.method, passed.path, handler, expect_handler=_continue)
        for path, answer in ((_PREFETCH, self._prefetch), (_RELEASE, self._release)):
            handler = self._counting(path, answer)
            app.router.add_post(path, handler, expect_handler=_continue)
        models = self._counting("/v1/models", self._models)
        app.router.add_get("/v1/models", models, allow_head=False, expect_handler=_continue)
        # Last, and as a pattern: names of models contain slashes.
        path, model = "/v1/models/{name:.+}", self._counting(_MODEL_NAME, self._model)
        app.router.add_get(path, model, allow_head=False, expect_handler=_continue)
        self._probes.add_to(app, name_engines=self._config.listen.show_engines)
        return app

    def _ended(self, request: RoutedRequest) -> None:
        """Keep the final outcome for the admin pages."""
        if (decision := request.decision) is not None:
            self._handover.router.decisions.end_decision(decision, request.outcome())

    async def drain_requests(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` until no request is open at an engine."""
        self._open.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._open.idle.wait()

    def _counting(
        self, path: str, answer: Callable[[web.Request], Awaitable[_Answered]]
    ) -> Handler:
        """A handler that relays what ``answer`` returns, and counts it in flight and by outcome."""

        async def handle(http: web.Request) -> web.StreamResponse:
            end, status = RequestEnd.REFUSED, None
            served = current()
            if self._tracing is not None:
                served.span = self._tracing.begin_span(
                    f"{http.method} {path}", http.headers, method=http.method, route=path
                )
            self._open.count_open(1)
            try:
                response, end = await self._admitted(http, answer)
                status = response.status
            except Busy as refusal:
                end = RequestEnd.BUSY
                self._busy_log.warning("pdconn: %s path=%s", refusal, path)
                raise
            except NoEngineLeft as refusal:
                end = RequestEnd.NO_ENGINE
                log.warning("pdconn: %s path=%s", refusal, path)
                raise
            except (HandoverRequired, RequestTimedOut) as refusal:
                late = isinstance(refusal, RequestTimedOut)
                end = RequestEnd.TIMED_OUT if late else RequestEnd.NO_HANDOVER
                log.warning("pdconn: %s path=%s", refusal, path)
                raise
            except asyncio.CancelledError:
                end = RequestEnd.CUT_OFF if self._open.is_draining else RequestEnd.CLIENT_LEFT
                if served.answer is not None and served.answer.is_whole:
                    end = self._whole(served, served.answer)  # the client has the whole answer
                raise
            finally:
                self._open.count_open(-1)
                self._handover.metrics.request_ended(path, end)
                served.end = end
                if served.span is not NOT_TRACED:
                    _end_span(served, status)
            return response

        return handle

    async def _admitted(
        self, http: web.Request, answer: Callable[[web.Request], Awaitable[_Answered]]
    ) -> tuple[web.StreamResponse, RequestEnd]:
        """The answer, obtained within a place in flight and the request time-out."""
        limit_s, queue = self._config.times.request_timeout_s, self._bodies.queue
        deadline_s = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        in_time = asyncio.timeout_at(deadline_s)
        try:
            async with in_time:
                await queue.take_place()
                try:
                    answered = await answer(http)
                except BaseException:
                    queue.give_place_back()
                    raise
        except TimeoutError as error:
            if limit_s is None or not in_time.expired():
                raise
            raise RequestTimedOut(limit_s) from error
        try:
            return await self._relay(http, answered, deadline_s)
        finally:
            queue.give_place_back()

    async def _relay(
        self, http: web.Request, answered: _Answered, deadline_s: float | None
    ) -> tuple[web.StreamResponse, RequestEnd]:
        answer, request_id = answered
        name_engine, served = self._config.listen.show_engines, current()
        reader = served.answer = AnswerReader(answer.status, answer.headers)
        if isinstance(answer, Listing):
            reader.read_chunk(answer.body)
            listed = _listed(answer, request_id, name_engine=name_engine)
            return listed, self._whole(served, reader)
        began = partial(self._stream_began, served) if reader.is_stream else None
        response, end = await relay(
            http,
            answer,
            request_id,
            name_engine=name_engine,
            reader=reader,
            deadline_s=deadline_s,
            began=began,
            more=_told(served.routed),
        )
        if end is StreamEnd.ENGINE_FAILED:
            why = "failed in the middle of an answer"
            self._handover.tries.health.suspect(answer.engine, why, request_id)
            log.error("pdconn: stream broken engine=%s request=%s", answer.engine, request_id)
        return response, _ENDS.get(end) or self._whole(served, reader)

    def _stream_began(self, served: Served) -> None:
        if served.routed is not None:
            served.routed.note(FirstToken())

    def _whole(self, served: Served, answer: AnswerReader) -> RequestEnd:
        """The outcome of a request whose whole answer the client has received."""
        return end_of(
            answer,
            generates=served.routed is not None,
            is_clients_key=self._passes_authorization,
        )

    async def _answer(self, route: Route, http: web.Request) -> _Answered:
        """Answer a generating route; the body is held until the answer begins."""
        request_id, headers = self._identify(http)
        with HeldBody(self._bodies.budget) as held:
            body = parse_body(route, await self._bodies.read_body(http, held), self._bodies.xargs)
            body, order = take_order(body, headers, self._checked_key(http))
            served = current()
            trace = None if served.span is NOT_TRACED else RequestSpans(served.span)
            events: list[Event] = [Received(served.began_s)]
            request = served.routed = RoutedRequest(
                request_id, headers, body, held, trace, session=order, events=events
            )
            held.when_free = request.drop_body
            del body
            return await self._handover.answer_request(request), request_id

    async def _prefetch(self, http: web.Request) -> _Answered:
        """Begin to bring the prompt of a request to come to its engine; answered at once."""
        request_id, headers = self._identify(http)
        with HeldBody(self._bodies.budget) as held:
            body = parse_any_body(await self._bodies.read_body(http, held), self._bodies.xargs)
            key = self._checked_key(http)
            body, order = take_order(body, headers, key)
            client = tenant_of(key, {}) or f"host:{http.remote}"
            request = RoutedRequest(request_id, headers, body, held, session=order)
            held.when_free = request.drop_body
            plan = await self._handover.prefetches.prefetch(request, client)
        engine = {"engine": plan.engine} if self._config.listen.show_engines else {}
        answer = {
            "action": plan.action,
            "prompt_tokens": plan.prompt_tokens,
            "held_tokens": plan.held_tokens,
            "pulled_tokens": plan.pulled_tokens,
            **engine,
        }
        return Listing(msgspec.json.encode(answer), status=_ACCEPTED), request_id

    async def _release(self, http: web.Request) -> _Answered:
        """Release a session at the engines that keep it; answered at once."""
        request_id, headers = self._identify(http)
        with HeldBody(self._bodies.budget) as held:
            fields = checked_fields(await self._bodies.read_body(http, held), self._bodies.xargs)
            name = session_name(fields, headers.get(SESSION_HEADER))
            if name is None:
                raise BadBody(SESSION_FIELD, "the name of a session", None)
            session = SessionName(tenant_of(self._checked_key(http), fields), name)
            model = fields.get("model")
            asked = self._handover.prefetches.release(session, model, headers)
        return Listing(msgspec.json.encode({"engines": asked}), status=_ACCEPTED), request_id

    def _checked_key(self, http: web.Request) -> str | None:
        """The client's key, if it was checked: else a client could be any tenant."""
        return None if self._keys is None else authorization_of(http)

    async def _pass(self, route: PassedRoute, http: web.Request) -> _Answered:
        """Answer a route that one engine serves; the body is held until the answer begins."""
        request_id, headers = self._identify(http)
        path = http.rel_url.raw_path_qs
        if route.method == "GET":
            headers.popall("Content-Type", None)
            return await self._passes.pass_on(
                Passing(request_id, headers, path, route.asks, None, span=current().span)
            ), request_id
        with HeldBody(self._bodies.budget) as held:
            raw = await self._bodies.read_body(http, held)
            if route.is_form:
                headers["Content-Type"] = http.headers.get("Content-Type", "")
                model = partial(_same, check_form(headers["Content-Type"], raw))
            else:
                fields = checked_fields(raw, self._bodies.xargs) if raw else {}
                model = partial(text, fields.get("model"))
            serving = None
            if route.asks is not Asks.HOLDER:
                models = self._handover.router.tokeniser.models
                serving = await models.engines_for(model, asking(headers))
            span = current().span
            passing = Passing(request_id, headers, path, route.asks, raw, serving, span)
            del raw, model
            return await self._passes.pass_on(passing), request_id

    async def _models(self, http: web.Request) -> _Answered:
        request_id, headers = self._identify(http)
        headers.popall("Content-Type", None)
        return await self._listed.list_models(headers, request_id), request_id

    async def _model(self, http: web.Request) -> _Answered:
        """One model of the list; vLLM lacks this route, and some clients request it first."""
        (listing, request_id), name = await self._models(http), http.match_info["name"]
        return (listing.pick_model(name) if isinstance(listing, Listing) else listing), request_id

    def _identify(self, http: web.Request) -> tuple[str, CIMultiDict[str]]:
        """The request's id, the client's if it sent one, and the headers for engines."""
        headers = from_client(http.headers)
        request_id = current().request_id = headers[REQUEST_ID_HEADER]
        if not self._passes_authorization:
            headers.popall("Authorization", None)
            headers.popall(KEY_HEADER, None)
            if (authorization := self._engine_key.authorization()) is not None:
                headers["Authorization"] = authorization
        elif KEY_HEADER in headers and "Authorization" not in headers:
            headers["Authorization"] = f"Bearer {headers[KEY_HEADER]}"  # vLLM reads no other header
        return request_id, headers


def _listed(listing: Listing, request_id: str, *, name_engine: bool) -> web.Response:
    headers = listing.headers.copy()
    if name_engine and listing.engine is not None:
        headers[ENGINE_HEADER] = listing.engine
    headers[REQUEST_ID_HEADER] = request_id
    return web.Response(status=listing.status, headers=headers, body=listing.body)


def _told(routed: RoutedRequest | None) -> dict[str, str]:
    """Headers that tell a client what prefill keeps of its session, and what was broken."""
    event = None if routed is None else routed.last(TurnKept)
    if event is None:
        return {}
    report = event.report
    # An engine's word, of which a header takes only letters.
    why = report.all_broken
    broken = {} if why is None else {BROKEN_HEADER: shown(why, 40).strip("'")}
    return {KEPT_HEADER: str(report.tokens), **broken}


def _same(name: str | None) -> str | None:
    return name


def _end_span(served: Served, status: int | None) -> None:
    """End a request's span, with the request's outcome."""
    end, span = served.end, served.span
    span.note(
        request_id=served.request_id,
        outcome=None if end is None else end.value,
        status=status,
    )
    if end is None or end.is_failure:
        span.mark_failed("" if end is None else end.value)
    span.end()


async def _continue(http: web.Request) -> None:
    """Send ``100 Continue`` to a client that waits for it; other expectations are ignored.

    RFC 9110, section 10.1.1.  aiohttp's own handler refuses them before any middleware runs, so
    that the request would be in neither the access log nor the metrics.
    """
    if http.version >= HttpVersion11 and http.headers["Expect"].lower() == "100-continue":
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # bytes of the answer, which begins after this
