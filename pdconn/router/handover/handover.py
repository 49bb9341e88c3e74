"""One request through prefill and decode, with retries on another engine after a failure.

Prefill may be retried anywhere: the blocks that a failed prefill lent are freed when its lease
ends.  Decode may not.  A ticket goes to a second decode engine only if the first cannot have
seen it: a ticket that is used twice names blocks that may be free by now and hold another
prompt's KV cache.  If decode fails while it may have the ticket, the next decode engine
computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from multidict import CIMultiDict

from pdconn.router.errors import (
    EngineFailure,
    HandoverRequired,
    NoEngineLeft,
    PrefillTooLate,
    Refusal,
)
from pdconn.router.fleet.client import (
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    EngineClient,
    EngineTimedOut,
)
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.handover.abandoned import Abandoned, AbandonedRequests
from pdconn.router.handover.prefix_pull import Borrowed, PrefillLeg, PrefixPulls
from pdconn.router.handover.tries import EngineTries
from pdconn.router.metrics import RouterMetrics
from pdconn.router.openai.bodies import (
    decode_body,
    find_cached_tokens,
    find_ticket,
    prefill_body,
    with_tokens,
)
from pdconn.router.openai.headers import RANK_HEADER
from pdconn.router.openai.requests import Direct, Route
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Candidate, Role
from pdconn.router.routing.routed_request import Decision, RoutedRequest, Stage
from pdconn.router.tracing.spans import Span

log = logging.getLogger(__name__)

_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """Prefill's answer, and the ticket that it was given."""

    whole: bytes
    borrowed: Borrowed | None


