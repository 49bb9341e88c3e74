"""Requests whose clients left: aborts them without leaving blocks lent.

Prefill keeps a request's blocks until decode reports that it is done with them, or until their
lease ends, many seconds later.  Closing the connection to an engine aborts the request there, but
not in every state::

    client ──► prefill ──ticket──► decode ──► client
                  │         │         │
    if it leaves: close,    return    close,
                  later     it        later

* Between the end of a prefill and the head of its answer the blocks are lent and the ticket has not
  arrived: closing then loses the ticket.  A short prefill spends much of its time there.  So
  prefill gets ``PATIENCE_S`` to finish, and its ticket is returned; a longer prefill is aborted,
  which rarely hits that moment.
* A ticket that no decode engine has seen is returned through one (``ticket_return``).
* Decode that was asked early is closed at once (``early_leg``), and the ticket is returned when it
  arrives.
* vLLM's HTTP server drops a request whose client left before the server read it, without notifying
  the connector.  After ``PATIENCE_S``, or at the first byte of an answer, the engine has the
  request; closing then aborts it, and the engine reports that to the lender.

The lease frees blocks that none of this frees.

A decode engine may also answer before prefill.  That prefill goes on without a reader, since its
answer has facts that the router learns from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from pdconn.router.background import Background
from pdconn.router.handover.ticket_return import TicketReturner
from pdconn.router.router_errors import Refusal
from pdconn.router.routing.request_events import ClientLeft, StepKind
from pdconn.router.routing.routed_request import Abandoned, RoutedRequest

#: Much longer than what it waits for, which takes milliseconds in a healthy engine, and a second
#: where many engines share few cores.  The cost: an engine learns up to this much later that the
#: client has left.
PATIENCE_S = 2.0

#: From decode's first byte until prefill is aborted.  Usually it answers in the same moment: decode
#: has the last of its blocks.
LATE_S = 30.0

#: Each holds its request's body.
MOST_ABANDONED = 1024


class LegResult(Protocol):
    """What a request's hand-over gives: an engine's answer, or where it is to come from."""

    def close(self) -> None:
        """End the request there, if it has not ended."""

    async def wait_begun(self) -> bool:
        """Wait until the answer has begun; False if it will not."""

    def when_begun(self, act: Callable[[], object]) -> None:
        """Call ``act`` once the answer has begun, or it is known that it will not."""


class AbandonedRequests:
    """Finishes the requests of clients that left, and late prefills, in the background."""

    def __init__(
        self, tickets: TicketReturner, patience_s: float = PATIENCE_S, late_s: float = LATE_S
    ) -> None:
        self._tickets = tickets
        self._patience_s = patience_s
        self._late_s = late_s
        self._running = Background(limit=MOST_ABANDONED)

    async def close(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for running tasks, and then for the tickets that they return."""
        began_s = time.monotonic()
        await self._running.close(grace_s)
        await self._tickets.close(grace_s - (time.monotonic() - began_s))

    def return_ticket(self, request: RoutedRequest) -> None:
        """Return the request's ticket, if it has one; it will not be used."""
        ticket = request.spend_ticket()
        if ticket is not None:
            self._tickets.give_back(request, ticket)

    def decode_was_first(
        self,
        request: RoutedRequest,
        prefill: asyncio.Task[Any],
        answer: LegResult | None,
    ) -> None:
        """Take over ``prefill``, which nothing waits for: decode has its ``answer``, or failed."""
        request.held.add_user()
        finish = self._finish_prefill(request, prefill, answer)
        if not self._running.spawn(finish, "finish a late prefill"):
            request.held.drop_user()
            prefill.cancel()
            prefill.add_done_callback(close_answer)

    async def _finish_prefill(
        self, request: RoutedRequest, prefill: asyncio.Task[Any], answer: LegResult | None
    ) -> None:
        try:
            late_s = self._late_s
            if answer is not None and not await _first_of(answer.wait_begun(), prefill):
                late_s = self._patience_s
            async with asyncio.timeout(late_s):
                await prefill
        except (TimeoutError, Abandoned, Refusal):
            pass
        finally:
            prefill.add_done_callback(close_answer)
            request.keep_refusal(None)
            request.held.drop_user()

    def client_left(self, request: RoutedRequest, task: asyncio.Task[LegResult]) -> None:
        """Take over ``task``, which is still running the request."""
        request.note(ClientLeft())
        request.held.add_user()
        if not self._running.spawn(self._finish(request, task), "finish an abandoned request"):
            request.held.drop_user()
            task.cancel()
            task.add_done_callback(close_answer)

    async def _finish(self, request: RoutedRequest, task: asyncio.Task[LegResult]) -> None:
        try:
            async with asyncio.timeout(self._wait_s(request)):
                answer = await task
        except TimeoutError:
            # Handing over cancelled the task, which closed the engine's connection unless the
            # answer arrived at the same moment.
            task.add_done_callback(close_answer)
            decode = request.asked(StepKind.DECODE)
            if decode is None or not decode.delivery.begun:
                self.return_ticket(request)
        except (Abandoned, Refusal):
            pass
        else:
            answer.close()
        finally:
            request.held.drop_user()

    def _wait_s(self, request: RoutedRequest) -> float:
        """Seconds to wait before closing the engine's connection."""
        prefill, decode = request.asked(StepKind.PREFILL), request.asked(StepKind.DECODE)
        if decode is None or (prefill is not None and not request.is_over(prefill)):
            return self._patience_s
        if request.ticket is None:
            return 0.0  # no blocks depend on it
        return max(0.0, self._patience_s - (time.perf_counter() - decode.at_s))


async def _first_of(begun: Coroutine[Any, Any, bool], prefill: asyncio.Task[Any]) -> bool:
    """Whether the answer has begun, or prefill has ended before that is known."""
    waiting = asyncio.create_task(begun)
    try:
        await asyncio.wait({waiting, prefill}, return_when=asyncio.FIRST_COMPLETED)
        return not waiting.done() or waiting.result()
    finally:
        waiting.cancel()


def close_answer(task: asyncio.Task[Any]) -> None:
    """Close the answer of a task that has ended, if there is one: it has no reader."""
    if not task.cancelled() and task.exception() is None and (answer := task.result()) is not None:
        answer.close()
