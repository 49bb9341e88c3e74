"""Borrows a prompt's prefix from the engine that holds it, for prefill to pull.

::

    decide ──► ask the holder ──ticket──► prefill pulls it, computes the rest, lends all to decode
                    │                        │
                    └─ refused, late,        └─ has not used it: the ticket is returned
                       failed: prefill
                       computes

The holder may take as long as the pull would save.  A later ticket is returned, and so is the
ticket of a client that left meanwhile.  Pulled tokens and their time update the planner.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from msgspec import Raw

from pdconn.router.admission.places import HeldBody
from pdconn.router.background import Background
from pdconn.router.fleet.engine_client import (
    ConnectFailed,
    ConnectionLost,
    EngineClient,
    OutOfResources,
)
from pdconn.router.fleet.health import Health
from pdconn.router.handover.ticket_return import TicketReturner
from pdconn.router.openai.bodies import find_prefix_ticket, find_ticket, prefix_body, without_prompt
from pdconn.router.openai.requests import RANK_HEADER, REQUEST_ID_HEADER, Route
from pdconn.router.pulls.planner import RESTS_S, PullPlanner
from pdconn.router.pulls.pull_choice import Holder, PullChoice
from pdconn.router.pulls.pull_outcome import PrefixPull, PullEnd
from pdconn.router.routing.policy import Candidate
from pdconn.router.routing.request_events import Began, Learned, Prefilled, Pulled, StepKind
from pdconn.router.routing.routed_request import RoutedRequest

log = logging.getLogger(__name__)

GIVE_UP_S = 10.0
"""Time-out of a holder; a ticket that it makes later ends by its lease."""
MOST_ASKED = 256
"""Concurrent requests to holders."""


HolderAnswer: TypeAlias = Raw | PullEnd
"""A ticket, or the reason why there is none."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A ticket for a prefix, to be sent to prefill."""

    choice: PullChoice
    asked: RoutedRequest
    ticket: Raw

    @property
    def prefix_tokens(self) -> int:
        """Tokens that the ticket covers."""
        return 0 if self.choice.holder is None else self.choice.holder.tokens


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """A prefill that has ended: its engine, the prompt's tokens and the seconds it took.

    ``learns``: the measurement is usable, as the engine was idle when it began, and the tokens were
    counted.
    """

    candidate: Candidate
    num_tokens: int
    took_s: float
    learns: bool


