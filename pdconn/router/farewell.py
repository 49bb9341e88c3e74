"""What is left to do for a request whose client has gone.

Prefill keeps a request's blocks until decode says that it is done with them, or
their lease ends, many seconds later.  So a ticket that nobody presents costs
memory, and three moments need care::

    client ──► prefill ──ticket──► decode ──► client
                  │         │         │
        leaves:   close    give it   close, but not before
                  it       back      decode must know of it

* While prefill computes, closing its connection aborts the request.  Once the
  head of its answer is here the blocks are lent: we read on and give back.
* With a ticket that no decode engine has seen, decode is asked to give it back
  (``returns``).
* While decode begins, closing at once can come too early: vLLM's HTTP server
  drops a request whose client is gone before it was looked at, and nobody tells
  the connector.  After ``_ADMISSION_S``, or the first byte, the engine knows the
  request; closing then aborts it, and the engine tells the lender.

One gap stays: prefill has finished, and the head of its answer is on its way
when the client leaves.  It is milliseconds wide, and the lease closes it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from msgspec import Raw

from pdconn.router.background import Background
from pdconn.router.requests import Exchange
from pdconn.router.returns import Returns
from pdconn.router.upstream import Answer, Delivery, Lost, Unreached

#: A frontend that has not looked at a request for this long is no longer
#: serving anybody.  The price: a client's leaving is passed on this much later.
_ADMISSION_S = 1.0

#: The rest of a prefill answer whose head is here: one packet, if any.
_REST_OF_ANSWER_S = 5.0

#: Each holds its request's body.
_LIMIT = 1024


@dataclass(slots=True)
class Asking:
    """A decode engine is being asked: the task, and how far it has come."""

    answer: asyncio.Future[Answer]
    ticket: Raw | None
    delivery: Delivery
    started_s: float = field(default_factory=time.perf_counter)

    def admission_left_s(self) -> float:
        """Seconds until the engine must know of the request."""
        if self.ticket is None:
            return 0.0  # nobody's blocks hang on it
        return max(0.0, self.started_s + _ADMISSION_S - time.perf_counter())


class Farewells:
    """Finishes, in the background, what clients leave behind."""

    def __init__(self, returns: Returns) -> None:
        self._returns = returns
        self._running = Background(limit=_LIMIT)

    async def close(self, grace_s: float) -> None:
        """Wait a while for what is under way, tickets last."""
        await self._running.close(grace_s)
        await self._returns.close(grace_s)

    def give_back(self, exchange: Exchange, ticket: Raw) -> None:
        """A ticket that its request will not use."""
        self._returns.give_back(exchange, ticket)

    def left_while_reading(self, exchange: Exchange, reading: asyncio.Future[Raw | None]) -> None:
        """The client left when prefill's answer had begun to arrive."""
        if not self._running.spawn(self._finish_reading(exchange, reading), "read a ticket"):
            reading.cancel()

    def left_while_asking(self, exchange: Exchange, asking: Asking) -> None:
        """The client left before the first byte of decode's answer."""
        if not self._running.spawn(self._let_go(exchange, asking), "let decode go"):
            asking.answer.cancel()

    async def _finish_reading(
        self, exchange: Exchange, reading: asyncio.Future[Raw | None]
    ) -> None:
        try:
            async with asyncio.timeout(_REST_OF_ANSWER_S):
                ticket = await reading
        except (TimeoutError, Lost):
            return
        if ticket is not None:
            self.give_back(exchange, ticket)

    async def _let_go(self, exchange: Exchange, asking: Asking) -> None:
        unseen = False
        try:
            async with asyncio.timeout(asking.admission_left_s()):
                answer = await asking.answer
            answer.close()
        except TimeoutError:
            # The time-out has cancelled the asking, and that closed the
            # connection, if there was one.
            unseen = not asking.delivery.begun
        except Unreached:
            unseen = True
        except Lost:
            pass
        if unseen and asking.ticket is not None:
            self.give_back(exchange, asking.ticket)
