"""One request from prefill to decode, and past engines that are gone.

Prefill may be asked again anywhere: it lends blocks, and what it lent in vain
its lease takes back.  Decode may not.  A ticket goes to another engine only if
the first cannot have seen it; presented twice, it would name blocks that may be
free by now and hold another prompt's bytes.  So when decode dies with a ticket
in its hands, the next engine computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from multidict import CIMultiDict

from pdconn.router.errors import Miss, NoEngineLeft
from pdconn.router.fleet.client import ConnectFailed, ConnectionLost, EngineAnswer, EngineClient
from pdconn.router.fleet.health import Health
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.handover.abandoned import Abandoned, AbandonedRequests, InflightRequest, Stage
from pdconn.router.metrics import ProxyMetrics
from pdconn.router.openai.bodies import decode_body, find_cached_tokens, find_ticket, prefill_body
from pdconn.router.openai.requests import Direct, Exchange
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.decision_log import RouteRecord
from pdconn.router.routing.policy import Candidate, Role

log = logging.getLogger(__name__)

RANK_HEADER = "X-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class Handover:
    """Takes requests through prefill and decode."""

    engines: EngineRegistry
    upstream: EngineClient
    steering: RequestRouter
    health: Health
    metrics: ProxyMetrics
    farewells: AbandonedRequests
    _lend_nothing: set[str] = field(default_factory=set)

    async def answer(self, exchange: Exchange) -> EngineAnswer:
        """An engine's answer to a client's request, once its body has begun.

        Cancelling this is how a client leaves; ``farewells`` takes over then.

        Raises:
            NoEngineLeft: no engine of some role answers.
        """
        errand = InflightRequest(exchange)
        task = asyncio.create_task(self._run(errand))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.farewells.client_left(errand, task)
            raise

    async def _run(self, errand: InflightRequest) -> EngineAnswer:
        if not self.engines.live(Role.DECODE):  # prefill would lend to nobody
            raise NoEngineLeft(Role.DECODE.value, self.engines.misses(Role.DECODE))
        reason = errand.exchange.request.direct
        course = await self.steering.decide(errand.exchange)
        while reason is None and course.decision.alone and course.decision.decode:
            answer = await self._by_holder(errand, course)
            if answer is not None:
                return answer
            # Whoever held the prefix is gone; the others would compute all of it alone.
            course = await self.steering.decide(errand.exchange)
        if reason is not None:
            self.metrics.went_direct(reason)
        else:
            refusal = await self._prefill(errand, course)
            if refusal is not None:
                return refusal
        try:
            return await self._decode(errand, course, self._candidates(Role.DECODE, course))
        except (NoEngineLeft, Abandoned):
            self.farewells.give_back(errand)
            raise

    async def _by_holder(self, errand: InflightRequest, course: RouteRecord) -> EngineAnswer | None:
        """The answer of the decode engine that holds the prefix; None if it is gone."""
        try:
            answer = await self._decode(
                errand, course, (one.candidate for one in course.decision.decode[:1])
            )
        except NoEngineLeft:
            if not self.engines.live(Role.DECODE):
                raise
            return None
        self.metrics.went_direct(Direct.PREFIX_HELD)
        return answer

    async def _prefill(self, errand: InflightRequest, course: RouteRecord) -> EngineAnswer | None:
        """Get the errand its ticket; what it returns is prefill's refusal."""
        exchange = errand.exchange
        body = prefill_body(exchange.request)
        misses: list[Miss] = []
        for candidate in self._candidates(Role.PREFILL, course):
            engine = candidate.engine
            _go_on(errand, Stage.PREFILL)
            uncached = max(0, course.num_tokens - candidate.hit.tokens)
            flight = self.steering.flights.take_off(engine, uncached, candidate.rank)
            try:
                headers = _headers(exchange, candidate)
                headers["Accept-Encoding"] = "identity"  # this answer we read ourselves
                answer = await self.upstream.post(
                    engine, exchange.request.route.path, body, headers
                )
                if answer.status != 200:
                    return answer
                async with answer:
                    whole = await answer.rest()
            except (ConnectFailed, ConnectionLost) as error:
                misses.append(self._skip(Role.PREFILL, engine, exchange, error))
                continue
            finally:
                flight.land()
            errand.ticket = find_ticket(whole)
            took_s = time.perf_counter() - errand.since_s
            self.metrics.time_to_ticket.observe(took_s)
            course.ticket_s = None if errand.ticket is None else took_s
            course.prefill, course.cached_tokens = engine, find_cached_tokens(whole)
            self.steering.reported(course)
            if errand.ticket is None:
                self._note_no_ticket(engine)
            return None
        raise NoEngineLeft(Role.PREFILL.value, self.engines.misses(Role.PREFILL, misses))

    async def _decode(
        self, errand: InflightRequest, course: RouteRecord, candidates: Iterable[Candidate]
    ) -> EngineAnswer:
        exchange = errand.exchange
        misses: list[Miss] = []
        for candidate in candidates:
            engine = candidate.engine
            _go_on(errand, Stage.DECODE)
            try:
                answer = await self._ask_decode(errand, candidate)
            except (ConnectFailed, ConnectionLost) as error:
                misses.append(self._skip(Role.DECODE, engine, exchange, error))
                if errand.ticket is not None and isinstance(error, ConnectionLost):
                    errand.ticket = course.ticket_s = None
                    self.metrics.went_direct(Direct.TICKET_SPENT)
                continue
            course.decode = engine
            course.first_byte_s = time.perf_counter() - errand.since_s
            self.metrics.decode_first_byte.observe(course.first_byte_s)
            if answer.status >= 400:
                # vLLM tells the lender of most requests that it refuses, though
                # not of those whose body it cannot read.  Telling twice is fine.
                self.farewells.give_back(errand)
            return answer
        raise NoEngineLeft(Role.DECODE.value, self.engines.misses(Role.DECODE, misses))

    async def _ask_decode(self, errand: InflightRequest, candidate: Candidate) -> EngineAnswer:
        request = errand.exchange.request
        flight = self.steering.flights.take_off(candidate.engine, 0, candidate.rank)
        try:
            answer = await self.upstream.post(
                candidate.engine,
                request.route.path,
                decode_body(request, errand.ticket),
                _headers(errand.exchange, candidate),
                errand.delivery,
            )
        except BaseException:
            flight.land()
            raise
        answer.when_closed(flight.land)
        try:
            await answer.await_first()
        except BaseException:
            answer.close()
            raise
        return answer

    def _candidates(self, role: Role, course: RouteRecord) -> Iterator[Candidate]:
        """Those decided on that are still offered, then those that came up since."""
        live = self.engines.live(role)
        decision = course.decision
        ordered = decision.prefill if role is Role.PREFILL else decision.decode
        for one in ordered:
            if one.candidate.engine in live:
                yield one.candidate
        known = {one.candidate.engine for one in ordered}
        for engine in live:
            if engine not in known:
                yield Candidate(engine)

    def _skip(
        self, role: Role, engine: str, exchange: Exchange, error: ConnectFailed | ConnectionLost
    ) -> Miss:
        self.metrics.asked_in_vain(role, engine)
        self.health.report_down(engine, str(error), exchange.request_id)
        return Miss(engine, str(error))

    def _note_no_ticket(self, engine: str) -> None:
        self.metrics.went_direct(Direct.NO_TICKET)
        self._lend_nothing.intersection_update(self.engines.names)
        if engine not in self._lend_nothing:
            self._lend_nothing.add(engine)
            log.warning(
                "prefill engine=%s answers without kv_transfer_params: decode computes its "
                "prompts again. Is it running with --kv-transfer-config? (said once)",
                engine,
            )


def _headers(exchange: Exchange, candidate: Candidate) -> CIMultiDict[str]:
    """The client's, and the data-parallel rank whose cache was looked at, if there are several."""
    headers = exchange.headers.copy()
    if candidate.rank is not None:
        headers[RANK_HEADER] = str(candidate.rank)
    return headers


def _go_on(errand: InflightRequest, stage: Stage) -> None:
    """Ask the next engine, unless nobody is left to ask for."""
    if errand.abandoned:
        raise Abandoned
    errand.enter(stage)
