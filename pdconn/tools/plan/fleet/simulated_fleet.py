"""A fleet of prefill and decode engines under a load, in virtual time.  Pure.

::

    arrival ──► prefill with the least to compute ──► ticket ──► pull ──► decode with the
                                                                          fewest streams ──► end

Roles are those of the router's own controller (:mod:`pdconn.router.roles`), which gets a report
every second as it does in the router, or they stay.  A request that was at an engine which dies is
served again from its beginning, as the router does.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdconn.router.fleet.member import Role
from pdconn.router.labels import RoleVerdict
from pdconn.router.roles.role_controller import RoleController, RoleDecision, RoleMove
from pdconn.router.roles.role_reports import (
    EngineReport,
    FirstTokenSample,
    FleetReport,
    PrefillSample,
)
from pdconn.tools.plan.fleet.fleet_load import Arrival, EngineRates
from pdconn.tools.plan.fleet.simulated_engine import SimulatedEngine, SimulatedRequest

STEP_S = 1.0
"""Between two reports, as between two polls of the router."""
REST_S = 600.0
"""After the last arrival, for requests that are still there."""

Distort = Callable[[FleetReport, float], FleetReport]
"""Changes what the controller sees, for tests of reports that lie."""


def _as_it_is(report: FleetReport, now: float) -> FleetReport:
    del now
    return report


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """Requests of one phase: all, and those within both targets."""

    offered: int
    good: int


@dataclass(slots=True)
class FleetRun:
    """What became of a load.

    Attributes:
        phases: by number.
        moves: that began, in order.
        verdicts: steps of the controller by verdict.
        least: the fewest engines that served each role at any time, of those up.
        unended: requests that did not end.
        tried_again: requests that an engine's death sent back.
        most_moving: engines that changed their role at a time.
        prefill_over_time: prefill engines at each step.
    """

    phases: list[PhaseResult] = field(default_factory=list)
    moves: list[RoleMove] = field(default_factory=list)
    verdicts: Counter[RoleVerdict] = field(default_factory=Counter)
    least: dict[Role, int] = field(default_factory=dict)
    unended: int = 0
    tried_again: int = 0
    most_moving: int = 0
    prefill_over_time: list[int] = field(default_factory=list)

    @property
    def offered(self) -> int:
        """Requests of all phases."""
        return sum(one.offered for one in self.phases)

    @property
    def good(self) -> int:
        """Requests within both targets."""
        return sum(one.good for one in self.phases)


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """An engine that dies, and is back some time later; None: never."""

    engine: int
    at_s: float
    back_s: float | None = None


class SimulatedFleet:
    """A fleet and its events.

    Args:
        num_engines: all of them movable.
        rates: of each.
        controller: of the roles; without, ``num_prefill`` engines prefill and the others decode.
        num_prefill: prefill engines without a controller.
        distort: changes what the controller sees.
        outages: of engines.
    """

    def __init__(
        self,
        num_engines: int,
        rates: EngineRates,
        controller: RoleController | None = None,
        *,
        num_prefill: int = 0,
        distort: Distort = _as_it_is,
        outages: Sequence[EngineDeath] = (),
    ) -> None:
        self._rates, self._controller, self._distort = rates, controller, distort
        self._engines = [SimulatedEngine(f"http://e{n}:1", rates) for n in range(num_engines)]
        self._by_role: dict[Role, list[SimulatedEngine]] = {
            Role.PREFILL: self._engines[:num_prefill],
            Role.DECODE: self._engines[num_prefill:],
        }
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._requests: list[SimulatedRequest] = []
        self._homeless: list[tuple[Role, int]] = []
        self._seen = _SinceReport()
        self._run = FleetRun()
        for one in outages:
            self._at(one.at_s, partial(self._die, self._engines[one.engine]))
            if one.back_s is not None:
                self._at(one.back_s, partial(self._come_back, self._engines[one.engine]))

    def serve(self, load: Sequence[Arrival], ttft_s: float, itl_s: float) -> FleetRun:
        """Serve a load to its end.

        Args:
            load: in the order of time.
            ttft_s, itl_s: targets that a good request keeps.
        """
        last_s = load[-1].at_s if load else 0.0
        if self._controller is not None:
            self._step(0.0)
        coming = iter(load)
        arrival = next(coming, None)
        while arrival is not None or self._events:
            if arrival is not None and (not self._events or arrival.at_s <= self._events[0][0]):
                self._arrive(arrival)
                arrival = next(coming, None)
                continue
            at_s, _, act = heapq.heappop(self._events)
            if at_s > last_s + REST_S or (arrival is None and self._is_quiet):
                break
            act(at_s)
        self._sum_up(ttft_s, itl_s)
        return self._run

    @property
    def _is_quiet(self) -> bool:
        return not self._homeless and not any(engine.inflight for engine in self._engines)

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), act))

    # Requests

    def _arrive(self, arrival: Arrival) -> None:
        self._requests.append(SimulatedRequest(arrival))
        self._ask_prefill(len(self._requests) - 1, arrival.at_s)

    def _up(self, role: Role) -> list[SimulatedEngine]:
        return [engine for engine in self._by_role[role] if engine.up]

    def _ask_prefill(self, number: int, now: float) -> None:
        engines, request = self._up(Role.PREFILL), self._requests[number]
        if not engines:
            self._homeless.append((Role.PREFILL, number))
            return
        engine = min(engines, key=lambda one: one.backlog)
        ahead, tokens = engine.backlog, request.arrival.prompt_tokens
        self._seen.sent_tokens += tokens
        self._seen.sent_prompts += 1
        ends_s, boot = engine.prefill_end_s(number, request, now), engine.boot

        def computed(at_s: float) -> None:
            if engine.boot != boot:
                return
            engine.end_prefill(number)
            request.ticket_s = at_s
            self._seen.prefilled.append(PrefillSample(tokens, ahead, at_s - now))
            self._ask_decode(number, at_s)

        self._at(ends_s, computed)

    def _ask_decode(self, number: int, now: float) -> None:
        engines, request = self._up(Role.DECODE), self._requests[number]
        if not engines:
            self._homeless.append((Role.DECODE, number))
            return
        engine = min(engines, key=lambda one: len(one.inflight))
        engine.expect_stream(number, request)
        boot = engine.boot

        def pulled(at_s: float) -> None:
            if engine.boot == boot:
                engine.start_stream(number, at_s)
                waited_s = request.ticket_s - request.arrival.at_s
                first_s = max(request.first_token_s, at_s) - request.arrival.at_s
                self._seen.first_tokens.append(FirstTokenSample(first_s, waited_s))
                self._await_end(engine)

        self._at(now + self._rates.pull_s, pulled)

    def _await_end(self, engine: SimulatedEngine) -> None:
        version, ends_s = engine.steps_version, engine.next_end_s()
        if ends_s is None:
            return

        def ended(at_s: float) -> None:
            if engine.steps_version == version:
                engine.end_stream(at_s)
                self._await_end(engine)

        self._at(ends_s, ended)

    # Engines

    def _die(self, engine: SimulatedEngine, now: float) -> None:
        for number, request in engine.die(now):
            request.tries += 1
            self._run.tried_again += 1
            self._ask_prefill(number, now)

    def _come_back(self, engine: SimulatedEngine, now: float) -> None:
        engine.up = True
        self._house(now)

    def _house(self, now: float) -> None:
        homeless, self._homeless = self._homeless, []
        for role, number in homeless:
            (self._ask_prefill if role is Role.PREFILL else self._ask_decode)(number, now)

    # The controller

    def _step(self, now: float) -> None:
        assert self._controller is not None
        decision = self._controller.step(self._distort(self._report(now), now), now)
        self._follow(decision, now)
        self._at(now + STEP_S, self._step)

    def _report(self, now: float) -> FleetReport:
        seen, self._seen = self._seen, _SinceReport()
        engines = {}
        for one in self._engines:
            engines[one.name] = EngineReport(
                engine=one.name,
                roles=frozenset(Role),
                up=one.up,
                age_s=0.0 if one.up else None,
                num_ours=len(one.inflight),
                num_waiting=one.num_waiting,
                kv_usage=one.kv_usage,
                itl_s=one.mean_itl_s(now),
            )
        return FleetReport(
            engines=engines,
            sent_tokens=seen.sent_tokens,
            sent_prompts=seen.sent_prompts,
            backlog_tokens=sum(one.backlog for one in self._engines),
            prefilled=tuple(seen.prefilled),
            first_tokens=tuple(seen.first_tokens),
        )

    def _follow(self, decision: RoleDecision, now: float) -> None:
        run = self._run
        run.verdicts[decision.verdict] += 1
        if decision.verdict is RoleVerdict.BEGAN and decision.move is not None:
            run.moves.append(decision.move)
        serves: Mapping[str, Role | None] = decision.serves
        run.most_moving = max(run.most_moving, sum(role is None for role in serves.values()))
        for role in Role:
            self._by_role[role] = [one for one in self._engines if serves[one.name] is role]
            number = len(self._up(role))
            run.least[role] = min(number, run.least.get(role, number))
        run.prefill_over_time.append(len(self._by_role[Role.PREFILL]))
        if self._homeless:
            self._house(now)

    def _sum_up(self, ttft_s: float, itl_s: float) -> None:
        offered: Counter[int] = Counter()
        good: Counter[int] = Counter()
        for request in self._requests:
            offered[request.arrival.phase] += 1
            good[request.arrival.phase] += request.is_good(ttft_s, itl_s)
            self._run.unended += request.ended_s is None
        self._run.phases = [PhaseResult(offered[phase], good[phase]) for phase in sorted(offered)]


@dataclass(slots=True)
class _SinceReport:
    """What has happened since the report before."""

    sent_tokens: int = 0
    sent_prompts: int = 0
    prefilled: list[PrefillSample] = field(default_factory=list)
    first_tokens: list[FirstTokenSample] = field(default_factory=list)
