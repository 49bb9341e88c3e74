"""Giving back tickets that nobody will use, so that prefill need not wait.

Best effort, and bounded in time and number: what is not given back here, the
lease gives back when it ends.
"""

from __future__ import annotations

import asyncio
import logging

from msgspec import Raw

from pdconn.router.background import Background
from pdconn.router.fleet.client import ConnectFailed, ConnectionLost, EngineClient
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.metrics import ProxyMetrics, TicketFate
from pdconn.router.openai.bodies import return_body
from pdconn.router.openai.requests import Exchange
from pdconn.router.routing.policy import Role

log = logging.getLogger(__name__)

#: Half of vLLM's default lease; past it the lease is about to do our work.
_GIVE_UP_S = 10.0

#: Until a decode engine is up again, when none is.
_PAUSE_S = 0.25

#: Each holds its request's body.
_LIMIT = 256


class TicketReturner:
    """Asks decode to give tickets back, in the background."""

    def __init__(
        self, engines: EngineRegistry, upstream: EngineClient, metrics: ProxyMetrics
    ) -> None:
        self._engines = engines
        self._upstream = upstream
        self._metrics = metrics
        self._running = Background(limit=_LIMIT)

    def give_back(self, exchange: Exchange, ticket: Raw) -> None:
        """Start giving a ticket back; nothing waits for it."""
        if not self._running.spawn(self._bounded(exchange, ticket), "give back a ticket"):
            self._ended(TicketFate.TOO_MANY, exchange)

    async def close(self, grace_s: float) -> None:
        """Wait a while for tickets that are on their way."""
        await self._running.close(grace_s)

    async def _bounded(self, exchange: Exchange, ticket: Raw) -> None:
        fate = TicketFate.NO_ENGINE
        body = return_body(exchange.request, ticket)
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                fate = await self._try_each(exchange, body)
        except TimeoutError:
            pass
        self._ended(fate, exchange)

    async def _try_each(self, exchange: Exchange, body: bytes) -> TicketFate:
        """Any decode engine will do: a ticket names its lender, not its reader."""
        path = exchange.request.route.path
        while True:
            for engine in self._engines.live(Role.DECODE):
                try:
                    answer = await self._upstream.post(engine, path, body, exchange.headers)
                    async with answer:
                        await answer.rest()
                except ConnectFailed:
                    continue
                except ConnectionLost:
                    return TicketFate.NO_ENGINE
                # 404: refused for its model's name, and the lender was told.
                # 200: the engine does not check names; it has pulled, and is done.
                told = answer.status in (200, 404)
                return TicketFate.RETURNED if told else TicketFate.REFUSED
            await asyncio.sleep(_PAUSE_S)

    def _ended(self, fate: TicketFate, exchange: Exchange) -> None:
        self._metrics.ticket_unused(fate)
        if fate is not TicketFate.RETURNED:
            log.warning(
                "ticket left to its lease fate=%s request=%s", fate.value, exchange.request_id
            )
