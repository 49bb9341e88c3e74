"""Requests that one engine serves without prefill and decode (``openai.passed``).

They hold no ticket and may be sent twice, so another engine is tried after any failure, and after a
failing status (``tries``).  When all have failed the client gets the last engine's answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import ConnectFailed, ConnectionLost, EngineAnswer
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Role
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.tries import await_output
from pdconn.router.openai.passed import Asks
from pdconn.router.router_errors import EngineFailure
from pdconn.router.routing.routed_request import said
from pdconn.router.tracing.spans import NOT_TRACED, Span

_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Passing:
    """A request to pass on.

    Attributes:
        request_id, headers: as sent to engines.
        path: with the client's query.
        asks: the kind of engines that the request may go to.
        body: None for a GET.
        serving: the engines that serve its model; None for all.
        span: the span of the whole request.
    """

    request_id: str
    headers: CIMultiDict[str]
    path: str
    asks: Asks
    body: bytes | None
    serving: frozenset[str] | None = None
    span: Span = NOT_TRACED


@dataclass(frozen=True, slots=True)
class PassThrough:
    """Sends each request to the least busy engine that may serve it."""

    handover: Handover[Any]

    async def pass_on(self, passing: Passing) -> EngineAnswer:
        """An engine's answer; closing it aborts the request there.

        Raises:
            NoEngineLeft: no engine answers.
            OutOfResources: the router cannot open a connection.
        """
        failures: list[EngineFailure] = []
        second: EngineAnswer | None = None
        tries = self.handover.tries
        try:
            engines = self.handover.router.by_load(engines_for(self.handover.engines, passing))
            for engine in engines if may_ask_all(passing) else tries.bounded(engines):
                try:
                    answer = await self._ask(engine, passing)
                except (ConnectFailed, ConnectionLost) as error:
                    role = self._role(engine)
                    failures.append(tries.engine_failed(role, engine, passing.request_id, error))
                    continue
                role = self._role(engine)
                failure = tries.engine_refused(
                    role,
                    engine,
                    answer.status,
                    passing.request_id,
                    answer.headers.get("Retry-After"),
                )
                is_unknown = may_ask_all(passing) and answer.status == _NOT_FOUND
                if failure is None and not is_unknown:
                    return answer
                if second is not None and is_unknown:
                    answer.close()  # what is kept says as much, or that an engine failed
                    continue
                if second is not None:
                    second.close()
                second = answer  # perhaps another engine succeeds, or keeps the response
            # An engine that failed may be the one that keeps the response.
            if second is not None and not (failures and second.status == _NOT_FOUND):
                answer, second = second, None
                return answer
        finally:
            if second is not None:
                second.close()
        raise tries.no_decode_left(*failures)

    def _role(self, engine: str) -> Role:
        """The role under which the engine's failures are counted."""
        [role, *_] = self.handover.engines.roles(engine) or (Role.DECODE,)
        return role

    async def _ask(self, engine: str, passing: Passing) -> EngineAnswer:
        client = self.handover.client
        flight = self.handover.router.loads.inflight.start_request(engine, 0)
        span = passing.span.child("pass", engine=engine)
        headers = passing.headers
        span.inject(headers)

        def closed(error: BaseException | None) -> None:
            flight.finish()
            if error is not None:
                span.mark_failed(said(error))
            span.end()

        try:
            if passing.body is None:
                answer = await client.get_page(engine, passing.path, headers)
            else:
                answer = await client.post_body(engine, passing.path, passing.body, headers)
        except BaseException as error:
            closed(error)
            raise
        answer.when_closed(closed)
        span.note(status=answer.status)
        if passing.asks is Asks.DECODE:
            try:
                await await_output(answer)
            except BaseException as error:
                answer.close(error)  # a no-op if the failed read has closed it
                raise
        return answer


def engines_for(fleet: EngineRegistry, passing: Passing) -> tuple[str, ...]:
    """The engines that may serve a request."""
    decode = fleet.live(Role.DECODE, passing.serving)
    prefill = fleet.live(Role.PREFILL, passing.serving)
    if passing.asks is Asks.ANY:
        return tuple(dict.fromkeys((*decode, *prefill)))
    return decode if passing.asks is Asks.HOLDER else decode or prefill


def may_ask_all(passing: Passing) -> bool:
    """Whether one engine after the other is asked: only one keeps a response."""
    return passing.asks is Asks.HOLDER
