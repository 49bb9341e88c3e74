"""Decode's leg where a gateway sends the request: which engines it is to ask, and with what.

::

    gateway ──head, body──► prefill's leg ──ticket──► Pick ──► gateway ──► decode ──► client
                                                        ▲                    │
                                                        └── status, end ─────┘

The answer never passes through this process; the gateway tells its status, and when it has ended.
A gateway asks the second engine of a pick only if it could not connect to the first, so that at
most one engine can have seen the ticket.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice

from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import ConnectFailed, ConnectionLost, EngineClient
from pdconn.router.fleet.member import Role
from pdconn.router.handover.abandoned import AbandonedRequests
from pdconn.router.handover.decode import BegunLeg, begin_leg
from pdconn.router.handover.passing import Passing, engines_for, may_ask_all
from pdconn.router.handover.tries import EngineTries
from pdconn.router.openai.passed import RESPONSE_ID, Asks
from pdconn.router.openai.requests import asking, text
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Candidate
from pdconn.router.routing.request_events import (
    Began,
    FirstByte,
    Learned,
    Over,
    Passed,
)
from pdconn.router.routing.routed_request import RoutedRequest

MOST_PICKED = 3
"""Engines of a pick: a gateway that cannot connect to this many gives up."""
LOOK_UP_S = 5.0
"""Time-out of asking one engine whether it keeps a response."""
_NOT_FOUND = 404
_NOTHING_CAME = "no answer began"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What a gateway tells of an answer: its status, and ``Retry-After``."""

    status: int
    retry_after: str | None = None


class Pick:
    """Where a gateway is to send a request.

    Its owner tells it once of the answer's head, if there is one, and of the end.

    Args:
        engines: base URLs, in the order in which they are to be asked.
        headers: of the request.
        body: of the request; None: the client's.
        answered: is called with the engine that answers, None for none of the fleet, and the head.
        closed: is called at the end; False: there was no answer; None: that is unknown.

    Attributes:
        is_unseen: whether there may have been an answer of which the gateway did not tell.
    """

    def __init__(
        self,
        engines: tuple[str, ...],
        headers: CIMultiDict[str],
        body: bytes | None,
        answered: Callable[[str | None, AnswerHead], None],
        closed: Callable[[bool | None], None],
    ) -> None:
        self.engines = engines
        self.headers = headers
        self.body = body
        self.is_unseen = False
        self._answered = answered
        self._closed: Callable[[bool | None], None] | None = closed
        self._begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def answer_began(self, head: AnswerHead, engine: str | None) -> None:
        """The head of the answer has come; ``engine``: from which, None for none of the fleet."""
        if self._closed is not None and not self._begun.done():
            self._begun.set_result(True)
            self._answered(engine, head)

    async def wait_begun(self) -> bool:
        """Wait until the answer has begun; False if it will not."""
        return await asyncio.shield(self._begun)

    def when_begun(self, act: Callable[[], object]) -> None:
        """Call ``act`` once the answer has begun, or it is known that it will not."""
        self._begun.add_done_callback(lambda begun: act())

    def close(self) -> None:
        """The request has ended at the gateway.  Idempotent."""
        closed, self._closed = self._closed, None
        if closed is not None:
            has_begun = self._begun.done()
            if not has_begun:
                self._begun.set_result(False)
            closed(None if self.is_unseen and not has_begun else has_begun)


