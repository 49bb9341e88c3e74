"""What is left to do for a request whose client has gone.

Prefill keeps a request's blocks until decode says that it is done with them, or
their lease ends, many seconds later.  Closing a connection aborts what vLLM is
doing for it, but not whatever it is doing::

    client ──► prefill ──ticket──► decode ──► client
                  │         │         │
        leaves:   close,    give it   close,
                  later     back      later

* Between the end of a prefill and the head of its answer the blocks are lent
  and nobody can say so: to close then is to lose the ticket.  A short prefill
  spends much of its time there.  So it gets ``_PATIENCE_S`` to finish, and its
  ticket is given back; what takes longer is aborted, and seldom just then.
* With a ticket that no decode engine has seen, decode is asked to give it back
  (``returns``).
* vLLM's HTTP server drops a request whose client is gone before it was looked
  at, and nobody tells the connector.  After ``_PATIENCE_S``, or the first byte of
  an answer, the engine knows the request; closing then aborts it, and the
  engine tells the lender.

What slips through, the lease catches.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum

from msgspec import Raw

from pdconn.router.background import Background
from pdconn.router.errors import NoEngineLeft
from pdconn.router.fleet.client import Delivery, EngineAnswer
from pdconn.router.handover.ticket_return import TicketReturner
from pdconn.router.openai.requests import Exchange

#: Long for what it waits for, which takes milliseconds in a healthy engine.
#: The price: a client's leaving is passed on up to this much later.
_PATIENCE_S = 1.0

#: Each holds its request's body.
_LIMIT = 1024


class Stage(Enum):
    """Whose turn it is."""

    PREFILL = "prefill"
    DECODE = "decode"


class Abandoned(Exception):
    """The client left, and its request was not taken any further."""


@dataclass(slots=True)
class InflightRequest:
    """A request on its way to the first byte of its answer.

    ``ticket`` is there while it may still be used; ``delivery`` says whether the
    decode engine that is being asked can have seen it.
    """

    exchange: Exchange
    stage: Stage = Stage.PREFILL
    ticket: Raw | None = None
    delivery: Delivery = field(default_factory=Delivery)
    since_s: float = field(default_factory=time.perf_counter)
    abandoned: bool = False

    def enter(self, stage: Stage) -> None:
        """Another engine is asked now."""
        self.stage = stage
        self.delivery = Delivery()
        self.since_s = time.perf_counter()

    def patience_s(self) -> float:
        """Seconds before the engine's connection may be closed."""
        if self.stage is Stage.PREFILL:
            return _PATIENCE_S
        if self.ticket is None:
            return 0.0  # nobody's blocks hang on it
        return max(0.0, self.since_s + _PATIENCE_S - time.perf_counter())


class AbandonedRequests:
    """Finishes, in the background, what clients leave behind."""

    def __init__(self, returns: TicketReturner) -> None:
        self._returns = returns
        self._running = Background(limit=_LIMIT)

    async def close(self, grace_s: float) -> None:
        """Wait a while for what is under way, tickets last."""
        await self._running.close(grace_s)
        await self._returns.close(grace_s)

    def give_back(self, errand: InflightRequest) -> None:
        """The errand's ticket, if it has one, will not be used."""
        ticket, errand.ticket = errand.ticket, None
        if ticket is not None:
            self._returns.give_back(errand.exchange, ticket)

    def client_left(self, errand: InflightRequest, task: asyncio.Task[EngineAnswer]) -> None:
        """Nobody waits for the errand any more; ``task`` is still running it."""
        errand.abandoned = True
        if not self._running.spawn(self._see_off(errand, task), "see off"):
            task.cancel()
            task.add_done_callback(_close)

    async def _see_off(self, errand: InflightRequest, task: asyncio.Task[EngineAnswer]) -> None:
        try:
            async with asyncio.timeout(errand.patience_s()):
                answer = await task
        except TimeoutError:
            # It has cancelled the task, and that closed the engine's connection, unless
            # the answer came in the same moment.
            task.add_done_callback(_close)
            if not errand.delivery.begun:
                self.give_back(errand)
        except (Abandoned, NoEngineLeft):
            pass
        else:
            answer.close()


def _close(task: asyncio.Task[EngineAnswer]) -> None:
    """Nobody will read the answer, if there is one."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()
