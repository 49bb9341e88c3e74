"""Which engines a request is sent to, one after the other, and what a failure of one means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from pdconn.router.errors import EngineFailure
from pdconn.router.fleet.client import (
    ConnectFailed,
    ConnectionLost,
    EngineTimedOut,
    OutOfResources,
)
from pdconn.router.fleet.health import Health
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.metrics import RouterMetrics
from pdconn.router.routing.policy import Candidate, Role
from pdconn.router.routing.routed_request import Decision, RoutedRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineTries:
    """Engines to try; ``most`` of one role for one request, or all."""

    engines: EngineRegistry
    health: Health
    metrics: RouterMetrics
    most: int | None = None

    def bounded(self, tries: Iterable[T]) -> Iterator[T]:
        """As many as may be tried."""
        return islice(tries, self.most)

    def candidates(
        self, role: Role, decision: Decision, request: RoutedRequest
    ) -> Iterator[Candidate]:
        """The ranked engines that are still live, then those that came up since.

        Of those that serve the request's model.  One that goes on from a response may have to ask
        all of them: it is where it is, and an engine that does not know it has not failed.
        """
        found = self._all(role, decision, request.serving)
        return found if request.body.goes_on else self.bounded(found)

    def _all(
        self, role: Role, decision: Decision, serving: frozenset[str] | None
    ) -> Iterator[Candidate]:
        live = self.engines.live(role, serving)
        ranking = decision.ranking
        ordered = ranking.prefill if role is Role.PREFILL else ranking.decode
        for one in ordered:
            if one.candidate.engine in live:
                yield one.candidate
        ranked = {one.candidate.engine for one in ordered}
        for engine in live:
            if engine not in ranked:
                yield Candidate(engine)

    def failed(
        self, role: Role, engine: str, request_id: str, error: ConnectFailed | ConnectionLost
    ) -> EngineFailure:
        """Note that an engine failed, and is down unless it was merely late.

        Raises:
            OutOfResources: it is our own fault, and another engine would not help.
        """
        if isinstance(error, OutOfResources):
            raise error
        self.metrics.retried(role, engine)
        if not isinstance(error, EngineTimedOut):
            self.health.report_down(engine, str(error), request_id)
        return EngineFailure(engine, str(error))
