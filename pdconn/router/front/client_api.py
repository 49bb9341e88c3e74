"""The routes of the router's API, whatever front end received the request.

The front ends differ in where bytes come from and go to: the listener (``app``) reads them from
clients and relays answers, the picker (``picker``) gets them from a gateway, which relays answers
itself.  All else is here, once: what is asked of engines, admission, outcomes, metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from pdconn.router.access.access_log import Served
from pdconn.router.access.api_keys import ApiKeys, EngineKey, authorization_of
from pdconn.router.admission.places import AdmissionQueue, BodyBudget, HeldBody
from pdconn.router.fleet.engine_client import EngineAnswer
from pdconn.router.handover.abandoned import LegResult
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.listing import ListedModels, Listing
from pdconn.router.handover.passing import Passing
from pdconn.router.labels import RequestEnd
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
    CUT_HEADER,
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
from pdconn.router.routing.request_events import Event, Received, TurnKept
from pdconn.router.routing.routed_request import RoutedRequest, common
from pdconn.router.routing.session_table import SessionTable
from pdconn.router.tracing.spans import NOT_TRACED, RequestSpans, Tracing
from pdconn.sidechannel.quiet_log import QuietLog
from transport.errors import shown

log = logging.getLogger(__name__)

_ACCEPTED = 202
_MAX_WHY = 40
"""Characters of an engine's reason in a header."""
PREFETCH, RELEASE = "/v1/kv/prefetch", "/v1/kv/release"
MODELS, MODEL = "/v1/models", "/v1/models/{name}"

A = TypeVar("A", bound=LegResult)
A_co = TypeVar("A_co", bound=LegResult, covariant=True)

Answered: TypeAlias = "tuple[EngineAnswer | Listing | A, str]"
"""An engine's answer, one of the router's own, or what decode's leg gave; and the request's id."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request, as a front end received it.

    Attributes:
        served: its state, which the front end logs at the end.
        path: with the client's query.
        headers: as the client sent them.
        names: the parts of the path that its route names.
        allowed: the engines that may answer it; None for all.
        read_body: reads the whole body, counting it in what it is given; raises as
            :meth:`pdconn.router.admission.places.BodyReader.read_body`.
    """

    served: Served
    path: str
    headers: CIMultiDictProxy[str]
    names: Mapping[str, str]
    read_body: Callable[[HeldBody], Awaitable[bytes]]
    allowed: frozenset[str] | None = None


AnswerRequest: TypeAlias = "Callable[[ClientRequest], Awaitable[Answered[A]]]"


@dataclass(frozen=True, slots=True)
class ApiRoute(Generic[A]):
    """A route: ``path`` is a pattern of aiohttp's, ``name`` the path for logs and labels."""

    method: str
    path: str
    name: str
    answer: AnswerRequest[A]


class Passes(Protocol[A_co]):
    """Serves requests that one engine answers."""

    async def pass_on(self, passing: Passing) -> A_co:
        """An engine's answer, or where it is to come from.

        Raises:
            NoEngineLeft: no engine answers.
        """


class OpenRequests:
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


@dataclass(slots=True)
class Counted:
    """How a request ends.

    Attributes:
        end: None while it is not known.
        status: of the answer; None without one.
    """

    end: RequestEnd | None = None
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """What all requests share: places in flight, and the bytes of their bodies."""

    queue: AdmissionQueue
    budget: BodyBudget


