"""One request through prefill and decode, with retries on another engine after a failure.

Prefill may be retried anywhere (``prefill``), decode may not.  A ticket goes to a second decode
engine only if the first cannot have seen it: a ticket that is used twice names blocks that may be
free by now and hold another prompt's KV cache.  If decode fails or refuses while it may have the
ticket, the next decode engine computes the prompt itself, and finally the same one again: a pull
can fail because two engines do not match, and there may be no other engine.

With ``--streams`` decode may be asked before prefill has answered (``early_leg``).

When all have failed the client gets the last engine's answer, as with Envoy; if none answered, the
router's own error.  ``tries`` defines which answers are failures.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from pdconn.router.fleet.engine_client import (
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    EngineClient,
    IdleConnectionLost,
)
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Role
from pdconn.router.handover.abandoned import AbandonedRequests
from pdconn.router.handover.early_leg import EarlyLegs
from pdconn.router.handover.prefetch import Prefetches
from pdconn.router.handover.prefill import Prefill
from pdconn.router.handover.tries import (
    INTERNAL_ERROR,
    MOST_BROKEN,
    EngineTries,
    may_repeat,
    status_of,
)
from pdconn.router.openai.bodies import decode_body
from pdconn.router.openai.requests import Direct, to_rank
from pdconn.router.router_errors import EngineFailure, HandoverRequired, NoEngineLeft, Refusal
from pdconn.router.router_metrics import RouterMetrics
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Candidate, Decision
from pdconn.router.routing.request_events import (
    Began,
    Decided,
    FirstByte,
    Learned,
    Over,
    Passed,
    StepKind,
    WentDirect,
)
from pdconn.router.routing.routed_request import Abandoned, RoutedRequest, said

_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Handover:
    """Takes requests through prefill and decode.

    ``early``: begins decode's legs early; None if they never do.
    """

    engines: EngineRegistry
    client: EngineClient
    router: RequestRouter
    metrics: RouterMetrics
    abandoned: AbandonedRequests
    prefill: Prefill
    tries: EngineTries
    prefetches: Prefetches
    early: EarlyLegs | None = None

    async def answer_request(self, request: RoutedRequest) -> EngineAnswer:
        """An engine's answer to a client's request, once its body has begun.

        Cancelled when the client leaves; ``abandoned`` then finishes the request.

        Raises:
            NoEngineLeft: no engine of some role answers.
            HandoverRequired: the request has no ticket, and decode must not compute its prompt.
            OutOfResources: the router cannot open a connection.
            UnknownModel: no engine serves its model.
            BadBody: the prompt exceeds the model's length, or the request names no model of
                several.
        """
        request.watchers = (*request.watchers, self.metrics, self.router.sessions)
        task = asyncio.create_task(self._run(request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.abandoned.client_left(request, task)
            raise

    async def _run(self, request: RoutedRequest) -> EngineAnswer:
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

    async def _answer(self, request: RoutedRequest) -> EngineAnswer:
        request.serving = await self.router.tokeniser.models.engines_for_request(request)
        for _ in self.tries.bounded(itertools.count()):
            if not self.router.eligible(Role.DECODE, request):
                # Prefill would lend blocks for nothing.
                nothing = self.router.no_choice(request, "no decode engine is up")
                request.note(Decided(nothing, is_choice=False))
                raise self._none_left()
            decision = await self._decide(request)
            try:
                answer = await self._serve_or_return(request, decision)
                if answer is not None:
                    request.note(Passed(answer.status, request.last(FirstByte) is not None))
            finally:
                self.router.decisions.end_decision(decision, request.outcome())
            if answer is not None:
                return answer
        raise self._none_left()

    def _none_left(self, *failures: EngineFailure) -> NoEngineLeft:
        return NoEngineLeft(Role.DECODE.value, self.engines.failures(Role.DECODE, failures))

    async def _decide(self, request: RoutedRequest) -> Decision:
        with request.within(StepKind.ROUTE):
            decision = await self.router.decide(request)
            request.note(Decided(decision))
        return decision

    async def _serve_or_return(
        self, request: RoutedRequest, decision: Decision
    ) -> EngineAnswer | None:
        """As ``_serve``; a ticket that was not used then is returned."""
        try:
            return await self._serve(request, decision)
        except (Refusal, Abandoned):
            self.abandoned.return_ticket(request)
            raise

    async def _serve(self, request: RoutedRequest, decision: Decision) -> EngineAnswer | None:
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
            self._check_may_compute(request)
        candidates = self.tries.candidates(Role.DECODE, decision, request)
        if request.body.direct is Direct.STORED_RESPONSE:
            return await self._decode_where_kept(request, candidates)
        return await self._decode(request, candidates)

    async def _ask_prefill(self, request: RoutedRequest, decision: Decision) -> EngineAnswer | None:
        """Prefill's refusal, or decode's answer; None if decode is to be asked now."""
        if self.early is None:
            return await self.prefill.get_ticket(request, decision)
        candidates = self.tries.candidates(Role.DECODE, decision, request)
        ask = partial(self._decode, request, candidates)
        leg = self.early.leg_for(request, decision, ask)
        return await leg.serve(partial(self.prefill.get_ticket, request, decision, leg))

    def _check_may_compute(self, request: RoutedRequest) -> None:
        """Refuse a request that decode would compute although it could have been handed over."""
        if request.direct is not None and not self.router.decodes_alone:
            raise HandoverRequired(request.direct)

    async def _decode_alone(
        self, request: RoutedRequest, candidate: Candidate
    ) -> EngineAnswer | None:
        """The answer of a decode engine that computes the rest of the prompt.

        None if that engine fails: the others would compute the whole prompt, so another decision is
        needed.
        """
        try:
            return await self._decode(request, (candidate,))
        except NoEngineLeft:
            # As where engines are tried one after the other: it may be its own fault.
            if request.num_broken(Role.DECODE) >= MOST_BROKEN:
                raise
            if not self.router.eligible(Role.DECODE, request):
                raise
            return None

    async def _decode_where_kept(
        self, request: RoutedRequest, candidates: Iterable[Candidate]
    ) -> EngineAnswer:
        """The answer of the engine that keeps a response; one engine's 404 if none does.

        The router keeps no state about responses, so that several routers share nothing.
        """
        unknown: EngineAnswer | None = None
        try:
            for candidate in candidates:
                try:
                    answer = await self._decode(request, (candidate,))
                except NoEngineLeft:
                    continue
                if answer.status != _NOT_FOUND:
                    return answer
                if unknown is not None:
                    unknown.close()
                unknown = answer
            if unknown is not None:
                answer, unknown = unknown, None
                return answer
        finally:
            if unknown is not None:
                unknown.close()
        raise self._none_left()

    async def _decode(
        self, request: RoutedRequest, candidates: Iterable[Candidate]
    ) -> EngineAnswer:
        failures: list[EngineFailure] = []
        again: list[Candidate] = []  # the ticket or the connection was at fault, not the engine
        second_tries = filter(partial(self.tries.may_ask_again, request), again)
        for candidate in itertools.chain(candidates, second_tries):
            had_ticket = request.usable_ticket is not None
            facts = {"handed_over": had_ticket, "early": request.early is not None}
            began = request.begin_step(StepKind.DECODE, candidate.engine, **facts)
            try:
                answer = await self._ask_decode(request, candidate, began)
            except (ConnectFailed, ConnectionLost) as error:
                failures.append(
                    self.tries.failed_request(Role.DECODE, candidate.engine, request, error)
                )
                if had_ticket and isinstance(error, ConnectionLost):
                    self._spend_ticket(request)
                    if isinstance(error, IdleConnectionLost):
                        again.append(candidate)
                continue
            try:
                failure = await self._failure(request, candidate, answer, began)
            except BaseException:
                answer.close()
                raise
            if failure is None:
                return answer
            failures.append(failure)
            request.keep_refusal(answer)
            if had_ticket:
                self._spend_ticket(request)
                if _status(answer) == INTERNAL_ERROR:
                    again.append(candidate)
        raise self._none_left(*failures)

    async def _failure(
        self, request: RoutedRequest, candidate: Candidate, answer: EngineAnswer, began: Began
    ) -> EngineFailure | None:
        """Note an answer; returns a failure if another engine is to be asked instead."""
        engine, status = candidate.engine, _status(answer)
        at_s = time.perf_counter()
        failure = self.tries.refused_request(Role.DECODE, answer, status, request)
        if failure is None and await self.router.is_shorter(engine, status, request):
            failure = self.tries.too_short(Role.DECODE, engine, request)
        had_ticket = request.usable_ticket is not None
        if status >= 400:
            # vLLM reports most requests that it refuses to the lender, but not those whose body it
            # cannot parse.  A second return has no effect.
            self.abandoned.return_ticket(request)
        is_good = failure is None or (had_ticket and not self.router.decodes_alone)
        request.note(FirstByte(began, is_good, at_s=at_s))
        return None if is_good else failure

    def _spend_ticket(self, request: RoutedRequest) -> None:
        """Drop the ticket: the next engine computes the prompt, if allowed."""
        request.spend_ticket()
        request.note(WentDirect(Direct.TICKET_SPENT))
        self._check_may_compute(request)

    async def _ask_decode(
        self, request: RoutedRequest, candidate: Candidate, began: Began
    ) -> EngineAnswer:
        engine = candidate.engine
        headers = to_rank(request.headers, candidate.rank)
        if request.trace is not None:
            request.trace.inject(began, headers)
        ticket = request.usable_ticket
        keep = self.router.sessions.ask_to_keep(request.session, engine)
        body = decode_body(request.body, ticket, keep)
        flight = self.router.loads.inflight.start_request(engine, 0, candidate.rank)

        def closed(error: BaseException | None = None) -> None:
            flight.finish()
            request.note(Over(began, None if error is None else said(error)))

        answer: EngineAnswer | None = None
        try:
            path = request.body.route.path
            answer = await self.client.post_body(
                engine, path, body, headers, began.delivery, may_repeat=may_repeat(ticket)
            )
            answer.when_closed(closed)
            request.note(Learned(began, {"status": answer.status}))
            await answer.await_first()
        except BaseException as error:
            if answer is None:
                closed(error)
            else:
                answer.close(error)  # a no-op if the failed read has closed it
            raise
        return answer


def _status(answer: EngineAnswer) -> int:
    """The answer's status, or that of the error event with which its stream begins."""
    chunk = answer.first_chunk
    if b'"error"' not in chunk:  # nearly all answers
        return answer.status
    return status_of(answer.status, answer.headers, chunk)
