"""Prefill's part of a request: the engines that are asked for a ticket, one after the other.

Prefill may be retried anywhere: the blocks that a failed prefill lent are freed when its lease
ends.  Where no engine is left decode computes the prompt itself, if it may.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from pdconn.router.errors import EngineFailure, NoEngineLeft
from pdconn.router.fleet.client import (
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    EngineClient,
    EngineTimedOut,
)
from pdconn.router.fleet.member import Role
from pdconn.router.handover.prefix_pull import Borrowed, PrefillLeg, PrefixPulls
from pdconn.router.handover.tries import EngineTries
from pdconn.router.openai.bodies import find_ticket, find_usage, prefill_body, with_tokens
from pdconn.router.openai.requests import Direct, Route, to_rank
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Candidate, Decision
from pdconn.router.routing.routed_request import (
    Began,
    Learned,
    Prefilled,
    RoutedRequest,
    StepKind,
    WentDirect,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """Prefill's answer, and the ticket that it was given."""

    whole: bytes
    borrowed: Borrowed | None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Gets requests their tickets.

    Attributes:
        timeout_s: for one engine; None: any time.
        reuses_tokens: decode gets the token ids of a chat that prefill has computed.
    """

    client: EngineClient
    router: RequestRouter
    pulls: PrefixPulls
    tries: EngineTries
    timeout_s: float | None = None
    reuses_tokens: bool = False
    _warned: set[str] = field(default_factory=set)

    async def get_ticket(self, request: RoutedRequest, decision: Decision) -> EngineAnswer | None:
        """Get the request its ticket, or note why decode is to compute; else an engine's refusal.

        Raises:
            NoEngineLeft: no engine answers, and decode may not compute.
        """
        failures: list[EngineFailure] = []
        why = Direct.NO_PREFILL
        for candidate in self.tries.candidates(Role.PREFILL, decision, request):
            engine = candidate.engine
            is_idle = self.router.loads.inflight.requests_at(engine)[0] == 0
            try:
                answer = await self._ask_one(request, decision, candidate)
            except (ConnectFailed, ConnectionLost) as error:
                late = isinstance(error, EngineTimedOut)
                why = Direct.NO_PREFILL_IN_TIME if late else Direct.NO_PREFILL
                failures.append(self.tries.failed_request(Role.PREFILL, engine, request, error))
                continue
            if isinstance(answer, _Prefilled):
                self._prefilled(request, decision, engine, answer)
                was_delayed = request.pull is not None and answer.borrowed is None
                learns = is_idle and decision.lookup is not None and not was_delayed
                leg = PrefillLeg(candidate, decision.num_tokens, request.waited_s(), learns)
                if learns or answer.borrowed is not None:
                    self.pulls.prefilled(request, answer.borrowed, leg)
                return None
            failure = self.tries.refused_request(Role.PREFILL, answer, answer.status, request)
            if failure is not None:
                why = Direct.PREFILL_ERROR
            elif await self.router.is_shorter(engine, answer.status, request):
                why = Direct.PREFILL_TOO_SHORT
                failure = self.tries.too_short(Role.PREFILL, engine, request)
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
        """What prefill says.

        Raises:
            EngineTimedOut: nothing within ``timeout_s``.  The connection is closed, which
                aborts the request there; what it has lent in this moment its lease frees.
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
        """What prefill says, with what another engine lends it of the prompt; or its refusal."""
        borrowed = None
        if request.tokens is not None:  # kept only where some engine would pull
            borrowed = await self.pulls.borrow(request, candidate)
        answer = await self._post(request, candidate, borrowed, began)
        if borrowed is not None and isinstance(answer, EngineAnswer) and answer.status >= 500:
            # Its engine fails requests whose pull fails: the prompt can still be computed.
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
            headers["Accept-Encoding"] = "identity"  # the router reads this answer
            if request.trace is not None:
                request.trace.inject(headers)
            path = request.body.route.path
            answer = await self.client.post(candidate.engine, path, body, headers)
            request.note(Learned(began, {"status": answer.status}))
            if answer.status == 200:
                async with answer:
                    return _Prefilled(await answer.rest(), borrowed)
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
        """Note the ticket and the reported cache hit, of which pulled tokens are a part."""
        waited_s = request.waited_s()
        self.tries.engines.rests.note_answer(engine)
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