class ClientApi(Generic[A]):
    """Answers requests of clients.

    Attributes:
        handover: takes requests through prefill and decode.
        config: the router's settings.
    """

    def __init__(
        self,
        handover: Handover[A],
        passes: Passes[A],
        admission: Admission,
        config: ProxyConfig,
        *,
        keys: ApiKeys | None,
        engine_key: EngineKey,
        tracing: Tracing | None,
    ) -> None:
        self.handover = handover
        self.config = config
        self.keys = keys
        self.open_requests = OpenRequests()
        self._passes = passes
        self._listed = ListedModels(handover)
        self._queue = admission.queue
        self._budget = admission.budget
        self._xargs = config.admission.xargs
        self._busy_log = QuietLog(log)
        self._engine_key = engine_key
        self._tracing = tracing
        handover.metrics.show("inflight_requests", lambda: self.open_requests.number)

    def routes(self) -> Iterator[ApiRoute[A]]:
        """The routes; of those that match a path the first one counts."""
        for route in Route:
            yield ApiRoute("POST", route.path, route.path, partial(self._answer, route))
        for passed in PASSED:
            answer = partial(self._pass, passed)
            yield ApiRoute(passed.method, passed.path, passed.name, answer)
        yield ApiRoute("POST", PREFETCH, PREFETCH, self._prefetch)
        yield ApiRoute("POST", RELEASE, RELEASE, self._release)
        yield ApiRoute("GET", MODELS, MODELS, self._models)
        # Last, and as a pattern: names of models contain slashes.
        yield ApiRoute("GET", "/v1/models/{name:.+}", MODEL, self._model)

    def request_ended(self, request: RoutedRequest) -> None:
        """Keep the final outcome for the admin pages."""
        if (decision := request.decision) is not None:
            self.handover.router.decisions.end_decision(decision, request.outcome())

    async def drain_requests(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` until no request is open at an engine."""
        self.open_requests.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.open_requests.idle.wait()

    @contextmanager
    def counting(self, name: str, client: ClientRequest) -> Iterator[Counted]:
        """A context for a request to the route ``name``: counts it in flight, and its outcome."""
        counted, served = Counted(), client.served
        if self._tracing is not None:
            method = served.method
            served.span = self._tracing.begin_span(
                f"{method} {name}", client.headers, method=method, route=name
            )
        self.open_requests.count_open(1)
        try:
            yield counted
        # Their texts are logged: an error refers to the call, and handlers may keep it.
        except Busy as refusal:
            counted.end = RequestEnd.BUSY
            self._busy_log.warning("pdconn: %s path=%s", str(refusal), name)
            raise
        except NoEngineLeft as refusal:
            counted.end = RequestEnd.NO_ENGINE
            log.warning("pdconn: %s path=%s", str(refusal), name)
            raise
        except (HandoverRequired, RequestTimedOut) as refusal:
            late = isinstance(refusal, RequestTimedOut)
            counted.end = RequestEnd.TIMED_OUT if late else RequestEnd.NO_HANDOVER
            log.warning("pdconn: %s path=%s", str(refusal), name)
            raise
        except asyncio.CancelledError:
            if counted.end is None:
                draining = self.open_requests.is_draining
                counted.end = RequestEnd.CUT_OFF if draining else RequestEnd.CLIENT_LEFT
            raise
        finally:
            self.open_requests.count_open(-1)
            served.end = end = counted.end or RequestEnd.REFUSED
            self.handover.metrics.request_ended(name, end)
            if served.span is not NOT_TRACED:
                _end_span(served, counted.status)

    @asynccontextmanager
    async def answering(
        self, client: ClientRequest, answer: AnswerRequest[A]
    ) -> AsyncIterator[tuple[Answered[A], float | None]]:
        """A context for the answer, which is obtained within the request's time-out.

        It gives the answer, and the time of the event loop until which it may take.  The request
        has a place in flight until the end of the context.
        """
        limit_s = self.config.times.request_timeout_s
        deadline_s = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        in_time = asyncio.timeout_at(deadline_s)
        has_place = False
        try:
            try:
                async with in_time:
                    await self._queue.take_place()
                    has_place = True
                    answered = await answer(client)
            except TimeoutError as error:
                if limit_s is None or not in_time.expired():
                    raise
                raise RequestTimedOut(limit_s) from error
            yield answered, deadline_s
        finally:
            if has_place:
                self._queue.give_place_back()

    async def _answer(self, route: Route, client: ClientRequest) -> Answered[A]:
        """Answer a generating route; the body is held until the answer begins."""
        request_id, headers = self._identify(client)
        with HeldBody(self._budget) as held:
            body = parse_body(route, await client.read_body(held), self._xargs)
            body, order = take_order(body, headers, self._checked_key(client))
            served = client.served
            trace = None if served.span is NOT_TRACED else RequestSpans(served.span)
            events: list[Event] = [Received(served.began_s)]
            request = served.routed = RoutedRequest(
                request_id, headers, body, held, trace, session=order, events=events
            )
            request.allowed = client.allowed
            held.when_free = request.drop_body
            del body
            return await self.handover.answer_request(request), request_id

    async def _prefetch(self, client: ClientRequest) -> Answered[A]:
        """Begin to bring the prompt of a request to come to its engine; answered at once."""
        request_id, headers = self._identify(client)
        with HeldBody(self._budget) as held:
            body = parse_any_body(await client.read_body(held), self._xargs)
            key = self._checked_key(client)
            body, order = take_order(body, headers, key)
            asker = tenant_of(key, {}) or f"host:{client.served.client}"
            request = RoutedRequest(request_id, headers, body, held, session=order)
            held.when_free = request.drop_body
            plan = await self.handover.prefetches.prefetch(request, asker)
        engine = {"engine": plan.engine} if self.config.listen.show_engines else {}
        answer = {
            "action": plan.action,
            "prompt_tokens": plan.prompt_tokens,
            "held_tokens": plan.held_tokens,
            "pulled_tokens": plan.pulled_tokens,
            **engine,
        }
        return Listing(msgspec.json.encode(answer), status=_ACCEPTED), request_id

    async def _release(self, client: ClientRequest) -> Answered[A]:
        """Release a session at the engines that keep it; answered at once."""
        request_id, headers = self._identify(client)
        with HeldBody(self._budget) as held:
            fields = checked_fields(await client.read_body(held), self._xargs)
            name = session_name(fields, headers.get(SESSION_HEADER))
            if name is None:
                raise BadBody(SESSION_FIELD, "the name of a session", None)
            session = SessionName(tenant_of(self._checked_key(client), fields), name)
            model = fields.get("model")
            asked = self.handover.prefetches.release(session, model, headers)
        return Listing(msgspec.json.encode({"engines": asked}), status=_ACCEPTED), request_id

    def _checked_key(self, client: ClientRequest) -> str | None:
        """The client's key, if it was checked: else a client could be any tenant."""
        return None if self.keys is None else authorization_of(client.headers)

    async def _pass(self, route: PassedRoute, client: ClientRequest) -> Answered[A]:
        """Answer a route that one engine serves; the body is held until the answer begins."""
        request_id, headers = self._identify(client)
        path = client.path
        if route.method == "GET":
            headers.popall("Content-Type", None)
            return await self._passes.pass_on(
                Passing(
                    request_id, headers, path, route.asks, None, client.allowed, client.served.span
                )
            ), request_id
        with HeldBody(self._budget) as held:
            raw = await client.read_body(held)
            if route.is_form:
                headers["Content-Type"] = client.headers.get("Content-Type", "")
                model = partial(_same, check_form(headers["Content-Type"], raw))
            else:
                fields = checked_fields(raw, self._xargs) if raw else {}
                model = partial(text, fields.get("model"))
            serving = None
            if route.asks is not Asks.HOLDER:
                models = self.handover.router.tokeniser.models
                serving = await models.engines_for(model, asking(headers))
            serving = common(serving, client.allowed)
            span = client.served.span
            passing = Passing(request_id, headers, path, route.asks, raw, serving, span)
            del raw, model
            return await self._passes.pass_on(passing), request_id

    async def _models(self, client: ClientRequest) -> Answered[A]:
        request_id, headers = self._identify(client)
        headers.popall("Content-Type", None)
        return await self._listed.list_models(headers, request_id), request_id

    async def _model(self, client: ClientRequest) -> Answered[A]:
        """One model of the list; vLLM lacks this route, and some clients request it first."""
        (listing, request_id), name = await self._models(client), client.names["name"]
        return (listing.pick_model(name) if isinstance(listing, Listing) else listing), request_id

    def _identify(self, client: ClientRequest) -> tuple[str, CIMultiDict[str]]:
        """The request's id, the client's if it sent one, and the headers for engines."""
        headers = from_client(client.headers)
        request_id = client.served.request_id = headers[REQUEST_ID_HEADER]
        if not self.config.listen.passes_authorization:
            headers.popall("Authorization", None)
            headers.popall(KEY_HEADER, None)
            if (authorization := self._engine_key.authorization()) is not None:
                headers["Authorization"] = authorization
        elif KEY_HEADER in headers and "Authorization" not in headers:
            headers["Authorization"] = f"Bearer {headers[KEY_HEADER]}"  # vLLM reads no other header
        return request_id, headers


def told_headers(routed: RoutedRequest | None, sessions: SessionTable) -> dict[str, str]:
    """Headers that tell a client what prefill keeps of its session, what it does not, and what was
    broken.

    They are made once an answer begins: what was cut or broken is told once.
    """
    if routed is None or routed.session is None:
        return {}
    event = routed.last(TurnKept)
    told = {} if event is None else {KEPT_HEADER: str(event.report.tokens)}
    session = routed.session.session
    if (cut := sessions.take_cut(session)) is not None:
        told[CUT_HEADER] = cut
    # Engines' words, of which a header takes only letters.
    if whys := [shown(why, _MAX_WHY).strip("'") for why in sessions.take_untold(session)]:
        told[BROKEN_HEADER] = ", ".join(whys)
    return told


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
