"""One request through prefill and decode, with retries on another engine after a failure.

Prefill may be retried anywhere: the blocks that a failed prefill lent are freed when its lease
ends.  If no engine is left decode computes the prompt itself, if allowed.  Decode may not.  A
ticket goes to a second decode engine only if the first cannot have seen it: a ticket that is used
twice names blocks that may be free by now and hold another prompt's KV cache.  If decode fails or
refuses while it may have the ticket, the next decode engine computes the prompt itself, and finally
the same one again: a pull can fail because two engines do not match, and there may be no other
engine.

When all have failed the client gets the last engine's answer, as with Envoy; if none answered, the
router's own error.  ``tries`` defines which answers are failures.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdconn.router.fleet.engine_client import (
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    EngineClient,
    EngineTimedOut,
    IdleConnectionLost,
)
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Role
from pdconn.router.handover.abandoned import AbandonedRequests
from pdconn.router.handover.prefix_pull import Borrowed, PrefillLeg, PrefixPulls
from pdconn.router.handover.tries import (
    INTERNAL_ERROR,
    MOST_BROKEN,
    EngineTries,
    may_repeat,
    status_of,
)
from pdconn.router.openai.bodies import (
    decode_body,
    find_ticket,
    find_usage,
    prefill_body,
    with_tokens,
)
from pdconn.router.openai.requests import Direct, Route, to_rank
from pdconn.router.router_errors import EngineFailure, HandoverRequired, NoEngineLeft, Refusal
from pdconn.router.router_metrics import RouterMetrics
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
    Prefilled,
    RoutedRequest,
    StepKind,
    WentDirect,
    said,
)

log = logging.getLogger(__name__)

_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """Prefill's answer, and the ticket that it was sent."""

    whole: bytes
    borrowed: Borrowed | None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Obtains the tickets of requests.

    Attributes:
        timeout_s: per engine; None for no time-out.
        reuses_tokens: decode receives the token ids of a chat from prefill.
    """

    client: EngineClient
    router: RequestRouter
    pulls: PrefixPulls
    tries: EngineTries
    timeout_s: float | None = None
    reuses_tokens: bool = False
    _warned: set[str] = field(default_factory=set)

    async def get_ticket(self, request: RoutedRequest, decision: Decision) -> EngineAnswer | None:
        """Get the request its ticket, or note why decode computes; returns an engine's refusal.

        Raises:
            NoEngineLeft: no engine answers, and decode must not compute the prompt.
        """
        failures: list[EngineFailure] = []
        why = Direct.NO_PREFILL
        for candidate in self.tries.candidates(Role.PREFILL, decision, request):
            engine = candidate.engine
            is_idle = self.router.loads.inflight.requests_at(engine)[0] == 0
            try:
                answer = await self._ask_one(request, decision, candidate)
            # 1. No answer: the next engine is asked, and a lease frees what this one may have lent.
            except (ConnectFailed, ConnectionLost) as error:
                late = isinstance(error, EngineTimedOut)
                why = Direct.NO_PREFILL_IN_TIME if late else Direct.NO_PREFILL
                failures.append(self.tries.failed_request(Role.PREFILL, engine, request, error))
                continue
            # 2. The prompt is computed.  Its time is learned, if nothing else delayed it.
            if isinstance(answer, _Prefilled):
                self._prefilled(request, decision, engine, answer)
                was_delayed = request.pull is not None and answer.borrowed is None
                learns = is_idle and decision.lookup is not None and not was_delayed
                leg = PrefillLeg(candidate, decision.num_tokens, request.since_asked_s(), learns)
                if learns or answer.borrowed is not None:
                    self.pulls.prefilled(request, answer.borrowed, leg)
                return None
            # 3. The engine cannot serve it now, or takes shorter prompts than others: the next one
            # is asked, and the answer is kept for the client in case that all fail.
            failure = self.tries.refused_request(Role.PREFILL, answer, answer.status, request)
            if failure is not None:
                why = Direct.PREFILL_ERROR
            elif await self.router.is_shorter(engine, answer.status, request):
                why = Direct.PREFILL_TOO_SHORT
                failure = self.tries.too_short(Role.PREFILL, engine, request)
            # 4. It is the client's mistake, which no other engine would accept.
            else:
                return answer
            failures.append(failure)
            request.keep_refusal(answer)
        if self.router.decodes_alone:
            request.keep_refusal(None)
            request.note(WentDirect(why))
            return None
        known = self.tries.engines.failures(Role.PREFILL, failures)
        raise NoEngineLeft(Role.PREFILL.value, known)

    async def _ask_one(
        self, request: RoutedRequest, decision: Decision, candidate: Candidate
    ) -> _Prefilled | EngineAnswer:
        engine = candidate.engine
        uncached = max(0, decision.num_tokens - candidate.held_or_pulled)
        finish = self.router.loads.inflight.start_request(engine, uncached, candidate.rank)
        try:
            with request.within(StepKind.PREFILL, engine, uncached=uncached) as began:
                return await self._ask_in_time(request, candidate, began)
        finally:
            finish()

    async def _ask_in_time(
        self, request: RoutedRequest, candidate: Candidate, began: Began
    ) -> _Prefilled | EngineAnswer:
        """Prefill's answer, within ``timeout_s``.

        Raises:
            EngineTimedOut: no answer in time.  The connection is closed, which aborts the request
                there; blocks lent at that moment are freed by their lease.
        """
        if self.timeout_s is None:
            return await self._ask_lending(request, candidate, began)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._ask_lending(request, candidate, began)
        except TimeoutError as error:
            raise EngineTimedOut(f"no ticket within {self.timeout_s:g} s") from error

    async def _ask_lending(
        self, request: RoutedRequest, candidate: Candidate, began: Began
    ) -> _Prefilled | EngineAnswer:
        """Prefill's answer or refusal, with a prefix borrowed from another engine if possible."""
        borrowed = None
        if request.tokens is not None:  # kept only if some engine would pull
            borrowed = await self.pulls.borrow(request, candidate)
        answer = await self._post(request, candidate, borrowed, began)
        if borrowed is not None and isinstance(answer, EngineAnswer) and answer.status >= 500:
            # An engine fails requests whose pull fails: the prompt can still be computed.
            answer.close()
            answer = await self._post(request, candidate, None, began)
        return answer

    async def _post(
        self, request: RoutedRequest, candidate: Candidate, borrowed: Borrowed | None, began: Began
    ) -> _Prefilled | EngineAnswer:
        try:
            source = None if borrowed is None else borrowed.ticket
            body = prefill_body(request.body, source, returns_tokens=self.reuses_tokens)
            headers = to_rank(request.headers, candidate.rank)
            headers["Accept-Encoding"] = "identity"  # the router parses this answer
            if request.trace is not None:
                request.trace.inject(headers)
            path = request.body.route.path
            answer = await self.client.post_body(candidate.engine, path, body, headers)
            request.note(Learned(began, {"status": answer.status}))
            if answer.status == 200:
                async with answer:
                    return _Prefilled(await answer.read_rest(), borrowed)
        except BaseException:
            if borrowed is not None:
                self.pulls.pull_failed(request, borrowed)
            raise
        if borrowed is not None:
            engine = candidate.engine if answer.status >= 500 else None
            self.pulls.pull_failed(request, borrowed, engine)
        return answer

    def _prefilled(
        self, request: RoutedRequest, decision: Decision, engine: str, answer: _Prefilled
    ) -> None:
        """Note the ticket and the reported cache hit, which includes pulled tokens."""
        waited_s = request.since_asked_s()
        self.tries.engines.rests.note_success(engine)
        request.ticket = find_ticket(answer.whole)
        usage, has_borrowed = find_usage(answer.whole), answer.borrowed is not None
        event = Prefilled(
            engine,
            waited_s,
            request.ticket is not None,
            cached_tokens=usage.cached,
            prompt_tokens=usage.prompt,
            has_borrowed=has_borrowed,
        )
        request.note(event)
        if usage.cached is not None and not has_borrowed:
            self.router.prefill_reported(decision, engine, usage.cached)
        if request.ticket is None:
            request.note(WentDirect(Direct.NO_TICKET))
            self._warn_no_ticket(engine)
        elif self.reuses_tokens and request.body.route is Route.CHAT:
            request.ticket = with_tokens(request.ticket, answer.whole)

    def _warn_no_ticket(self, engine: str) -> None:
        self._warned.intersection_update(self.tries.engines.names)
        if engine not in self._warned:
            self._warned.add(engine)
            log.warning(
                "pdconn: prefill answers without kv_transfer_params, so decode computes its "
                "prompts again; does it run with --kv-transfer-config? (warned once per engine) "
                "engine=%s",
                engine,
            )


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

        Cancelled when the client leaves; ``abandoned`` then finishes the request.

        Raises:
            NoEngineLeft: no engine of some role answers.
            HandoverRequired: the request has no ticket, and decode must not compute its prompt.
            OutOfResources: the router cannot open a connection.
            UnknownModel: no engine serves its model.
            BadBody: the prompt exceeds the model's length, or the request names no model of
                several.
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
        request.serving = await self.router.tokeniser.models.engines_for_request(request)
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
        # allowed.
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
        for candidate in itertools.chain(candidates, again):
            had_ticket = request.ticket is not None
            began = request.begin_step(StepKind.DECODE, candidate.engine, handed_over=had_ticket)
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
        """Note an answer; returns a failure if another engine is to be asked instead."""
        engine, status = candidate.engine, _status(answer)
        at_s = time.perf_counter()
        failure = self.tries.refused_request(Role.DECODE, answer, status, request)
        if failure is None and await self.router.is_shorter(engine, status, request):
            failure = self.tries.too_short(Role.DECODE, engine, request)
        had_ticket = request.ticket is not None
        if status >= 400:
            # vLLM reports most requests that it refuses to the lender, but not those whose body it
            # cannot parse.  A second return has no effect.
            self.abandoned.return_ticket(request)
        is_good = failure is None or (had_ticket and not self.router.decodes_alone)
        request.note(FirstByte(engine, at_s - began.at_s, is_good, at_s=at_s))
        return None if is_good else failure

    def _spend_ticket(self, request: RoutedRequest) -> None:
        """Drop the ticket: the next engine computes the prompt, if allowed."""
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
            answer = await self.client.post_body(
                engine, path, body, headers, began.delivery, may_repeat=may_repeat(request.ticket)
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
