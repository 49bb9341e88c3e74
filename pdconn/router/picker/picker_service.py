"""Serves a gateway's calls: one for each request of a client.

What becomes of a request is decided by the same code as in ``pdconn proxy`` (``front.client_api``);
only decode's leg differs (``picker.pick``).  Answers of engines do not pass through here: a call
goes on until its request has ended, so that what is in flight is known, and has no further message.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from urllib.parse import unquote

from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping

from pdconn.router.access.access_log import PROBES, Served, log_end
from pdconn.router.access.api_keys import authorization_of
from pdconn.router.access.middlewares import check_repeats, no_such_path, refusal_body
from pdconn.router.admin.probes import Probes
from pdconn.router.admission.places import HeldBody
from pdconn.router.fleet.engine_client import EngineAnswer
from pdconn.router.fleet.member import Role
from pdconn.router.front.client_api import (
    Answered,
    ApiRoute,
    ClientApi,
    ClientRequest,
    told_headers,
)
from pdconn.router.handover.listing import Listing
from pdconn.router.handover.stream import ENGINE_HEADER
from pdconn.router.handover.tries import end_of
from pdconn.router.labels import RequestEnd
from pdconn.router.openai.bodies import AnswerReader
from pdconn.router.openai.requests import REQUEST_ID_HEADER
from pdconn.router.picker.endpoints import Endpoints
from pdconn.router.picker.exchange import Exchange, GatewayLeft
from pdconn.router.picker.messages import Head, head_of, repeated_in_one, upstream_of
from pdconn.router.picker.pick import AnswerHead, Pick
from pdconn.router.picker.rpc.call import Call
from pdconn.router.router_errors import (
    BadHead,
    EngineFailure,
    MethodNotAllowed,
    NoEngineLeft,
    Refusal,
    Unauthorized,
    UnfitGateway,
)

log = logging.getLogger(__name__)

#: Headers by which clients that Envoy trusts have it send a request again, or to two at once.
_TRIES = ("X-Envoy-Retry-On", "X-Envoy-Retry-Grpc-On", "X-Envoy-Hedge-On-Per-Try-Timeout")
#: A slash and a percent sign.
_KEPT_ESCAPES = re.compile("%(2[fF]|25)")
_JSON: Mapping[str, str] = {"Content-Type": "application/json"}


class PickerService:
    """Answers the calls of gateways."""

    def __init__(self, api: ClientApi[Pick], probes: Probes) -> None:
        self._api = api
        self._probes = probes
        self._endpoints = Endpoints()
        self._engines = api.handover.engines
        self._limits = api.config.admission
        self._table = _RouteTable(api)
        self._is_draining = False
        self._answered: set[Exchange] = set()

    async def drain(self, timeout_s: float) -> None:
        """Let answers that have begun go on without this process, and wait for the others."""
        self._is_draining = True
        for exchange in self._answered:
            exchange.release()
        await self._api.drain_requests(timeout_s)
        self._endpoints.close()

    async def process(self, call: Call) -> None:
        """One call: one request of a client, until it has ended."""
        exchange = Exchange(call, self._limits.max_body_nbytes, self._limits.stall_timeout_s)
        try:
            await self._serve(exchange)
        except GatewayLeft:
            pass
        except asyncio.CancelledError:
            # ``Exchange.watch`` has cancelled the task, or the gateway its call.
            if not exchange.has_left:
                raise

    async def _serve(self, exchange: Exchange) -> None:
        await exchange.read_head()
        head = exchange.head
        path = head.pseudo.get("path", "")
        served = Served(head.pseudo.get("method", ""), path.partition("?")[0], _client_of(head))
        status: int | None = None
        listen = self._api.config.listen
        try:
            exchange.check_modes()
            status = await self._answer(exchange, served, path)
        except Refusal as error:
            if isinstance(error, UnfitGateway):
                log.warning("pdconn: %s", str(error))  # the error refers to this call
            status = error.status
            body = refusal_body(error, served.path, name_engines=listen.show_engines)
            headers = {**_JSON, **error.headers}
            if served.request_id:
                headers[REQUEST_ID_HEADER] = served.request_id
            await exchange.refuse(status, headers, body)
        finally:
            with_blocks = self._api.config.traces.log_blocks
            log_end(served, status, self._api.request_ended, with_blocks=with_blocks)

    async def _answer(self, exchange: Exchange, served: Served, path: str) -> int | None:
        """Answer a request; returns the status that the client receives."""
        head, keys = exchange.head, self._api.keys
        headers = CIMultiDictProxy(head.headers)
        check_repeats(headers)
        if (name := repeated_in_one(head.headers)) is not None:
            raise BadHead(name, "one header of this name", "several")
        _check_tries(headers)
        if served.path in PROBES and served.method == "GET":
            name_engines = self._api.config.listen.show_engines
            page = await self._probes.page(served.path, name_engines=name_engines)
            await exchange.refuse(page.status, {**_JSON, **page.headers}, page.body)
            return page.status
        if keys is not None and not keys.allow(authorization_of(headers)):
            raise Unauthorized
        route, names = self._table.find(served.method, served.path)

        async def read_body(held: HeldBody) -> bytes:
            raw = await exchange.read_body(held)
            exchange.watch()
            return raw

        allowed = None
        if exchange.subset is not None:
            allowed = await self._endpoints.within(self._engines.names, exchange.subset)
        client = ClientRequest(served, path, headers, names, read_body, allowed)

        async def answer(client: ClientRequest) -> Answered[Pick]:
            if client.allowed is not None and not client.allowed:
                raise self._none_allowed()
            if route.method == "GET" and head.has_body:
                await exchange.skip_body()
                exchange.watch()
            return await route.answer(client)

        if not head.has_body:
            exchange.watch()
        with self._api.counting(route.name, client) as counted:
            try:
                async with self._api.answering(client, answer) as (answered, _):
                    counted.status, counted.end = await self._send(exchange, served, answered)
            except GatewayLeft:
                counted.end = RequestEnd.CLIENT_LEFT
                raise
        return counted.status

    async def _send(
        self,
        exchange: Exchange,
        served: Served,
        answered: Answered[Pick],
    ) -> tuple[int | None, RequestEnd]:
        answer, request_id = answered
        ours = {REQUEST_ID_HEADER: request_id}
        if not isinstance(answer, Pick):
            ours |= self._telling(served)
            if answer.engine is not None:
                ours |= self._naming(answer.engine)
        # 1. The picker's own answer, or an engine's refusal.
        if isinstance(answer, Listing):
            await exchange.refuse(answer.status, {**answer.headers, **ours}, answer.body)
            return answer.status, self._end(served, answer.status, answer.headers)
        if isinstance(answer, EngineAnswer):
            async with answer:
                body = await answer.read_rest()
            await exchange.refuse(answer.status, {**answer.headers, **ours}, body)
            return answer.status, self._end(served, answer.status, answer.headers)
        # 2. Decode's, by the gateway.
        try:
            return await self._send_on(exchange, served, answer, ours)
        finally:
            self._answered.discard(exchange)
            answer.close()

    async def _send_on(
        self,
        exchange: Exchange,
        served: Served,
        pick: Pick,
        ours: dict[str, str],
    ) -> tuple[int | None, RequestEnd]:
        engines, failures = await self._endpoints.resolve(pick.engines, exchange.subset)
        if not engines:
            raise self._api.handover.tries.no_decode_left(*failures)
        await exchange.send_pick(pick.headers, pick.body, engines)
        pick.body = None  # the gateway has it
        status, end = None, RequestEnd.CLIENT_LEFT
        while True:
            message = await exchange.next_message(has_answer=status is not None)
            if message is None:
                break
            headers: Mapping[str, str] = {}
            if message.WhichOneof("request") == "response_headers":
                head = head_of(message.response_headers)
                engine = engines.get(upstream_of(message) or "")
                status = int(head.pseudo["status"])
                pick.answer_began(AnswerHead(status, head.headers.get("Retry-After")), engine)
                end = self._end(served, status, head.headers)
                headers = ours | self._naming(engine or pick.engines[0]) | self._telling(served)
            goes_on = await exchange.go_on(message, headers)
            if not goes_on or (status is not None and self._is_draining):
                break
            if status is not None:
                self._answered.add(exchange)
        return status, end

    def _none_allowed(self) -> NoEngineLeft:
        why = "the gateway does not allow its endpoint"
        decode = self._engines.in_role(Role.DECODE)
        return NoEngineLeft(Role.DECODE.value, tuple(EngineFailure(one, why) for one in decode))

    def _naming(self, engine: str) -> dict[str, str]:
        return {ENGINE_HEADER: engine} if self._api.config.listen.show_engines else {}

    def _telling(self, served: Served) -> dict[str, str]:
        return told_headers(served.routed, self._api.handover.router.sessions)

    def _end(self, served: Served, status: int, headers: CIMultiDict[str]) -> RequestEnd:
        return end_of(
            AnswerReader(status, headers),
            generates=served.routed is not None,
            is_clients_key=self._api.config.listen.passes_authorization,
        )


class _RouteTable:
    """Finds the route of a path; patterns are those of aiohttp."""

    def __init__(self, api: ClientApi[Pick]) -> None:
        routes = tuple(api.routes())
        self._served = (*(route.name for route in routes), *PROBES)
        self._fixed: dict[str, dict[str, ApiRoute[Pick]]] = {}
        self._patterns: list[tuple[re.Pattern[str], ApiRoute[Pick]]] = []
        for route in routes:
            if "{" in route.path:
                self._patterns.append((_pattern(route.path), route))
            else:
                self._fixed.setdefault(route.path, {})[route.method] = route

    def find(self, method: str, raw_path: str) -> tuple[ApiRoute[Pick], Mapping[str, str]]:
        """The route, and the parts of the path that it names.

        Raises:
            NotFound: there is no such path.
            MethodNotAllowed: the path has other methods.
        """
        path = unquote(raw_path)
        # As aiohttp, and unlike ``unquote``: an escaped slash does not separate parts of a path.
        parts = unquote(_KEPT_ESCAPES.sub(r"%25\1", raw_path))
        methods = self._fixed.get(parts)
        if methods is not None and method in methods:
            return methods[method], {}
        allowed = set(methods or ())
        for pattern, route in self._patterns:
            found = pattern.fullmatch(parts)
            if found is not None and route.method == method:
                return route, {name: unquote(text) for name, text in found.groupdict().items()}
            if found is not None:
                allowed.add(route.method)
        if allowed:
            raise MethodNotAllowed(method, path, allowed)
        raise no_such_path(method, path, self._served)


def _pattern(path: str) -> re.Pattern[str]:
    """The regular expression of a path with ``{name:pattern}`` in it."""
    parts = re.split(r"\{(\w+):([^{}]+)\}", path)
    text = ""
    for index, part in enumerate(parts):
        kind = index % 3
        text += re.escape(part) if kind == 0 else f"(?P<{part}>" if kind == 1 else f"{part})"
    return re.compile(text)


def _check_tries(headers: MultiMapping[str]) -> None:
    """Refuse a request that the gateway would send to several engines: a ticket is for one.

    A gateway removes these headers from requests of clients that it does not trust.

    Raises:
        BadHead: a header of ``_TRIES`` is there.
    """
    for name in _TRIES:
        if name in headers:
            raise BadHead(name, "no such header (a ticket is for one engine)", headers[name][:80])


def _client_of(head: Head) -> str | None:
    """The client's address as the gateway has added it."""
    forwarded = head.headers.getall("x-forwarded-for", ())
    return forwarded[-1].rpartition(",")[2].strip() if forwarded else None
