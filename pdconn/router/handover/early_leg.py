"""Decode's leg of a request while prefill has not answered: it may begin with an early ticket.

The router mints a *stream* and sends it to prefill with the request, and to decode in an early
ticket (``pdconn.protocol.early``).  Decode then reads what prefill has written while it computes.
An early ticket and the ticket of prefill's answer name the same blocks::

    waits ──its turn──► asked ──decode answers───────► its answer goes to the client
      │                   ├──decode fails────────────► spent: prefill's ticket is returned
      │                   ├──prefill's ticket arrives► joined: decode's ticket from now on
      │                   └──prefill does not lend───► closed, which aborts it
      ├──prefill's ticket arrives──► joined: decode is asked with it, as without streams
      └──prefill does not lend─────► closed

* Its turn comes once prefill is sent the request, and will soon take it up.  A decode engine holds
  a place for each request that waits there.
* Only the first prefill engine that is asked is followed: a request has one stream.
* Once decode has answered, or its early ticket is spent, prefill's answer changes nothing for the
  client.  It is awaited in the background (``abandoned``), for what the router learns from it.
* A stream that fails at decode, in any way, makes decode compute the prompt.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Raw

from pdconn.protocol.early import EarlyTicket
from pdconn.router.fleet.engine_client import EngineAnswer
from pdconn.router.fleet.flights import Flight
from pdconn.router.fleet.lenders import is_one_boot
from pdconn.router.fleet.member import Role
from pdconn.router.handover.abandoned import AbandonedRequests, LegResult, close_answer
from pdconn.router.handover.tries import EngineTries
from pdconn.router.metric_table import EarlyStart
from pdconn.router.openai.requests import Route
from pdconn.router.routing.decision_log import DecisionLog
from pdconn.router.routing.policy import Candidate, Decision
from pdconn.router.routing.request_events import ClientLeft, Event, StepKind, Streamed
from pdconn.router.routing.routed_request import RoutedRequest

A = TypeVar("A", bound=LegResult)
AskDecode: TypeAlias = "Callable[[], Coroutine[Any, Any, A]]"
"""Serves the request at decode, with what is its ``usable_ticket`` then."""
GetTicket = Callable[[], Coroutine[Any, Any, EngineAnswer | None]]
"""Gets a request its ticket; returns an engine's refusal."""


@dataclass(frozen=True, slots=True)
class EarlyLegs:
    """Begins decode's legs early.

    Attributes:
        chunk_tokens: decode is asked once the requests before this one at its prefill engine have
            at most this many tokens to compute.
        most: requests that wait at one decode engine with an early ticket.
        reuses_tokens: decode receives the token ids of a chat from prefill, so it has to wait.
        waiting: those that wait, by decode engine.
    """

    tries: EngineTries
    abandoned: AbandonedRequests
    decisions: DecisionLog
    chunk_tokens: int
    most: int
    reuses_tokens: bool = False
    waiting: Counter[str] = field(default_factory=Counter)

    def leg_for(self, request: RoutedRequest, decision: Decision, ask: AskDecode[A]) -> EarlyLeg[A]:
        """Decode's leg of a request."""
        leg = EarlyLeg(self, request, decision, ask)
        request.watchers = (*request.watchers, leg)
        return leg

    def has_room(self, engine: str) -> bool:
        """Whether one more request may wait at a decode engine."""
        return self.waiting[engine] < self.most

    def stop_waiting(self, engine: str) -> None:
        """One request less waits at a decode engine."""
        self.waiting[engine] -= 1
        if not self.waiting[engine]:
            del self.waiting[engine]


class _LegState(Enum):
    """What has become of decode's leg."""

    WAITS = "waits"
    ASKED = "asked"
    JOINED = "joined"
    CLOSED = "closed"


