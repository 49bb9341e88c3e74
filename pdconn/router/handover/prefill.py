"""Obtains the ticket of a request: prefill engines are asked one after the other.

Prefill may be retried anywhere: the blocks that a failed prefill lent are freed when its lease
ends.  If no engine is left decode computes the prompt itself, if allowed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Raw

from pdconn.router.fleet.engine_client import (
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    EngineClient,
    EngineTimedOut,
)
from pdconn.router.fleet.flights import Flight
from pdconn.router.fleet.lenders import lender_of
from pdconn.router.fleet.member import Role
from pdconn.router.handover.early_leg import EarlyLeg
from pdconn.router.handover.prefix_pull import Borrowed, PrefillLeg, PrefixPulls
from pdconn.router.handover.tries import OK, EngineTries, await_output
from pdconn.router.openai.bodies import find_ticket, find_usage, prefill_body, with_tokens
from pdconn.router.openai.requests import Direct, Route, to_rank
from pdconn.router.openai.session_orders import split_reports
from pdconn.router.pulls.prefill_patience import PrefillPatience
from pdconn.router.router_errors import EngineFailure, NoEngineLeft
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Candidate, Decision
from pdconn.router.routing.request_events import (
    Began,
    Learned,
    Prefilled,
    StepKind,
    TurnKept,
    WentDirect,
)
from pdconn.router.routing.routed_request import RoutedRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _PrefillTry:
    """One prefill engine that is asked.

    Attributes:
        early: decode's leg, if it may follow this engine.
    """

    request: RoutedRequest
    decision: Decision
    candidate: Candidate
    began: Began
    flight: Flight
    early: EarlyLeg[Any] | None


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """Prefill's answer, and the ticket that it was sent."""

    whole: bytes
    borrowed: Borrowed | None


@dataclass(frozen=True, slots=True)
class _NotPrefilled:
    """A prefill engine that failed, and why decode computes if no other one answers."""

    failure: EngineFailure
    why: Direct


