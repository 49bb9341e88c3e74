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
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Raw

from pdconn.router.bodies import decode_body, find_ticket, prefill_body
from pdconn.router.engines import Engines
from pdconn.router.errors import Miss, NoEngineLeft
from pdconn.router.farewell import Asking, Farewells
from pdconn.router.health import Health
from pdconn.router.metrics import ProxyMetrics
from pdconn.router.policy import Policy, Role
from pdconn.router.requests import Direct, Exchange
from pdconn.router.upstream import Answer, Delivery, Lost, Unreached, Upstream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Handover:
    """Takes exchanges through prefill and decode."""

    engines: Engines
    upstream: Upstream
    policy: Policy
    health: Health
    metrics: ProxyMetrics
    farewells: Farewells
    _lend_nothing: set[str] = field(default_factory=set)

    async def prefill(self, exchange: Exchange) -> Raw | Answer | None:
        """A ticket, or None without one, or prefill's refusal for the client.

        Raises:
            NoEngineLeft: no prefill engine answers.
        """
        body = prefill_body(exchange.request)
        path = exchange.request.route.path
        headers = exchange.headers.copy()
        headers["Accept-Encoding"] = "identity"  # this answer we read ourselves
        misses: list[Miss] = []
        for engine in self._order(Role.PREFILL, exchange):
            started_s = time.perf_counter()
            try:
                answer = await self.upstream.post(engine, path, body, headers)
                if answer.status != 200:
                    return answer
                ticket = await self._read_ticket(exchange, answer)
            except (Unreached, Lost) as error:
                misses.append(self._skip(Role.PREFILL, engine, exchange, error))
                continue
            self.metrics.time_to_ticket.observe(time.perf_counter() - started_s)
            if ticket is None:
                self._note_no_ticket(engine)
            return ticket
        raise self._nobody_left(Role.PREFILL, misses)

    async def _read_ticket(self, exchange: Exchange, answer: Answer) -> Raw | None:
        if answer.is_here:
            return await _ticket_in(answer)  # waits for nothing: nobody can leave
        reading = asyncio.ensure_future(_ticket_in(answer))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            self.farewells.left_while_reading(exchange, reading)
            raise

    async def decode(self, exchange: Exchange, ticket: Raw | None) -> Answer:
        """Decode's answer, once its first byte is here.

        Raises:
            NoEngineLeft: no decode engine answers.
        """
        misses: list[Miss] = []
        for engine in self._order(Role.DECODE, exchange):
            try:
                answer = await self._ask_decode(exchange, engine, ticket)
            except (Unreached, Lost) as error:
                misses.append(self._skip(Role.DECODE, engine, exchange, error))
                if ticket is not None and isinstance(error, Lost):
                    ticket = None
                    self.metrics.went_direct(Direct.TICKET_SPENT)
                continue
            if ticket is not None and answer.status >= 400:
                # vLLM tells the lender of most requests that it refuses, though
                # not of those whose body it cannot read.  Telling twice is fine.
                self.farewells.give_back(exchange, ticket)
            return answer
        if ticket is not None:
            self.farewells.give_back(exchange, ticket)
        raise self._nobody_left(Role.DECODE, misses)

    async def _ask_decode(self, exchange: Exchange, engine: str, ticket: Raw | None) -> Answer:
        delivery = Delivery()
        begin = self._begin_decode(exchange, engine, ticket, delivery)
        asking = Asking(asyncio.ensure_future(begin), ticket, delivery)
        try:
            answer = await asyncio.shield(asking.answer)
        except asyncio.CancelledError:
            self.farewells.left_while_asking(exchange, asking)
            raise
        self.metrics.decode_first_byte.observe(time.perf_counter() - asking.started_s)
        return answer

    async def _begin_decode(
        self, exchange: Exchange, engine: str, ticket: Raw | None, delivery: Delivery
    ) -> Answer:
        body = decode_body(exchange.request, ticket)
        path = exchange.request.route.path
        answer = await self.upstream.post(engine, path, body, exchange.headers, delivery)
        try:
            await answer.await_first()
        except BaseException:
            answer.close()
            raise
        return answer

    def _order(self, role: Role, exchange: Exchange) -> Sequence[str]:
        return self.policy.order(role, self.engines.live(role), exchange.request)

    def _skip(self, role: Role, engine: str, exchange: Exchange, error: Unreached | Lost) -> Miss:
        self.metrics.asked_in_vain(role, engine)
        self.health.report_down(engine, str(error), exchange.request_id)
        return Miss(engine, str(error))

    def _nobody_left(self, role: Role, tried: list[Miss]) -> NoEngineLeft:
        return NoEngineLeft(role.value, self.engines.misses(role, tried))

    def _note_no_ticket(self, engine: str) -> None:
        self.metrics.went_direct(Direct.NO_TICKET)
        if engine not in self._lend_nothing:
            self._lend_nothing.add(engine)
            log.warning(
                "prefill engine=%s answers without kv_transfer_params: decode computes its "
                "prompts again. Is it running with --kv-transfer-config? (said once)",
                engine,
            )


async def _ticket_in(answer: Answer) -> Raw | None:
    async with answer:
        return find_ticket(await answer.rest())