class EarlyLeg(Generic[A]):
    """Decode's leg of one request.

    It runs in a task of its own from the start, and waits there for its turn.
    """

    kinds: ClassVar[frozenset[type[Event]]] = frozenset((ClientLeft,))

    def __init__(
        self, legs: EarlyLegs, request: RoutedRequest, decision: Decision, ask: AskDecode[A]
    ) -> None:
        self._legs = legs
        self._request = request
        self._decision = decision
        self._state = _LegState.WAITS
        self._why_not: EarlyStart | None = None
        self._early: EarlyTicket | None = None
        self._has_moved = True
        self._waits_at: str | None = None
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decode = asyncio.create_task(self._run(ask))
        self._decode.add_done_callback(self._decode_ended)

    async def serve(self, get_ticket: GetTicket) -> EngineAnswer | A | None:
        """Prefill's refusal, or decode's answer; None if decode is to be asked by the caller.

        ``get_ticket``: :meth:`pdconn.router.handover.prefill.Prefill.get_ticket`, with this leg.

        Raises:
            Refusal, Abandoned: as either leg.
        """
        prefill = asyncio.create_task(self._run_prefill(get_ticket))
        legs: set[asyncio.Task[Any]] = {prefill, self._decode}
        answer: EngineAnswer | A | None = None
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            if self._state is _LegState.CLOSED:
                await asyncio.wait({prefill})
            # 1. Decode has answered, or failed for good.
            elif self._decode.done():
                if not prefill.done():
                    legs.discard(prefill)
                    failed = self._decode.cancelled() or self._decode.exception() is not None
                    served = None if failed else self._decode.result()
                    self._legs.abandoned.decode_was_first(self._request, prefill, served)
                answer = self._decode.result()
                return answer
            # 2. Prefill refuses the client's mistake, or no engine is left.
            answer = prefill.result()
            # 3. Decode has a ticket now, or goes on without one.
            if answer is None and self._state is not _LegState.CLOSED:
                answer = await self._decode
            return answer
        finally:
            await _end_legs(legs, answer)

    # Prefill

    def offer(self, candidate: Candidate) -> None:
        """The first prefill engine will be asked: follow it, if it is known where it lends."""
        if self._legs.reuses_tokens and self._request.body.route is Route.CHAT:
            self._why_not = EarlyStart.NEEDS_TOKENS
            return
        known, stream = self._legs.tries.engines.lenders, secrets.token_hex(16)
        self._early = known.early_ticket(candidate.engine, candidate.rank, stream)
        self._why_not = EarlyStart.UNKNOWN_LENDER if self._early is None else EarlyStart.QUEUED

    @property
    def stream(self) -> str | None:
        """What prefill is to name its request, so that decode can follow it."""
        return None if self._early is None else self._early.stream

    def prefill_is_sent(self, flight: Flight) -> None:
        """Prefill is sent the request: decode's turn comes when prefill will soon take it up."""
        if self._early is not None:
            flight.when_ahead(self._legs.chunk_tokens, self._take_turn)

    def prefill_lends(self, lender: EarlyTicket | None) -> None:
        """The prefill engine that is followed has issued a ticket; ``lender``: the boot in it."""
        early = self._early
        self._has_moved = early is None or lender is None or not is_one_boot(early, lender)

    async def give_up(self) -> bool:
        """The prefill engine that is followed will not lend: close decode's leg.

        False if that goes on by itself: decode has answered, or its early ticket is spent.  Then no
        other prefill engine is to be asked.
        """
        if self._state is not _LegState.CLOSED:
            if self._decode.done() or self._is_spent:
                return False
            await self._close()
        return True

    async def _run_prefill(self, get_ticket: GetTicket) -> EngineAnswer | None:
        request = self._request
        try:
            refusal = await get_ticket()
            # No other task has run since a ticket arrived.
            await self._prefill_answered()
            return refusal
        finally:
            if self._why_not is not None:
                request.note(Streamed(self._why_not))
            # From now on the leg ends as any that decode has: with its request.
            request.watchers = tuple(one for one in request.watchers if one is not self)
            if self._decode.done():
                self._legs.decisions.end_decision(self._decision, request.outcome())

    async def _prefill_answered(self) -> None:
        has_ticket = self._request.ticket is not None
        match self._state:
            case _LegState.WAITS if has_ticket:
                self._join()
            case _LegState.ASKED if has_ticket and not (self._is_spent or self._has_moved):
                self._join()
            # Decode has not used this ticket, and will not.
            case _LegState.ASKED if self._is_spent or self._decode.done():
                self._legs.abandoned.return_ticket(self._request)
            # Nothing is lent, or it is lent where decode does not look.
            case _LegState.WAITS | _LegState.ASKED:
                await self._close()

    def _join(self) -> None:
        """Decode's ticket is prefill's from now on."""
        self._state = _LegState.JOINED
        self._request.early = None
        self._stop_waiting()
        if not self._turn.done():
            self._turn.set_result(None)

    # Decode

    async def _run(self, ask: AskDecode[A]) -> A:
        await self._turn
        if self._state is _LegState.WAITS and not self._begin_early():
            # It comes again with prefill's ticket.
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn
        return await ask()

    def _begin_early(self) -> bool:
        """Give the request its early ticket, if the decode engine that is next may have it."""
        legs, request, prefill = self._legs, self._request, self._request.asked(StepKind.PREFILL)
        decode = next(legs.tries.candidates(Role.DECODE, self._decision, request), None)
        assert self._early is not None  # else it has no turn
        assert prefill is not None
        if decode is None:
            return False
        if decode.engine == prefill.engine:
            self._why_not = EarlyStart.SAME_ENGINE
            return False
        if not legs.has_room(decode.engine):
            self._why_not = EarlyStart.TOO_MANY
            return False
        self._waits_at = decode.engine
        legs.waiting[decode.engine] += 1
        self._state, self._why_not = _LegState.ASKED, None
        request.early = Raw(msgspec.json.encode(self._early.to_params()))
        request.note(Streamed(EarlyStart.STARTED, time.perf_counter() - prefill.at_s))
        return True

    def _take_turn(self) -> None:
        if self._state is _LegState.WAITS:
            self._turn.set_result(None)

    def _decode_ended(self, decode: asyncio.Task[A]) -> None:
        if decode.cancelled() or decode.exception() is not None:
            self._stop_waiting()
        else:
            # A gateway may have been told where to ask, and nothing has answered yet.
            decode.result().when_begun(self._stop_waiting)

    def _stop_waiting(self) -> None:
        engine, self._waits_at = self._waits_at, None
        if engine is not None:
            self._legs.stop_waiting(engine)

    @property
    def _is_spent(self) -> bool:
        """Whether decode may have used the early ticket, and the leg goes on without it."""
        return self._state is _LegState.ASKED and self._request.early is None

    def saw(self, request: RoutedRequest, event: Event) -> None:
        """The client has left: close decode's leg; prefill's ticket is returned when it comes."""
        del request, event
        if not self._decode.done():
            self._cancel()

    def _cancel(self) -> None:
        self._state = _LegState.CLOSED
        self._request.early = None
        self._decode.cancel()

    async def _close(self) -> None:
        """Close decode's leg, which aborts the request there."""
        self._cancel()
        await asyncio.wait({self._decode})


async def _end_legs(legs: Iterable[asyncio.Task[Any]], kept: LegResult | None) -> None:
    """End what is under way, and close every answer but the one that is kept."""
    for leg in legs:
        leg.cancel()
    await asyncio.wait(legs)
    for leg in legs:
        if leg.cancelled() or leg.exception() is not None or leg.result() is not kept:
            close_answer(leg)
