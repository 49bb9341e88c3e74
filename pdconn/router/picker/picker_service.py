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
from dataclasses import dataclass, field
from typing import Any
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
    Counted,
    told_headers,
)
from pdconn.router.handover.listing import Listing
from pdconn.router.handover.stream import ENGINE_HEADER, unbuffering
from pdconn.router.handover.tries import end_of
from pdconn.router.labels import CallRefused, PickEnd, RequestEnd
from pdconn.router.openai.bodies import AnswerReader
from pdconn.router.openai.requests import REQUEST_ID_HEADER
from pdconn.router.picker.endpoints import Endpoints
from pdconn.router.picker.exchange import Exchange, GatewayLeft
from pdconn.router.picker.gateway_reports import GatewayReports
from pdconn.router.picker.messages import (
    BadMessage,
    Head,
    head_of,
    in_time,
    repeated_in_one,
    status_of,
    upstream_of,
)
from pdconn.router.picker.pick import AnswerHead, Pick
from pdconn.router.picker.rpc.call import (
    DEADLINE_EXCEEDED,
    INVALID_ARGUMENT,
    Call,
    CallFailed,
    MessageTooLong,
)
from pdconn.router.router_errors import (
    BadHead,
    Busy,
    EngineFailure,
    MethodNotAllowed,
    NoEngineLeft,
    Refusal,
    RequestTimedOut,
    RouterDefect,
    Unauthorized,
    UnfitGateway,
)
from pdconn.sidechannel.quiet_log import QuietLog

log = logging.getLogger(__name__)

#: Headers by which clients that Envoy trusts have it send a request again, or to two at once.
_TRIES = ("X-Envoy-Retry-On", "X-Envoy-Retry-Grpc-On", "X-Envoy-Hedge-On-Per-Try-Timeout")
#: A slash and a percent sign.
_KEPT_ESCAPES = re.compile("%(2[fF]|25)")
SPARE_CALLS = 256
"""Calls beside those of requests that are served or wait: being refused, or ending."""
_STATUSES = {
    CallRefused.MALFORMED: INVALID_ARGUMENT,
    CallRefused.SILENT: DEADLINE_EXCEEDED,
}
_TIMED_OUT = 504
_PROBED_BY = ("GET", "HEAD")
_JSON: Mapping[str, str] = {"Content-Type": "application/json"}


