"""Roles that follow the load, on simulated fleets: goodput, attacks, and controllers that are bad.

A load is prompt-heavy, then answer-heavy, then prompt-heavy again, ten minutes each, after some
minutes of the first kind in which every fleet settles.  No number of prefill engines is right for
both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest

from pdconn.router.fleet.member import Role
from pdconn.router.labels import RoleVerdict
from pdconn.router.roles import role_controller
from pdconn.router.roles.role_controller import RoleController, RoleDecision, RoleTargets
from pdconn.router.roles.role_reports import EngineReport, FleetReport
from pdconn.tools.plan.fleet.fleet_load import Arrival, EngineRates, LoadPhase, arrivals
from pdconn.tools.plan.fleet.simulated_fleet import EngineDeath, FleetRun, SimulatedFleet

RATES = EngineRates(prefill_tokens_per_s=8000, step_s=0.015, stream_s=0.0005, most_streams=128)
OF_BEST = 0.95
"""Of the goodput of the best number of each phase."""


@dataclass(frozen=True)
class Scenario:
    """A fleet and its load; ``ratios``: numbers of prefill engines that it is compared with."""

    engines: int
    phases: tuple[LoadPhase, ...]
    ttft_s: float
    ratios: Sequence[int]
    itl_s: float = 0.05

    @property
    def targets(self) -> RoleTargets:
        return RoleTargets(ttft_s=self.ttft_s, itl_s=self.itl_s)

    def load(self) -> list[Arrival]:
        return list(arrivals(self.phases, seed=1))

    def follow(self, controller: RoleController | None = None, **facts: object) -> FleetRun:
        controller = controller or RoleController(self.targets)
        fleet = SimulatedFleet(self.engines, RATES, controller, **facts)  # type: ignore[arg-type]
        return fleet.serve(self.load(), self.ttft_s, self.itl_s)

    def stay(self, num_prefill: int) -> FleetRun:
        fleet = SimulatedFleet(self.engines, RATES, num_prefill=num_prefill)
        return fleet.serve(self.load(), self.ttft_s, self.itl_s)


def prompts(rate: float, seconds: float = 600, tokens: int = 6000, ramp_s: float = 0) -> LoadPhase:
    return LoadPhase(seconds, rate, tokens, tokens // 40, ramp_s)


def answers(rate: float, seconds: float = 600, tokens: int = 1500, ramp_s: float = 0) -> LoadPhase:
    return LoadPhase(seconds, rate, tokens * 2 // 3, tokens, ramp_s)


THREE = Scenario(
    3, (prompts(1.6, 300), prompts(1.6), answers(2.6, tokens=700), prompts(1.6)), 2.0, (1, 2)
)
SIXTEEN = Scenario(16, (prompts(10, 300), prompts(10), answers(7), prompts(10)), 2.0, range(1, 16))


@cache
def followed(scenario: str) -> FleetRun:
    return SCENARIOS[scenario].follow()


SCENARIOS = {"three": THREE, "sixteen": SIXTEEN}


def check_goodput(scenario: Scenario, run: FleetRun, ratios: Sequence[int]) -> None:
    """Near the best number of each phase, and above each single one over the whole."""
    stays = [scenario.stay(number) for number in ratios]
    for phase in range(1, len(run.phases)):
        best = max(one.phases[phase].good for one in stays)
        assert run.phases[phase].good >= OF_BEST * best, phase
    whole = max(sum(one.good for one in stay.phases[1:]) for stay in stays)
    assert sum(one.good for one in run.phases[1:]) > whole


def check_moves(run: FleetRun, period_s: float = 60.0) -> None:
    """One at a time, at most one in a period, floors held, and no request lost."""
    began = [one.began_s for one in run.moves]
    assert all(later - sooner >= period_s for sooner, later in zip(began, began[1:], strict=False))
    assert run.most_moving <= 1
    assert min(run.least.values()) >= 1
    assert run.unended == 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_goodput_is_that_of_the_best_ratio_of_each_phase(name: str) -> None:
    scenario, run = SCENARIOS[name], followed(name)
    check_goodput(scenario, run, scenario.ratios)
    check_moves(run)
    assert {one.goal for one in run.moves} == set(Role)


def test_one_that_never_moves_is_not_as_good() -> None:
    """The control."""

    class Idle(RoleController):
        def step(self, report: FleetReport, now: float) -> RoleDecision:
            self._reversals.began_s = math.inf
            self._reversals.goal = Role.PREFILL
            return super().step(report, now)

    run = SIXTEEN.follow(Idle(SIXTEEN.targets))
    assert not run.moves
    with pytest.raises(AssertionError):
        check_goodput(SIXTEEN, run, SIXTEEN.ratios)


@pytest.mark.matrix
def test_goodput_of_a_large_fleet() -> None:
    """At one change a minute a fleet of 128 follows a few engines: a load that shifts by more of
    them in ten minutes is out of reach."""
    load = LARGE
    run = load.follow()
    check_goodput(load, run, load.ratios)
    check_moves(run)