@dataclass(frozen=True, slots=True)
class Handover:
    """Takes requests through prefill and decode.

    Attributes:
        reuses_tokens: decode gets the token ids of a chat that prefill has computed.
    """

    engines: EngineRegistry
    client: EngineClient
    router: RequestRouter
    metrics: RouterMetrics
    abandoned: AbandonedRequests
    pulls: PrefixPulls
    tries: EngineTries
    prefill_timeout_s: float | None = None
    reuses_tokens: bool = False
    _warned: set[str] = field(default_factory=set)

    async def answer(self, request: RoutedRequest) -> EngineAnswer:
        """An engine's answer to a client's request, once its body has begun.

        Cancelled when the client leaves; ``abandoned`` finishes the request then.

        Raises:
            NoEngineLeft: no engine of some role answers.
            HandoverRequired: it has no ticket, and decode may not compute its prompt.
            OutOfResources: the router cannot open a connection.
            UnknownModel: no engine serves its model.
            BadBody: the prompt is longer than the model's length, or it names none of the models.
        """
        task = asyncio.create_task(self._run(request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.abandoned.client_left(request, task)
            raise

    async def _run(self, request: RoutedRequest) -> EngineAnswer:
        request.serving = await self.router.tokeniser.serving(request)
        for _ in self.tries.bounded(itertools.count()):
            if not self.engines.live(Role.DECODE, request.serving):
                # Prefill would lend blocks for nothing.
                request.decision = self.router.no_choice(request, "no decode engine is up")
                raise NoEngineLeft(Role.DECODE.value, self.engines.failures(Role.DECODE))
            decision = await self._decide(request)
            try:
                answer = await self._serve(request, decision)
                if answer is not None and request.end is None:
                    request.status = answer.status
            finally:
                self.router.decisions.end(decision, request.outcome())
            if answer is not None:
                if request.decode is not None and answer.status < 400:
                    self.metrics.decode_answered(request.direct)
                return answer
        raise NoEngineLeft(Role.DECODE.value, self.engines.failures(Role.DECODE))

    async def _decide(self, request: RoutedRequest) -> Decision:
        with request.span.child("route") as span:
            request.decision = decision = await self.router.decide(request)
            ranking = decision.ranking
            span.note(
                policy=decision.policy,
                prompt_tokens=decision.num_tokens,
                alone=ranking.alone,
                without_lookup=decision.unknown,
            )
        return decision

    async def _serve(self, request: RoutedRequest, decision: Decision) -> EngineAnswer | None:
        """An answer as decided; None if another decision is needed."""
        ranking = decision.ranking
        request.direct = request.body.direct
        if request.direct is not None:
            pass
        elif ranking.alone and ranking.decode:
            no_prefill = self.router.decodes_alone and not ranking.prefill
            request.direct = Direct.NO_PREFILL if no_prefill else Direct.PREFIX_HELD
            return await self._decode_alone(request, ranking.decode[0].candidate)
        else:
            refusal = await self._prefill_if_any(request, decision)
            if refusal is not None:
                return refusal
            self._check_may_compute(request)
        candidates = self.tries.candidates(Role.DECODE, decision, request)
        if request.body.direct is Direct.STORED_RESPONSE:
            return await self._decode_where_kept(request, candidates)
        try:
            return await self._decode(request, candidates)
        except (Refusal, Abandoned):
            self.abandoned.give_back(request)
            raise

    def _check_may_compute(self, request: RoutedRequest) -> None:
        """Refuse a request that decode would compute though it could have been handed over."""
        if request.direct is not None and not self.router.decodes_alone:
            raise HandoverRequired(request.direct)

    async def _decode_alone(
        self, request: RoutedRequest, candidate: Candidate
    ) -> EngineAnswer | None:
        """The answer of a decode engine that computes what it lacks of the prompt.

        None if that engine is gone: the others would compute the whole prompt alone, so
        another decision is needed.
        """
        try:
            return await self._decode(request, (candidate,))
        except NoEngineLeft:
            if not self.engines.live(Role.DECODE, request.serving):
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
        raise NoEngineLeft(Role.DECODE.value, self.engines.failures(Role.DECODE))

    async def _prefill_if_any(
        self, request: RoutedRequest, decision: Decision
    ) -> EngineAnswer | None:
        """``_prefill``, without which decode computes the prompt itself, if it may."""
        try:
            return await self._prefill(request, decision)
        except NoEngineLeft as error:
            if not self.router.decodes_alone:
                raise
            late = isinstance(error, PrefillTooLate)
        request.direct = Direct.NO_PREFILL_IN_TIME if late else Direct.NO_PREFILL
        return None

    async def _prefill(self, request: RoutedRequest, decision: Decision) -> EngineAnswer | None:
        """Get the request its ticket; what this returns is prefill's refusal."""
        failures: list[EngineFailure] = []
        late = False
        for candidate in self.tries.candidates(Role.PREFILL, decision, request):
            engine = candidate.engine
            _enter(request, Stage.PREFILL)
            is_idle = self.router.inflight.at(engine)[0] == 0
            uncached = max(0, decision.num_tokens - candidate.held_or_pulled)
            finish = self.router.inflight.start(engine, uncached, candidate.rank)
            try:
                with request.span.child("prefill", engine=engine, uncached=uncached) as span:
                    answer = await self._ask_in_time(request, candidate, span)
            except (ConnectFailed, ConnectionLost) as error:
                late = isinstance(error, EngineTimedOut)
                failures.append(self.tries.failed(Role.PREFILL, engine, request.request_id, error))
                continue
            finally:
                finish()
            if isinstance(answer, EngineAnswer):
                return answer
            self._prefilled(request, decision, engine, answer)
            was_delayed = request.pull is not None and answer.borrowed is None
            learns = is_idle and decision.lookup is not None and not was_delayed
            leg = PrefillLeg(candidate, decision.num_tokens, request.waited_s(), learns)
            self.pulls.prefilled(request, answer.borrowed, leg)
            return None
        known = self.engines.failures(Role.PREFILL, failures)
        raise (PrefillTooLate if late else NoEngineLeft)(Role.PREFILL.value, known)

    async def _ask_in_time(
        self, request: RoutedRequest, candidate: Candidate, span: Span
    ) -> _Prefilled | EngineAnswer:
        """What prefill says.

        Raises:
            EngineTimedOut: nothing within ``prefill_timeout_s``.  The connection is closed, which
                aborts the request there; what it has lent in this moment its lease frees.
        """
        limit_s = self.prefill_timeout_s
        if limit_s is None:
            return await self._ask_prefill(request, candidate, span)
        try:
            async with asyncio.timeout(limit_s):
                return await self._ask_prefill(request, candidate, span)
        except TimeoutError as error:
            raise EngineTimedOut(f"no ticket within {limit_s:g} s") from error

    async def _ask_prefill(
        self, request: RoutedRequest, candidate: Candidate, span: Span
    ) -> _Prefilled | EngineAnswer:
        """What prefill says, with what another engine lends it of the prompt; or its refusal."""
        borrowed = await self.pulls.borrow(request, candidate, span)
        answer = await self._post_prefill(request, candidate, borrowed, span)
        if borrowed is not None and isinstance(answer, EngineAnswer) and answer.status >= 500:
            # Its engine fails requests whose pull fails: the prompt can still be computed.
            answer.close()
            answer = await self._post_prefill(request, candidate, None, span)
        return answer

    async def _post_prefill(
        self, request: RoutedRequest, candidate: Candidate, borrowed: Borrowed | None, span: Span
    ) -> _Prefilled | EngineAnswer:
        try:
            source = None if borrowed is None else borrowed.ticket
            body = prefill_body(request.body, source, returns_tokens=self.reuses_tokens)
            headers = _headers(request, candidate)
            headers["Accept-Encoding"] = "identity"  # the router reads this answer
            span.inject(headers)
            path = request.body.route.path
            answer = await self.client.post(candidate.engine, path, body, headers)
            span.note(status=answer.status)
            if answer.status == 200:
                async with answer:
                    return _Prefilled(await answer.rest(), borrowed)
        except BaseException:
            self.pulls.failed(request, borrowed)
            raise
        self.pulls.failed(request, borrowed, candidate.engine if answer.status >= 500 else None)
        return answer

    def _prefilled(
        self, request: RoutedRequest, decision: Decision, engine: str, answer: _Prefilled
    ) -> None:
        """Note the ticket and the reported cache hit, of which pulled tokens are a part."""
        took_s = request.waited_s()
        self.metrics.time_to_ticket.observe(took_s)
        request.prefill = engine
        request.ticket = find_ticket(answer.whole)
        request.cached_tokens = find_cached_tokens(answer.whole)
        if request.cached_tokens is not None and answer.borrowed is None:
            self.router.prefill_reported(decision, engine, request.cached_tokens)
        if request.ticket is None:
            request.direct = Direct.NO_TICKET
            self._warn_no_ticket(engine)
        else:
            request.ticket_s = took_s
            if self.reuses_tokens and request.body.route is Route.CHAT:
                request.ticket = with_tokens(request.ticket, answer.whole)

    async def _decode(
        self, request: RoutedRequest, candidates: Iterable[Candidate]
    ) -> EngineAnswer:
        failures: list[EngineFailure] = []
        for candidate in candidates:
            engine = candidate.engine
            _enter(request, Stage.DECODE)
            try:
                answer = await self._ask_decode(request, candidate)
            except (ConnectFailed, ConnectionLost) as error:
                failures.append(self.tries.failed(Role.DECODE, engine, request.request_id, error))
                if request.ticket is not None and isinstance(error, ConnectionLost):
                    request.ticket = request.ticket_s = None
                    request.direct = Direct.TICKET_SPENT
                    self._check_may_compute(request)
                continue
            request.decode = engine
            request.first_byte_s = request.waited_s()
            self.metrics.decode_first_byte.observe(request.first_byte_s)
            if answer.status >= 400:
                # vLLM tells the lender of most requests that it refuses, though not of
                # those whose body it cannot read.  A second return has no effect.
                self.abandoned.give_back(request)
            return answer
        raise NoEngineLeft(Role.DECODE.value, self.engines.failures(Role.DECODE, failures))

    async def _ask_decode(self, request: RoutedRequest, candidate: Candidate) -> EngineAnswer:
        engine = candidate.engine
        span = request.span.child("decode", engine=engine, handed_over=request.ticket is not None)
        headers = _headers(request, candidate)
        span.inject(headers)
        body = decode_body(request.body, request.ticket)
        finish = self.router.inflight.start(engine, 0, candidate.rank)

        def closed() -> None:
            finish()
            span.end()

        try:
            path = request.body.route.path
            answer = await self.client.post(engine, path, body, headers, request.delivery)
        except BaseException as error:
            span.fail(f"{type(error).__name__}: {error}")
            closed()
            raise
        answer.when_closed(closed)
        span.note(status=answer.status)
        try:
            await answer.await_first()
        except BaseException as error:
            span.fail(f"{type(error).__name__}: {error}")
            answer.close()
            raise
        span.note(first_byte_seconds=request.waited_s())
        return answer

    def _warn_no_ticket(self, engine: str) -> None:
        self._warned.intersection_update(self.engines.names)
        if engine not in self._warned:
            self._warned.add(engine)
            log.warning(
                "pdconn: prefill answers without kv_transfer_params, so decode computes its "
                "prompts again; does it run with --kv-transfer-config? (warned once per engine) "
                "engine=%s",
                engine,
            )


def _headers(request: RoutedRequest, candidate: Candidate) -> CIMultiDict[str]:
    """The client's headers, and the data-parallel rank of the hit if the engine has several."""
    headers = request.headers.copy()
    if candidate.rank is not None:
        headers[RANK_HEADER] = str(candidate.rank)
    return headers


def _enter(request: RoutedRequest, stage: Stage) -> None:
    """Go on with the next engine, unless the client has left."""
    if request.client_left:
        raise Abandoned
    request.enter(stage)