class PickerService:
    """Answers the calls of gateways."""

    def __init__(self, api: ClientApi[Pick], probes: Probes) -> None:
        self._api = api
        self._probes = probes
        self._endpoints = Endpoints()
        self._limits = api.config.admission
        self._metrics = api.handover.metrics
        self._reports = GatewayReports(self._metrics)
        self._most_calls = self._limits.max_requests + self._limits.max_queue + SPARE_CALLS
        self._num_calls = 0
        self._call_log = QuietLog(log)
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
        self._num_calls += 1
        try:
            await self._process(call)
        finally:
            self._num_calls -= 1

    async def _process(self, call: Call) -> None:
        exchange = Exchange(call, self._limits.max_body_nbytes, self._limits.stall_timeout_s)
        try:
            if self._num_calls > self._most_calls:
                await self._refuse_call(exchange)
                return
            try:
                await exchange.read_head()
            except TimeoutError:
                raise self._failed(CallRefused.SILENT, "a call of a gateway has no head") from None
            await self._serve(exchange)
        except GatewayLeft:
            pass
        except (BadMessage, MessageTooLong) as error:
            raise self._failed(CallRefused.MALFORMED, str(error)) from error
        except asyncio.CancelledError:
            # ``Exchange.watch`` has cancelled the task, or the gateway its call.
            if not exchange.has_left:
                raise

    async def _refuse_call(self, exchange: Exchange) -> None:
        """Answer a request whose head was not read, since too many are being served."""
        self._metrics.call_refused(CallRefused.TOO_MANY)
        error = Busy(f"{self._most_calls} calls of gateways are open")
        self._call_log.warning("pdconn: call refused: %s", str(error))
        body = refusal_body(error, "", name_engines=False)
        await exchange.refuse(error.status, {**_JSON, **error.headers}, body)

    def _failed(self, reason: CallRefused, why: str) -> CallFailed:
        """What ends a call for a fault of the gateway."""
        self._metrics.call_refused(reason)
        self._call_log.warning("pdconn: call ended: %s", why)
        return CallFailed(_STATUSES[reason], why)

    async def _serve(self, exchange: Exchange) -> None:
        head = exchange.head
        path = head.pseudo.get("path", "")
        served = Served(head.pseudo.get("method", ""), path.partition("?")[0], _client_of(head))
        status: int | None = None
        listen = self._api.config.listen
        try:
            exchange.check_modes()
            try:
                status = await self._answer(exchange, served, path)
            except (Refusal, GatewayLeft, BadMessage, CallFailed):
                raise
            except Exception as error:
                if exchange.was_sent_on:
                    raise
                # A call that only fails has a gateway that fails open send the request unchecked.
                log.exception("pdconn: request failed request=%s", served.request_id)
                raise RouterDefect from error
        except Refusal as error:
            if isinstance(error, UnfitGateway):
                self._metrics.call_refused(CallRefused.UNFIT)
                self._call_log.warning("pdconn: %s", str(error))  # the error refers to this call
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
        if served.path in PROBES:
            if served.method not in _PROBED_BY:
                raise MethodNotAllowed(served.method, served.path, set(_PROBED_BY))
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
            allowed = await self._endpoints.within(
                self._api.handover.engines.names, exchange.subset
            )
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
                async with self._api.answering(client, answer) as (answered, until_s):
                    await self._send(exchange, served, counted, answered, until_s)
            except GatewayLeft:
                counted.end = RequestEnd.CLIENT_LEFT
                raise
            except BadMessage:
                counted.end = RequestEnd.GATEWAY_ERROR
                raise
        return counted.status

    async def _send(
        self,
        exchange: Exchange,
        served: Served,
        counted: Counted,
        answered: Answered[Pick],
        until_s: float | None,
    ) -> None:
        answer, request_id = answered
        ours = {REQUEST_ID_HEADER: request_id}
        if not isinstance(answer, Pick):
            ours |= self._telling(served)
            if answer.engine is not None:
                ours |= self._naming(answer.engine)
        # 1. The picker's own answer, or an engine's refusal.
        if isinstance(answer, (Listing, EngineAnswer)):
            body = answer.body if isinstance(answer, Listing) else await _whole_body(answer)
            await exchange.refuse(answer.status, {**answer.headers, **ours}, body)
            counted.end = self._end(served, answer.status, answer.headers)
            counted.status = answer.status
            return
        # 2. Decode's, by the gateway.
        limit_s = self._api.config.times.request_timeout_s
        sent = _Sent(exchange, served, counted, answer, ours, until_s, limit_s)
        try:
            await self._send_on(sent)
        finally:
            self._answered.discard(exchange)
            answer.close()

    async def _send_on(self, sent: _Sent) -> None:
        exchange, pick, counted = sent.exchange, sent.pick, sent.counted
        found, failures = await self._endpoints.resolve(pick.engines, exchange.subset)
        if not found:
            raise self._api.handover.tries.no_decode_left(*failures)
        sent.endpoints = found
        headers = pick.headers if sent.until_s is None else in_time(pick.headers, -sent.late_s())
        await exchange.send_pick(headers, pick.body, found)
        pick.body = None  # the gateway has it
        try:
            while True:
                message = await exchange.next_message(has_answer=counted.status is not None)
                if message is None:
                    break
                set_headers: Mapping[str, str] = {}
                if message.WhichOneof("request") == "response_headers":
                    set_headers = self._answer_began(sent, message)
                goes_on = await exchange.go_on(message, set_headers)
                if not goes_on or (counted.status is not None and self._is_draining):
                    break
                if counted.status is not None:
                    self._answered.add(exchange)
        except asyncio.CancelledError:
            if not self._is_draining:
                self._ended(sent)
            raise
        self._ended(sent)

    def _answer_began(self, sent: _Sent, message: Any) -> dict[str, str]:
        """Note the head of an answer; returns the headers that are set in it.

        Raises:
            BadMessage: it has no status.
            RequestTimedOut: it is the gateway's own, as no answer came in time.
        """
        head, pick, served = head_of(message.response_headers), sent.pick, sent.served
        sent.counted.status = status = status_of(head)
        upstream = upstream_of(message)
        seen = self._reports.head_came(sent.endpoints, upstream, served.request_id)
        engine: str | None = pick.engines[0]
        if upstream is not None and seen is not PickEnd.UNTOLD:
            fleet = self._api.handover.engines.names
            engine = sent.endpoints.get(upstream) or self._endpoints.engine_at(upstream, fleet)
        limit_s = sent.limit_s
        if limit_s is not None and status == _TIMED_OUT and sent.late_s() >= 0:
            raise RequestTimedOut(limit_s)  # to the pick no answer has begun, as in the proxy
        pick.answer_began(AnswerHead(status, head.headers.get("Retry-After")), engine)
        sent.counted.end = self._end(served, status, head.headers)
        naming = {} if engine is None else self._naming(engine)
        return sent.ours | naming | self._telling(served) | unbuffering(head.headers)

    def _ended(self, sent: _Sent) -> None:
        """Note how a request ended that the gateway was sent on with."""
        counted = sent.counted
        if counted.status is None:
            counted.end, may_be_unused = self._reports.head_missed()
            sent.pick.is_unseen = not may_be_unused
        elif sent.until_s is not None and self._reports.outlived(sent.late_s()):
            counted.end = RequestEnd.TIMED_OUT

    def _none_allowed(self) -> NoEngineLeft:
        why = "the gateway does not allow its endpoint"
        decode = self._api.handover.engines.in_role(Role.DECODE)
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


@dataclass(slots=True)
class _Sent:
    """A request that a gateway is told where to send.

    Attributes:
        ours: headers for the client.
        until_s: the time of the event loop until which it may take; None for any time.
        limit_s: ``--request-timeout``, of which that is the end.
        endpoints: of its engines, in order.
    """

    exchange: Exchange
    served: Served
    counted: Counted
    pick: Pick
    ours: dict[str, str]
    until_s: float | None
    limit_s: float | None
    endpoints: Mapping[str, str] = field(default_factory=dict)

    def late_s(self) -> float:
        """Seconds since its end was due."""
        assert self.until_s is not None
        return asyncio.get_running_loop().time() - self.until_s


async def _whole_body(answer: EngineAnswer) -> bytes:
    async with answer:
        return await answer.read_rest()


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
