"""One request through prefill and decode, with retries on another engine after a failure.

Prefill may be retried anywhere (``prefill``).  Decode may not.  A ticket goes to a second decode
engine only if the first cannot have seen it: a ticket that is used twice names blocks that may be
free by now and hold another prompt's KV cache.  If decode fails or refuses while it may have the
ticket, the next decode engine computes the prompt itself, and after them the same one: a pull fails
where the two engines cannot agree, and no other engine need be there.

Where all have failed the client gets the last answer of any, as Envoy passes it on; where none has
answered, the router's own.  ``rules`` says which answers are failures.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

from pdconn.router.errors import EngineFailure, HandoverRequired, NoEngineLeft, Refusal
from pdconn.router.fleet.client import (
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    EngineClient,
    IdleConnectionLost,
)
from pdconn.router.fleet.member import Role
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.handover.abandoned import AbandonedRequests
from pdconn.router.handover.prefill import Prefill
from pdconn.router.handover.tries import (
    INTERNAL_ERROR,
    MOST_BROKEN,
    EngineTries,
    may_repeat,
    status_of,
)
from pdconn.router.metrics import RouterMetrics
from pdconn.router.openai.bodies import decode_body
from pdconn.router.openai.requests import Direct, to_rank
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Candidate, Decision
from pdconn.router.routing.routed_request import (
    Abandoned,
    Began,
    Decided,
    FirstByte,
    Learned,
    Over,
    Passed,
    RoutedRequest,
    StepKind,
    WentDirect,
    said,
)

_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Handover:
    """Takes requests through prefill and decode."""

    engines: EngineRegistry
    client: EngineClient
    router: RequestRouter
    metrics: RouterMetrics
    abandoned: AbandonedRequests
    prefill: Prefill
    tries: EngineTries

    async def answer_request(self, request: RoutedRequest) -> EngineAnswer:
        """An engine's answer to a client's request, once its body has begun.

        Cancelled when the client leaves; ``abandoned`` finishes the request then.

        Raises:
            NoEngineLeft: no engine of some role answers.
            HandoverRequired: it has no ticket, and decode may not compute its prompt.
            OutOfResources: the router cannot open a connection.
            UnknownModel: no engine serves its model.
            BadBody: the prompt is longer than the model's length, or it names none of the models.
        """
        request.watchers = (*request.watchers, self.metrics)
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
        request.serving = await self.router.tokeniser.models.serving_request(request)
        for _ in self.tries.bounded(itertools.count()):
            if not self.router.eligible(Role.DECODE, request):
                # Prefill would lend blocks for nothing.
                nothing = self.router.no_choice(request, "no decode engine is up")
                request.note(Decided(nothing, is_choice=False))
                raise self._none_left()
            decision = await self._decide(request)
            try:
                answer = await self._serve(request, decision)
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

    async def _serve(self, request: RoutedRequest, decision: Decision) -> EngineAnswer | None:
        """An answer as decided; None if another decision is needed."""
        ranking = decision.ranking
        # 1. No ticket can serve its body: decode gets it as it is.
        if request.body.direct is not None:
            request.note(WentDirect(request.body.direct))
        # 2. Decode computes what it lacks of the prompt: it holds a prefix, or no prefill is up.
        elif ranking.alone and ranking.decode:
            no_prefill = self.router.decodes_alone and not ranking.prefill
            request.note(WentDirect(Direct.NO_PREFILL if no_prefill else Direct.PREFIX_HELD))
            return await self._decode_alone(request, ranking.decode[0].candidate)
        # 3. Prefill lends it its blocks, refuses it, or fails: then decode computes, if it may.
        else:
            request.note(WentDirect(None))
            refusal = await self.prefill.get_ticket(request, decision)
            if refusal is not None:
                return refusal
            self._check_may_compute(request)
        candidates = self.tries.candidates(Role.DECODE, decision, request)
        if request.body.direct is Direct.STORED_RESPONSE:
            return await self._decode_where_kept(request, candidates)
        try:
            return await self._decode(request, candidates)
        except (Refusal, Abandoned):
            self.abandoned.return_ticket(request)
            raise

    def _check_may_compute(self, request: RoutedRequest) -> None:
        """Refuse a request that decode would compute though it could have been handed over."""
        if request.direct is not None and not self.router.decodes_alone:
            raise HandoverRequired(request.direct)

    async def _decode_alone(
        self, request: RoutedRequest, candidate: Candidate
    ) -> EngineAnswer | None:
        """The answer of a decode engine that computes what it lacks of the prompt.

        None if that engine fails: the others would compute the whole prompt alone, so
        another decision is needed.
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
        """The answer of the engine that keeps a response; 404 of another where none does.

        The router keeps nothing of responses, so that several routers need share nothing.
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
        again: list[Candidate] = []  # not at fault, if it was the ticket or the connection
        for candidate in itertools.chain(candidates, again):
            had_ticket = request.ticket is not None
            began = request.begin(StepKind.DECODE, candidate.engine, handed_over=had_ticket)
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
            failure = await self._failure(request, candidate, answer, began)
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
        """Note an answer; a failure if another engine is to be asked instead."""
        engine, status = candidate.engine, _status(answer)
        at_s = time.perf_counter()
        failure = self.tries.refused_request(Role.DECODE, answer, status, request)
        if failure is None and await self.router.is_shorter(engine, status, request):
            failure = self.tries.too_short(Role.DECODE, engine, request)
        had_ticket = request.ticket is not None
        if status >= 400:
            # vLLM reports to the lender most requests that it refuses, though not
            # those whose body it cannot read.  A second return has no effect.
            self.abandoned.return_ticket(request)
        is_good = failure is None or (had_ticket and not self.router.decodes_alone)
        request.note(FirstByte(engine, at_s - began.at_s, is_good, at_s=at_s))
        return None if is_good else failure

    def _spend_ticket(self, request: RoutedRequest) -> None:
        """The next engine computes the prompt, if it may."""
        request.ticket = None
        request.note(WentDirect(Direct.TICKET_SPENT))
        self._check_may_compute(request)

    async def _ask_decode(
        self, request: RoutedRequest, candidate: Candidate, began: Began
    ) -> EngineAnswer:
        engine = candidate.engine
        headers = to_rank(request.headers, candidate.rank)
        if request.trace is not None:
            request.trace.inject(headers)
        body = decode_body(request.body, request.ticket)
        finish = self.router.loads.inflight.start_request(engine, 0, candidate.rank)

        def closed(error: BaseException | None = None) -> None:
            finish()
            request.note(Over(began, None if error is None else said(error)))

        answer: EngineAnswer | None = None
        try:
            path = request.body.route.path
            answer = await self.client.post(
                engine, path, body, headers, began.delivery, may_repeat=may_repeat(request.ticket)
            )
            answer.when_closed(closed)
            request.note(Learned(began, {"status": answer.status}))
            await answer.await_first()
        except BaseException as error:
            if answer is None:
                closed(error)
            else:
                answer.close(error)  # without effect where the read that failed has closed it
            raise
        return answer


def _status(answer: EngineAnswer) -> int:
    """Its status, or that of the error with which its stream begins."""
    chunk = answer.first_chunk
    if b'"error"' not in chunk:  # nearly all answers
        return answer.status
    return status_of(answer.status, answer.headers, chunk)