@dataclass(frozen=True, slots=True)
class PickedDecode:
    """Decode's legs of requests whose answers pass through a gateway."""

    client: EngineClient
    router: RequestRouter
    tries: EngineTries
    abandoned: AbandonedRequests

    async def decode(self, request: RoutedRequest, candidates: Iterable[Candidate]) -> Pick:
        """The engines that are to be asked, and the request for them."""
        ordered = iter(candidates)
        first = next(ordered, None)
        if first is None:
            raise self.tries.no_decode_left()
        # The gateway sends all of them the same header.  An engine that would be sent to the same
        # rank has one of that number; another may have fewer, and would refuse the request.
        others = (one.engine for one in ordered if first.rank in (None, one.rank))
        engines = (first.engine, *islice(others, MOST_PICKED - 1))
        leg = begin_leg(self.router, request, first)
        # Until the answer begins its ticket may have to be returned, for which the body is needed.
        request.held.add_user()
        return Pick(
            engines,
            leg.headers,
            leg.body,
            partial(self._answered, request, leg.began),
            partial(self._closed, request, leg),
        )

    async def decode_where_kept(
        self, request: RoutedRequest, candidates: Iterable[Candidate]
    ) -> Pick:
        """As ``decode``, of the engine that keeps the response that the request continues."""
        name = text(request.body.fields.get("previous_response_id"))
        if name is None or re.fullmatch(RESPONSE_ID, name) is None:
            # No engine keeps such a one, and as a part of a path it would name another page.
            return await self.decode(request, candidates)
        by_engine = {one.engine: one for one in candidates}
        ask = partial(is_kept, self.client, response=name, headers=request.headers)
        keeper = await keeper_of(by_engine, ask)
        return await self.decode(
            request, by_engine.values() if keeper is None else (by_engine[keeper],)
        )

    def _answered(
        self, request: RoutedRequest, began: Began, engine: str | None, head: AnswerHead
    ) -> None:
        at_s = time.perf_counter()
        request.note(Learned(began, {"status": head.status}))
        if engine is not None:
            self.tries.refused_request(Role.DECODE, engine, head.status, request, head.retry_after)
        if head.status >= 400:
            # As where this process asks decode: vLLM does not report all of these to the lender.
            self.abandoned.return_ticket(request)
        request.note(FirstByte(began, True, at_s=at_s))
        request.note(Passed(head.status, True))
        request.held.drop_user()

    def _closed(self, request: RoutedRequest, leg: BegunLeg, has_begun: bool | None) -> None:
        leg.flight.finish()
        request.note(Over(leg.began, _NOTHING_CAME if has_begun is False else None))
        if has_begun is False:
            # The client has left, and decode may never have had the request.
            self.abandoned.return_ticket(request)
        if not has_begun:
            request.held.drop_user()


@dataclass(frozen=True, slots=True)
class PickedPasses:
    """Picks engines for requests that one engine serves (``passing``)."""

    client: EngineClient
    router: RequestRouter
    tries: EngineTries

    async def pass_on(self, passing: Passing) -> Pick:
        """The engines that are to be asked; the body stays the client's.

        Raises:
            NoEngineLeft: no engine is up.
        """
        engines = self.router.by_load(engines_for(self.tries.engines, passing))
        if not engines:
            raise self.tries.no_decode_left()
        if may_ask_all(passing):
            name = passing.path.split("?")[0].split("/")[3]
            ask = partial(is_kept, self.client, response=name, headers=passing.headers)
            keeper = await keeper_of(engines, ask)
            engines = engines if keeper is None else [keeper]
        picked = tuple(engines[:MOST_PICKED])
        flight = self.router.loads.inflight.start_request(picked[0], 0)
        span = passing.span.child("pass", engine=picked[0])
        span.inject(passing.headers)

        def answered(engine: str | None, head: AnswerHead) -> None:
            role = Role.PREFILL if passing.asks is Asks.ANY else Role.DECODE
            span.note(status=head.status)
            if engine is not None:
                self.tries.engine_refused(
                    role, engine, head.status, passing.request_id, head.retry_after
                )

        def closed(has_begun: bool | None) -> None:
            flight.finish()
            if has_begun is False:
                span.mark_failed(_NOTHING_CAME)
            span.end()

        return Pick(picked, passing.headers, None, answered, closed)


async def keeper_of(engines: Iterable[str], ask: Callable[[str], Awaitable[bool]]) -> str | None:
    """The engine that keeps a response; None if none does.

    The router keeps no state about responses, so that several routers share nothing.
    """
    for engine in engines:
        if await ask(engine):
            return engine
    return None


async def is_kept(
    client: EngineClient, engine: str, response: str, headers: CIMultiDict[str]
) -> bool:
    """Whether an engine keeps a response."""
    try:
        async with asyncio.timeout(LOOK_UP_S):
            answer = await client.get_page(engine, f"/v1/responses/{response}", asking(headers))
    except (TimeoutError, ConnectFailed, ConnectionLost):
        return False
    answer.close()
    return answer.status != _NOT_FOUND
