"""One request through prefill and decode, with retries on another engine after a failure.

Prefill may be retried anywhere (``prefill``), decode only by the rules of its ticket.  Decode is
asked by this process (``decode``), or a gateway is told where to send the request (``pick``).  With
``--streams`` that may happen before prefill has answered (``early_leg``).

When all have failed the client gets the last engine's answer, as with Envoy; if none answered, the
router's own error.  ``tries`` defines which answers are failures.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from pdconn.router.fleet.engine_client import EngineAnswer, EngineClient
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Role
from pdconn.router.handover.abandoned import AbandonedRequests, LegResult
from pdconn.router.handover.early_leg import EarlyLegs
from pdconn.router.handover.prefetch import Prefetches
from pdconn.router.handover.prefill import Prefill
from pdconn.router.handover.tries import MOST_BROKEN, EngineTries
from pdconn.router.openai.requests import Direct
from pdconn.router.router_errors import NoEngineLeft, Refusal
from pdconn.router.router_metrics import RouterMetrics
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Candidate, Decision
from pdconn.router.routing.request_events import (
    Decided,
    FirstByte,
    Passed,
    StepKind,
    WentDirect,
)
from pdconn.router.routing.routed_request import Abandoned, EventWatcher, RoutedRequest

A = TypeVar("A", bound=LegResult)
B = TypeVar("B", bound=LegResult)
A_co = TypeVar("A_co", bound=LegResult, covariant=True)
"""What decode's legs give: an engine's answer, or where the answer is to come from."""


class DecodeLegs(Protocol[A_co]):
    """Serves requests at decode engines, each with the ``usable_ticket`` that it has then."""

    async def decode(self, request: RoutedRequest, candidates: Iterable[Candidate]) -> A_co:
        """The answer of the first candidate that gives one.

        Raises:
            NoEngineLeft: none does.
            HandoverRequired: decode would have to compute the prompt, and must not.
        """

    async def decode_where_kept(
        self, request: RoutedRequest, candidates: Iterable[Candidate]
    ) -> A_co:
        """The answer of the engine that keeps a response; raises as ``decode``."""


@dataclass(frozen=True, slots=True)
class Handover(Generic[A]):
    """Takes requests through prefill and decode.

    ``early``: begins decode's legs early; None if they never do.  ``watchers``: of each request.
    """

    engines: EngineRegistry
    client: EngineClient
    router: RequestRouter
    metrics: RouterMetrics
    abandoned: AbandonedRequests
    prefill: Prefill
    tries: EngineTries
    prefetches: Prefetches
    decode: DecodeLegs[A]
    early: EarlyLegs | None = None
    watchers: tuple[EventWatcher, ...] = ()

    def with_decode(self, decode: DecodeLegs[B]) -> Handover[B]:
        """The same, whose decode's legs are others."""
        same: Any = self
        return cast("Handover[B]", replace(same, decode=decode))

    async def answer_request(self, request: RoutedRequest) -> EngineAnswer | A:
        """What decode's leg gives for a client's request, or an engine's refusal.

        Cancelled when the client leaves; ``abandoned`` then finishes the request.

        Raises:
            NoEngineLeft: no engine of some role answers.
            HandoverRequired: the request has no ticket, and decode must not compute its prompt.
            OutOfResources: the router cannot open a connection.
            UnknownModel: no engine serves its model.
            BadBody: the prompt exceeds the model's length, or the request names no model of
                several.
        """
        request.watchers = (*request.watchers, *self.watchers, self.metrics, self.router.sessions)
        task = asyncio.create_task(self._run(request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.abandoned.client_left(request, task)
            raise
        finally:
            # Its error refers to this frame, and would keep the request until a collection.
            del task

    async def _run(self, request: RoutedRequest) -> EngineAnswer | A:
        try:
            try:
                return await self._answer(request)
            except NoEngineLeft:
                refusal = request.take_refusal()
                if refusal is None:
                    raise
                request.note(Passed(refusal.status))
                return refusal
        finally:
            request.keep_refusal(None)

    async def _answer(self, request: RoutedRequest) -> EngineAnswer | A:
        request.serving = await self.router.tokeniser.models.engines_for_request(request)
        for _ in self.tries.bounded(itertools.count()):
            if not self.router.eligible(Role.DECODE, request):
                # Prefill would lend blocks for nothing.
                nothing = self.router.no_choice(request, "no decode engine is up")
                request.note(Decided(nothing, is_choice=False))
                raise self.tries.no_decode_left()
            decision = await self._decide(request)
            try:
                answer = await self._serve_or_return(request, decision)
                if isinstance(answer, EngineAnswer):
                    request.note(Passed(answer.status, request.last(FirstByte) is not None))
            finally:
                self.router.decisions.end_decision(decision, request.outcome())
            if answer is not None:
                return answer
        raise self.tries.no_decode_left()

    async def _decide(self, request: RoutedRequest) -> Decision:
        with request.within(StepKind.ROUTE):
            decision = await self.router.decide(request)
            request.note(Decided(decision))
        return decision

    async def _serve_or_return(
        self, request: RoutedRequest, decision: Decision
    ) -> EngineAnswer | A | None:
        """As ``_serve``; a ticket that was not used then is returned."""
        try:
            return await self._serve(request, decision)
        except (Refusal, Abandoned):
            self.abandoned.return_ticket(request)
            raise

    async def _serve(self, request: RoutedRequest, decision: Decision) -> EngineAnswer | A | None:
        """The answer for a decision; None if another decision is needed."""
        ranking = decision.ranking
        # 1. No ticket can serve this body: decode gets it unchanged.
        if request.body.direct is not None:
            request.note(WentDirect(request.body.direct))
        # 2. Decode computes the rest of the prompt: it holds a prefix, or no prefill engine is up.
        elif ranking.alone and ranking.decode:
            no_prefill = self.router.decodes_alone and not ranking.prefill
            request.note(WentDirect(Direct.NO_PREFILL if no_prefill else Direct.PREFIX_HELD))
            return await self._decode_alone(request, ranking.decode[0].candidate)
        # 3. Prefill lends its blocks, refuses, or fails: then decode computes the prompt, if
        # allowed.  Decode may answer before prefill.
        else:
            request.note(WentDirect(None))
            answer = await self._ask_prefill(request, decision)
            if answer is not None:
                return answer
            self.tries.check_may_compute(request)
        candidates = self.tries.candidates(Role.DECODE, decision, request)
        if request.body.direct is Direct.STORED_RESPONSE:
            return await self.decode.decode_where_kept(request, candidates)
        return await self.decode.decode(request, candidates)

    async def _ask_prefill(
        self, request: RoutedRequest, decision: Decision
    ) -> EngineAnswer | A | None:
        """Prefill's refusal, or decode's answer; None if decode is to be asked now."""
        if self.early is None:
            return await self.prefill.get_ticket(request, decision)
        candidates = self.tries.candidates(Role.DECODE, decision, request)
        ask = partial(self.decode.decode, request, candidates)
        leg = self.early.leg_for(request, decision, ask)
        return await leg.serve(partial(self.prefill.get_ticket, request, decision, leg))

    async def _decode_alone(self, request: RoutedRequest, candidate: Candidate) -> A | None:
        """The answer of a decode engine that computes the rest of the prompt.

        None if that engine fails: the others would compute the whole prompt, so another decision is
        needed.
        """
        try:
            return await self.decode.decode(request, (candidate,))
        except NoEngineLeft:
            # As where engines are tried one after the other: it may be its own fault.
            if request.num_broken(Role.DECODE) >= MOST_BROKEN:
                raise
            if not self.router.eligible(Role.DECODE, request):
                raise
            return None
