"""Asks decode engines, one after the other, for a request's answer.

Unlike prefill, decode may not be retried anywhere.  A ticket goes to a second decode engine only if
the first cannot have seen it: a ticket that is used twice names blocks that may be free by now and
hold another prompt's KV cache.  If decode fails or refuses while it may have the ticket, the next
decode engine computes the prompt itself, and finally the same one again: a pull can fail because
two engines do not match, and there may be no other engine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import (
    AnswerAborted,
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    EngineClient,
    IdleConnectionLost,
)
from pdconn.router.fleet.flights import Flight
from pdconn.router.fleet.member import Role
from pdconn.router.handover.abandoned import AbandonedRequests
from pdconn.router.handover.tries import (
    INTERNAL_ERROR,
    EngineTries,
    await_output,
    may_repeat,
    status_of,
)
from pdconn.router.openai.bodies import decode_body
from pdconn.router.openai.requests import Direct, to_rank
from pdconn.router.router_errors import EngineFailure, NoEngineLeft
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Candidate
from pdconn.router.routing.request_events import (
    Began,
    FirstByte,
    Learned,
    Over,
    StepKind,
    WentDirect,
)
from pdconn.router.routing.routed_request import RoutedRequest, said

_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class BegunLeg:
    """Decode's leg that begins at one engine.

    Attributes:
        began: its step.
        flight: its place among what the engine has in flight, which the leg's owner ends.
        headers, body: for the engine.
    """

    began: Began
    flight: Flight
    headers: CIMultiDict[str]
    body: bytes


def begin_leg(router: RequestRouter, request: RoutedRequest, candidate: Candidate) -> BegunLeg:
    """Begin decode's leg of a request, with the ticket that it may be sent now.

    Raises:
        Abandoned: the client has left.
    """
    engine, ticket = candidate.engine, request.usable_ticket
    facts = {"handed_over": ticket is not None, "early": request.early is not None}
    began = request.begin_step(StepKind.DECODE, engine, **facts)
    headers = to_rank(request.headers, candidate.rank)
    if request.trace is not None:
        request.trace.inject(began, headers)
    keep = router.sessions.ask_to_keep(request.session, engine)
    body = decode_body(request.body, ticket, keep)
    flight = router.loads.inflight.start_request(engine, 0, candidate.rank)
    return BegunLeg(began, flight, headers, body)


@dataclass(frozen=True, slots=True)
class AskedDecode:
    """Decode's legs of requests whose answers pass through this process."""

    client: EngineClient
    router: RequestRouter
    tries: EngineTries
    abandoned: AbandonedRequests

    async def decode_where_kept(
        self, request: RoutedRequest, candidates: Iterable[Candidate]
    ) -> EngineAnswer:
        """The answer of the engine that keeps a response; a 404 if all say that they do not.

        The router keeps no state about responses, so that several routers share nothing.
        """
        unknown: EngineAnswer | None = None
        failed: NoEngineLeft | None = None
        try:
            for candidate in candidates:
                try:
                    answer = await self.decode(request, (candidate,))
                except NoEngineLeft as error:
                    failed = error  # it may be the one
                    continue
                if answer.status != _NOT_FOUND:
                    return answer
                if unknown is not None:
                    unknown.close()
                unknown = answer
            if unknown is not None and failed is None:
                answer, unknown = unknown, None
                return answer
        finally:
            if unknown is not None:
                unknown.close()
        raise failed or self.tries.no_decode_left()

    async def decode(self, request: RoutedRequest, candidates: Iterable[Candidate]) -> EngineAnswer:
        """The first answer that is no failure."""
        failures: list[EngineFailure] = []
        again: list[Candidate] = []  # the ticket or the connection was at fault, not the engine
        second_tries = filter(partial(self.tries.may_ask_again, request), again)
        for candidate in itertools.chain(candidates, second_tries):
            had_ticket = request.usable_ticket is not None
            leg = begin_leg(self.router, request, candidate)
            began = leg.began
            try:
                answer = await self._ask_decode(request, candidate, leg)
            except (ConnectFailed, ConnectionLost) as error:
                failures.append(
                    self.tries.failed_request(Role.DECODE, candidate.engine, request, error)
                )
                if had_ticket and isinstance(error, ConnectionLost):
                    if isinstance(error, AnswerAborted):
                        # vLLM tells the lender of no request that it rejects while it drains.
                        self.abandoned.return_ticket(request)
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
        raise self.tries.no_decode_left(*failures)

    async def _failure(
        self, request: RoutedRequest, candidate: Candidate, answer: EngineAnswer, began: Began
    ) -> EngineFailure | None:
        """Note an answer; returns a failure if another engine is to be asked instead."""
        engine, status = candidate.engine, _status(answer)
        at_s = time.perf_counter()
        failure = self.tries.refused_request(
            Role.DECODE, engine, status, request, answer.headers.get("Retry-After")
        )
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
        self.tries.check_may_compute(request)

    async def _ask_decode(
        self, request: RoutedRequest, candidate: Candidate, leg: BegunLeg
    ) -> EngineAnswer:
        engine, began, ticket = candidate.engine, leg.began, request.usable_ticket

        def closed(error: BaseException | None = None) -> None:
            leg.flight.finish()
            request.note(Over(began, None if error is None else said(error)))

        answer: EngineAnswer | None = None
        try:
            path = request.body.route.path
            answer = await self.client.post_body(
                engine, path, leg.body, leg.headers, began.delivery, may_repeat=may_repeat(ticket)
            )
            answer.when_closed(closed)
            request.note(Learned(began, {"status": answer.status}))
            await await_output(answer)
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
