"""Which engines a request is sent to, one after the other, and what a failure of one means."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from pdconn.router.errors import EngineFailure
from pdconn.router.fleet.client import (
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    EngineTimedOut,
    IdleConnectionLost,
    OutOfResources,
)
from pdconn.router.fleet.health import Health
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.handover.rules import ELSEWHERE, INTERNAL_ERROR, MOST_BROKEN, retry_after_s
from pdconn.router.metrics import RouterMetrics
from pdconn.router.routing.policy import Candidate, Decision, Role
from pdconn.router.routing.routed_request import Failed, RoutedRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

_HARMLESS = (EngineTimedOut, IdleConnectionLost)
"""Failures that say nothing of how well the engine is."""


@dataclass(frozen=True, slots=True)
class EngineTries:
    """Engines to try; ``most`` of one role for one request, or all.

    ``decodes_alone``: decode computes a prompt rather than wait for a prefill engine that rests.
    """

    engines: EngineRegistry
    health: Health
    metrics: RouterMetrics
    most: int | None = None
    decodes_alone: bool = True

    def bounded(self, tries: Iterable[T]) -> Iterator[T]:
        """As many as may be tried."""
        return islice(tries, self.most)

    def candidates(
        self, role: Role, decision: Decision, request: RoutedRequest
    ) -> Iterator[Candidate]:
        """The ranked engines that are still live, then those that came up since, or rest.

        Of those that serve the request's model and have not failed it.  One that goes on from a
        response may have to ask all of them: it is where it is, and an engine that does not know it
        has not failed.
        """
        found = self._all(role, decision, request)
        return found if request.body.goes_on else self.bounded(found)

    def _all(self, role: Role, decision: Decision, request: RoutedRequest) -> Iterator[Candidate]:
        if role is Role.PREFILL and self.decodes_alone:  # decode does better than one that rests
            live = self.engines.awake(role, request.serving, time.monotonic())
        else:
            live = self.engines.live(role, request.serving)
        ranking = decision.ranking
        ordered = ranking.prefill if role is Role.PREFILL else ranking.decode
        asked: set[str] = set()
        for candidate in (*(one.candidate for one in ordered), *map(Candidate, live)):
            engine = candidate.engine
            if engine in asked or engine not in live or request.has_failed_at(engine, role):
                continue
            if request.num_broken(role) >= MOST_BROKEN:
                return
            asked.add(engine)
            yield candidate

    def failed_request(
        self, role: Role, engine: str, request: RoutedRequest, error: ConnectFailed | ConnectionLost
    ) -> EngineFailure:
        """``failed``, of a request that goes on with another engine."""
        is_broken = isinstance(error, ConnectionLost) and not isinstance(error, _HARMLESS)
        request.note(Failed(engine, role, is_broken))
        return self.failed(role, engine, request.request_id, error)

    def refused_request(
        self, role: Role, answer: EngineAnswer, status: int, request: RoutedRequest
    ) -> EngineFailure | None:
        """``refused``, of a request that goes on with another engine if there is a failure."""
        failure = self.refused(role, answer, status, request.request_id)
        if failure is not None:
            request.note(Failed(answer.engine, role, status == INTERNAL_ERROR))
        return failure

    def too_short(self, role: Role, engine: str, request: RoutedRequest) -> EngineFailure:
        """An engine takes shorter prompts than others do: no fault of its."""
        self.metrics.retried(role, engine)
        request.note(Failed(engine, role, False))
        return EngineFailure(engine, "its max_model_len is too short")

    def failed(
        self, role: Role, engine: str, request_id: str, error: ConnectFailed | ConnectionLost
    ) -> EngineFailure:
        """Note that an engine failed: it is down without a connection, and else if it is not well.

        Raises:
            OutOfResources: it is our own fault, and another engine would not help.
        """
        if isinstance(error, OutOfResources):
            raise error
        self.metrics.retried(role, engine)
        if isinstance(error, ConnectFailed):
            self.health.report_down(engine, str(error), request_id)
        elif not isinstance(error, EngineTimedOut):
            self.health.suspect(engine, str(error), request_id)
            if not isinstance(error, _HARMLESS):
                self._rest(engine, str(error), request_id)
        return EngineFailure(engine, str(error))

    def refused(
        self, role: Role, answer: EngineAnswer, status: int, request_id: str
    ) -> EngineFailure | None:
        """What an answer of an engine means for it; a failure if another engine is to be asked."""
        engine = answer.engine
        if status not in ELSEWHERE:
            self.engines.rests.answered(engine)
            return None
        self.metrics.retried(role, engine)
        why = f"answered {status}"
        if status >= INTERNAL_ERROR:
            self.health.suspect(engine, why, request_id)
        named_s = retry_after_s(answer.headers.get("Retry-After"))
        self._rest(engine, why, request_id, named_s)
        return EngineFailure(engine, why)

    def _rest(self, engine: str, why: str, request_id: str, named_s: float | None = None) -> None:
        if engine not in self.engines:
            return
        rest_s = self.engines.rests.failed(engine, time.monotonic(), named_s)
        if rest_s is not None:
            log.warning(
                "pdconn: engine fails requests, others are asked before it "
                "engine=%s why=%r request=%s rest_s=%g",
                engine,
                why,
                request_id,
                rest_s,
            )
