"""Unused tickets, returned so that prefill frees the blocks before the lease ends.

Best effort, bounded in time and number: leases free the blocks of tickets not returned here.
"""

from __future__ import annotations

import asyncio
import logging

from msgspec import Raw

from pdconn.router.background import Background
from pdconn.router.fleet.engine_client import ConnectFailed, ConnectionLost, EngineClient
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Role
from pdconn.router.handover.tries import ELSEWHERE
from pdconn.router.metric_table import TicketEnd
from pdconn.router.openai.bodies import return_body
from pdconn.router.router_metrics import RouterMetrics
from pdconn.router.routing.routed_request import RoutedRequest

log = logging.getLogger(__name__)

#: A third of vLLM's default lease; configured as a third of ``--lease``.
GIVE_UP_S = 10.0

#: The wait for a decode engine while none is up.
_PAUSE_S = 0.25

#: Each holds its request's body.
MOST_RETURNS = 256


class TicketReturner:
    """Returns tickets through decode engines, in the background."""

    def __init__(
        self,
        engines: EngineRegistry,
        client: EngineClient,
        metrics: RouterMetrics,
        *,
        give_up_s: float = GIVE_UP_S,
        most_returns: int = MOST_RETURNS,
    ) -> None:
        self._engines = engines
        self._client = client
        self._metrics = metrics
        self._give_up_s = give_up_s
        self._running = Background(limit=most_returns)

    def give_back(self, request: RoutedRequest, ticket: Raw) -> None:
        """Return a ticket in the background."""
        request.held.add_user()
        if not self._running.spawn(self._give_back(request, ticket), "return a ticket"):
            request.held.drop_user()
            self._ended(TicketEnd.TOO_MANY, request)

    async def close(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for tickets that are being returned."""
        await self._running.close(grace_s)

    async def _give_back(self, request: RoutedRequest, ticket: Raw) -> None:
        end = TicketEnd.NO_ENGINE
        body = return_body(request.body, ticket)
        try:
            async with asyncio.timeout(self._give_up_s):
                end = await self._try_each(request, body)
        except TimeoutError:
            pass
        finally:  # also when cancelled at the router's end
            request.held.drop_user()
            self._ended(end, request)

    async def _try_each(self, request: RoutedRequest, body: bytes) -> TicketEnd:
        """Return the ticket through any decode engine of the model: it names only its lender.

        One that has failed the request is the last: while it drains it tells the lender nothing.
        """
        path = request.body.route.path
        while True:
            refused = False
            live = self._engines.live(Role.DECODE, request.serving)
            for engine in sorted(live, key=lambda one: request.has_failed_at(one, Role.DECODE)):
                try:
                    answer = await self._client.post_body(engine, path, body, request.headers)
                    async with answer:
                        await answer.read_rest()
                except (ConnectFailed, ConnectionLost):
                    continue  # a second return has no effect
                if answer.status in ELSEWHERE:
                    refused = True
                    continue
                # 404: refused because of the model's name, and the lender was notified.
                # 200: the engine does not check names; it has pulled and released the blocks.
                returned = answer.status in (200, 404)
                return TicketEnd.RETURNED if returned else TicketEnd.REFUSED
            if refused:
                return TicketEnd.REFUSED
            await asyncio.sleep(_PAUSE_S)

    def _ended(self, end: TicketEnd, request: RoutedRequest) -> None:
        self._metrics.ticket_unused(end)
        if end is not TicketEnd.RETURNED:
            log.warning(
                "pdconn: ticket not returned, its lease will free the blocks outcome=%s request=%s",
                end.value,
                request.request_id,
            )