@dataclass(frozen=True, slots=True)
class Prefill:
    """Obtains the tickets of requests.

    Attributes:
        patience: how long each engine may take.
        reuses_tokens: decode receives the token ids of a chat from prefill.
        learns_lenders: where engines lend from is learned from their tickets.
    """

    client: EngineClient
    router: RequestRouter
    pulls: PrefixPulls
    tries: EngineTries
    patience: PrefillPatience
    reuses_tokens: bool = False
    learns_lenders: bool = False
    _warned: set[str] = field(default_factory=set)

    async def get_ticket(
        self, request: RoutedRequest, decision: Decision, early: EarlyLeg[Any] | None = None
    ) -> EngineAnswer | None:
        """Get the request its ticket, or note why decode computes; returns an engine's refusal.

        ``early``: decode's leg, which may follow the first engine.

        Raises:
            NoEngineLeft: no engine answers, and decode must not compute the prompt.
        """
        failures: list[EngineFailure] = []
        why = Direct.NO_PREFILL
        for candidate in self.tries.candidates(Role.PREFILL, decision, request):
            if early is not None:
                early.offer(candidate)
            tried = await self._try_candidate(request, decision, candidate, early)
            if not isinstance(tried, _NotPrefilled):
                return tried
            # Decode goes on by itself, or is asked when another engine lends.
            if early is not None and not await early.give_up():
                return None
            early = None
            failures.append(tried.failure)
            why = tried.why
        if self.router.decodes_alone:
            request.keep_refusal(None)
            request.note(WentDirect(why))
            return None
        known = self.tries.engines.failures(Role.PREFILL, failures)
        raise NoEngineLeft(Role.PREFILL.value, known)

    async def _try_candidate(
        self,
        request: RoutedRequest,
        decision: Decision,
        candidate: Candidate,
        early: EarlyLeg[Any] | None,
    ) -> EngineAnswer | _NotPrefilled | None:
        """Ask one engine; returns its refusal, or its failure."""
        engine = candidate.engine
        is_idle = self.router.loads.inflight.requests_at(engine)[0] == 0
        try:
            tried, answer = await self._ask_one(request, decision, candidate, early)
        # 1. No answer: the next engine is asked, and a lease frees what this one may have lent.
        except (ConnectFailed, ConnectionLost) as error:
            late = isinstance(error, EngineTimedOut)
            failure = self.tries.failed_request(Role.PREFILL, engine, request, error)
            return _NotPrefilled(failure, Direct.NO_PREFILL_IN_TIME if late else Direct.NO_PREFILL)
        # 2. The prompt is computed.  Its time is learned, if nothing else delayed it.
        if isinstance(answer, _Prefilled):
            took_s = self._prefilled(tried, answer)
            was_delayed = request.pull is not None and answer.borrowed is None
            learns = is_idle and decision.lookup is not None and not was_delayed
            leg = PrefillLeg(candidate, decision.num_tokens, took_s, learns)
            if learns or answer.borrowed is not None:
                self.pulls.prefilled(request, answer.borrowed, leg)
            return None
        # 3. The engine cannot serve it now, or takes shorter prompts than others: the next one
        # is asked, and the answer is kept for the client in case that all fail.
        try:
            refused = await self._refused(request, answer)
        except BaseException:
            answer.close()
            raise
        if refused is not None:
            request.keep_refusal(answer)
            return refused
        # 4. It is the client's mistake, which no other engine would accept.
        return answer

    async def _refused(self, request: RoutedRequest, answer: EngineAnswer) -> _NotPrefilled | None:
        """Note a refusal; None if it is the client's mistake."""
        failure = self.tries.refused_request(
            Role.PREFILL,
            answer.engine,
            answer.status,
            request,
            answer.headers.get("Retry-After"),
        )
        if failure is not None:
            return _NotPrefilled(failure, Direct.PREFILL_ERROR)
        if await self.router.is_shorter(answer.engine, answer.status, request):
            failure = self.tries.too_short(Role.PREFILL, answer.engine, request)
            return _NotPrefilled(failure, Direct.PREFILL_TOO_SHORT)
        return None

    async def _ask_one(
        self,
        request: RoutedRequest,
        decision: Decision,
        candidate: Candidate,
        early: EarlyLeg[Any] | None,
    ) -> tuple[_PrefillTry, _Prefilled | EngineAnswer]:
        engine = candidate.engine
        uncached = max(0, decision.num_tokens - candidate.held_or_pulled)
        flight = self.router.loads.inflight.start_request(engine, uncached, candidate.rank)
        try:
            with request.within(StepKind.PREFILL, engine, uncached=uncached) as began:
                tried = _PrefillTry(request, decision, candidate, began, flight, early)
                return tried, await self._ask_in_time(tried)
        finally:
            flight.finish()

    async def _ask_in_time(self, tried: _PrefillTry) -> _Prefilled | EngineAnswer:
        """Prefill's answer, if it comes in time.

        Raises:
            EngineTimedOut: no answer in time.  The connection is closed, which aborts the request
                there; blocks lent at that moment are freed by their lease.
        """
        engine, began_s = tried.candidate.engine, time.perf_counter()
        _, in_flight = self.router.loads.inflight.requests_at(engine)
        limit_s = self.patience.limit_s(engine, in_flight, tried.candidate.held_or_pulled)
        try:
            if limit_s is None:
                answer = await self._ask_lending(tried)
            else:
                async with self._limited(tried, limit_s):
                    answer = await self._ask_lending(tried)
        except TimeoutError as error:
            raise EngineTimedOut(f"no ticket within {limit_s:.3g} s") from error
        if isinstance(answer, _Prefilled):
            self.patience.learn(engine, in_flight, time.perf_counter() - began_s)
        return answer

    @asynccontextmanager
    async def _limited(self, tried: _PrefillTry, limit_s: float) -> AsyncIterator[None]:
        """Time out after ``limit_s``.

        By a learned limit the last engine that can be asked times out only while its ``/health``
        fails: it may be busy, and what it has begun would be begun anew, or by decode.  So does a
        request's next engine after one was late: if all are slower than they were, as under the
        load of other routers, each would throw away what it has computed and be slower still.

        Raises:
            TimeoutError: the time is up.
        """
        if not self.patience.is_learned:
            async with asyncio.timeout(limit_s):
                yield
            return
        async with asyncio.timeout(None) as in_time:
            watching = asyncio.create_task(self._end_if_late(tried, limit_s, in_time))
            try:
                yield
            finally:
                watching.cancel()

    async def _end_if_late(
        self, tried: _PrefillTry, every_s: float, in_time: asyncio.Timeout
    ) -> None:
        engine, request = tried.candidate.engine, tried.request
        may_leave = not request.was_late(Role.PREFILL)
        while True:
            await asyncio.sleep(every_s)
            # Only now: others may have gone down, or come up, meanwhile.
            has_other = may_leave and self.tries.has_other(Role.PREFILL, engine, request)
            if has_other or await self.tries.health.why_ill(engine) is not None:
                in_time.reschedule(asyncio.get_running_loop().time())
                return

    async def _ask_lending(self, tried: _PrefillTry) -> _Prefilled | EngineAnswer:
        """Prefill's answer or refusal, with a prefix borrowed from another engine if possible."""
        borrowed = None
        if tried.request.tokens is not None:  # kept only if some engine would pull
            borrowed = await self.pulls.borrow(tried.request, tried.candidate)
        answer = await self._post(tried, borrowed)
        if borrowed is not None and isinstance(answer, EngineAnswer) and answer.status >= 500:
            # An engine fails requests whose pull fails: the prompt can still be computed.  But a
            # stream has ended with its request.
            if tried.early is not None and not await tried.early.give_up():
                return answer
            answer.close()
            answer = await self._post(replace(tried, early=None), None)
        return answer

    async def _post(
        self, tried: _PrefillTry, borrowed: Borrowed | None
    ) -> _Prefilled | EngineAnswer:
        request, candidate, early = tried.request, tried.candidate, tried.early
        try:
            source = None if borrowed is None else borrowed.ticket
            stream = None if early is None else early.stream
            keep = self.router.sessions.ask_to_keep(request.session, candidate.engine)
            body = prefill_body(
                request.body, source, stream, returns_tokens=self.reuses_tokens, keep=keep
            )
            headers = to_rank(request.headers, candidate.rank)
            headers["Accept-Encoding"] = "identity"  # the router parses this answer
            if request.trace is not None:
                request.trace.inject(tried.began, headers)
            if early is not None:
                early.prefill_is_sent(tried.flight)
            path = request.body.route.path
            answer = await self.client.post_body(candidate.engine, path, body, headers)
            request.note(Learned(tried.began, {"status": answer.status}))
            if answer.status == OK:
                async with answer:
                    await await_output(answer)
                    return _Prefilled(await answer.read_rest(), borrowed)
        except BaseException:
            if borrowed is not None:
                self.pulls.pull_failed(request, borrowed)
            raise
        if borrowed is not None:
            engine = candidate.engine if answer.status >= 500 else None
            self.pulls.pull_failed(request, borrowed, engine)
        return answer

    def _prefilled(self, tried: _PrefillTry, answer: _Prefilled) -> float:
        """Note the ticket and the reported cache hit, which includes pulled tokens.

        Returns the seconds since prefill was asked.
        """
        request, engine = tried.request, tried.candidate.engine
        self.tries.engines.rests.note_success(engine)
        request.ticket, reports = split_reports(find_ticket(answer.whole))
        if reports.kept is not None and request.session is not None:
            request.note(TurnKept(engine, reports.kept))
        self.router.sessions.note_broken(engine, reports.broken)
        usage, has_borrowed = find_usage(answer.whole), answer.borrowed is not None
        event = Prefilled(
            tried.began,
            request.ticket is not None,
            cached_tokens=usage.cached,
            prompt_tokens=usage.prompt,
            has_borrowed=has_borrowed,
        )
        request.note(event)
        if usage.cached is not None and not has_borrowed:
            self.router.prefill_reported(tried.decision, engine, usage.cached)
        if request.ticket is None:
            request.note(WentDirect(Direct.NO_TICKET))
            self._warn_no_ticket(engine)
            return event.waited_s
        if self.learns_lenders:
            self._learn_lender(tried, request.ticket)
        if self.reuses_tokens and request.body.route is Route.CHAT:
            request.ticket = with_tokens(request.ticket, answer.whole)
        return event.waited_s

    def _learn_lender(self, tried: _PrefillTry, ticket: Raw) -> None:
        lender, candidate = lender_of(ticket), tried.candidate
        if lender is not None:
            known = self.tries.engines.lenders
            known.learn_lender(candidate.engine, candidate.rank, lender)
        if tried.early is not None:
            tried.early.prefill_lends(lender)

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