class PrefixPulls:
    """Borrows prefixes from holders in the background, and returns unused tickets."""

    def __init__(
        self,
        planner: PullPlanner,
        client: EngineClient,
        health: Health,
        tickets: TicketReturner,
    ) -> None:
        self._planner = planner
        self._client = client
        self._health = health
        self._tickets = tickets
        self._asking = Background(limit=MOST_ASKED)

    async def close(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for pending requests to holders."""
        await self._asking.close(grace_s)

    async def borrow(self, request: RoutedRequest, candidate: Candidate) -> Borrowed | None:
        """A ticket for the prefix that ``candidate`` should pull; None if it computes its prompt.

        Notes the outcome in ``request.pull``, and releases the request's tokens.
        """
        tokens, request.tokens = request.tokens, None
        choice = candidate.pull
        if choice is None or choice.holder is None or tokens is None:
            return None
        engine, num_tokens = choice.holder.engine, choice.holder.tokens
        with request.within(StepKind.BORROW, engine, tokens=num_tokens) as began:
            borrowed = await self._borrow(request, choice, choice.holder, tokens, began)
            request.note(Learned(began, {"lent": borrowed is not None}))
        return borrowed

    async def _borrow(
        self,
        request: RoutedRequest,
        choice: PullChoice,
        holder: Holder,
        tokens: Sequence[int],
        began: Began,
    ) -> Borrowed | None:
        body = prefix_body(request.body, tokens[: holder.tokens + 1])
        asked = _asked(request, holder)
        if request.trace is not None:
            request.trace.inject(began, asked.headers)
        answer: asyncio.Future[HolderAnswer] = asyncio.get_running_loop().create_future()
        asking = self._ask(request.held, asked, holder, body, answer)
        if not self._asking.spawn(asking, "ask for a prefix"):
            return None
        try:
            async with asyncio.timeout(choice.patience_s):
                came = await answer
        except TimeoutError:
            # Which may have arrived in the same iteration of the loop.
            came = _answer_by_now(answer)
        except asyncio.CancelledError:
            if isinstance(left := _answer_by_now(answer), Raw):
                self._tickets.give_back(asked, left)
            raise
        took_s = time.perf_counter() - began.at_s
        pull = PrefixPull(holder.engine, holder.tokens, choice.saved, took_s)
        if isinstance(came, PullEnd):
            request.note(Pulled(replace(pull, end=came)))
            return None
        request.note(Pulled(pull))
        return Borrowed(choice, asked, came)

    async def _ask(
        self,
        held: HeldBody,
        asked: RoutedRequest,
        holder: Holder,
        body: bytes,
        answer: asyncio.Future[HolderAnswer],
    ) -> None:
        over = self._planner.start_lending(holder.engine)
        came: HolderAnswer = PullEnd.FAILED
        try:
            with held:  # the body stays counted as long as this one, which is derived from it
                async with asyncio.timeout(GIVE_UP_S):
                    came = await self._ticket_of(asked, holder, body)
        except OutOfResources as error:
            log.warning("pdconn: prefix not requested: %s", error)
        except ConnectFailed as error:
            self._health.report_down(holder.engine, str(error), asked.request_id)
        except ConnectionLost as error:
            self._health.suspect(holder.engine, str(error), asked.request_id)
        except TimeoutError:
            came = PullEnd.LATE
        finally:
            over()
            if not answer.done():
                answer.set_result(came)
            elif isinstance(came, Raw):
                self._tickets.give_back(asked, came)

    async def _ticket_of(self, asked: RoutedRequest, holder: Holder, body: bytes) -> HolderAnswer:
        path = Route.COMPLETIONS.path
        answer = await self._client.post_body(holder.engine, path, body, asked.headers)
        async with answer:
            whole = await answer.read_rest()
        if answer.status != 200:
            return PullEnd.REFUSED
        ticket = find_prefix_ticket(whole)
        if ticket is not None:
            return ticket
        if find_ticket(whole) is None and self._planner.start_rest(holder.engine, time.monotonic()):
            log.warning(
                "pdconn: holder lends no prefix, skipped for %g s; "
                "does it run PdconnConnector with kv_role kv_both? engine=%s",
                RESTS_S,
                holder.engine,
            )
        return PullEnd.REFUSED

    def pull_failed(
        self, request: RoutedRequest, borrowed: Borrowed, engine: str | None = None
    ) -> None:
        """Note that prefill failed, or refused the request, while it had the ticket.

        ``engine``: the engine, if its pull may have failed.
        """
        self._tickets.give_back(borrowed.asked, borrowed.ticket)
        self._end(request, PullEnd.FAILED)
        if engine is not None:
            self._planner.note_wasted(engine, borrowed.choice, time.monotonic())

    def prefilled(self, request: RoutedRequest, borrowed: Borrowed | None, leg: PrefillLeg) -> None:
        """Note prefill's answer, which may report how many tokens were cached.

        Without that report the ticket is returned, which has no effect if it was used.
        """
        prefilled = request.last(Prefilled)
        now, cached = time.monotonic(), None if prefilled is None else prefilled.cached_tokens
        if borrowed is None:
            if leg.learns:
                self._learn(leg, cached, now)
            return
        prefix = borrowed.prefix_tokens
        if cached is None or cached < prefix:
            self._tickets.give_back(borrowed.asked, borrowed.ticket)
        if cached is not None and cached < prefix:
            self._end(request, PullEnd.UNUSED)
            self._planner.note_wasted(leg.candidate.engine, borrowed.choice, now)
            return
        self._end(request, PullEnd.TAKEN)
        if leg.learns:
            rest = leg.num_tokens - prefix
            self._planner.note_pulled(leg.candidate.engine, borrowed.choice, rest, leg.took_s, now)

    def _learn(self, leg: PrefillLeg, cached: int | None, now: float) -> None:
        """Update the planner: prefill computed uncached tokens, and loaded those in its store."""
        hit, engine = leg.candidate.hit, leg.candidate.engine
        rest = max(0, leg.num_tokens - (hit.tokens if cached is None else cached))
        if not hit.loaded_tokens:
            self._planner.note_computed(engine, rest, leg.took_s, now)
        elif cached == hit.tokens:
            self._planner.note_loaded(engine, hit.loaded_tokens, rest, leg.took_s, now)

    def _end(self, request: RoutedRequest, end: PullEnd) -> None:
        assert request.pull is not None
        request.note(Pulled(replace(request.pull, end=end)))


def _answer_by_now(answer: asyncio.Future[HolderAnswer]) -> HolderAnswer:
    """The holder's answer so far."""
    return answer.result() if answer.done() and not answer.cancelled() else PullEnd.LATE


def _asked(request: RoutedRequest, holder: Holder) -> RoutedRequest:
    """A request of our own, to the holder."""
    headers = request.headers.copy()
    name = f"{request.request_id}-prefix"
    headers[REQUEST_ID_HEADER] = name
    headers["Accept-Encoding"] = "identity"  # the router parses this answer
    if holder.rank is not None:
        headers[RANK_HEADER] = str(holder.rank)
    body = without_prompt(request.body)
    return RoutedRequest(name, headers, body, serving=request.serving)
