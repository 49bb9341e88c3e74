"""Roles that follow the load, on simulated fleets: goodput, attacks, and controllers that are bad.

A load is prompt-heavy, then answer-heavy, then prompt-heavy again, ten minutes each, after some
minutes of the first kind in which every fleet settles.  No number of prefill engines is right for
both kinds.
"""

from __future__ import annotations

import itertools
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
SIXTEEN = Scenario(16, (prompts(10, 300), prompts(10), answers(7), prompts(10)), 2.0, range(7, 11))


LARGE = Scenario(
    128,
    (
        prompts(42, 900, 12_000),
        prompts(42, tokens=12_000, ramp_s=300),
        answers(32, tokens=3000, ramp_s=300),
        prompts(42, tokens=12_000, ramp_s=300),
    ),
    4.0,
    range(63, 69),
)


@cache
def followed(scenario: str) -> FleetRun:
    return SCENARIOS[scenario].follow()


@cache
def stayed(scenario: str) -> list[FleetRun]:
    """The runs of a scenario's fixed numbers of prefill engines."""
    return [SCENARIOS[scenario].stay(number) for number in SCENARIOS[scenario].ratios]


SCENARIOS = {"three": THREE, "sixteen": SIXTEEN}


def check_goodput(stays: Sequence[FleetRun], run: FleetRun) -> None:
    """Near the best number of each phase, and above each single one over the whole."""
    for phase in range(1, len(run.phases)):
        best = max(one.phases[phase].good for one in stays)
        assert run.phases[phase].good >= OF_BEST * best, phase
    whole = max(sum(one.good for one in stay.phases[1:]) for stay in stays)
    assert sum(one.good for one in run.phases[1:]) > whole


def check_moves(run: FleetRun, period_s: float = 60.0) -> None:
    """One at a time, at most one in a period, floors held, and no request lost."""
    began = [one.began_s for one in run.moves]
    assert all(later - sooner >= period_s for sooner, later in itertools.pairwise(began))
    assert run.most_moving <= 1
    assert min(run.least.values()) >= 1
    assert run.unended == 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_goodput_is_that_of_the_best_ratio_of_each_phase(name: str) -> None:
    run = followed(name)
    check_goodput(stayed(name), run)
    check_moves(run)
    assert {one.goal for one in run.moves} == set(Role)


def test_one_that_never_moves_is_not_as_good() -> None:
    """The control."""

    class Idle(RoleController):
        def step(self, report: FleetReport, now: float) -> RoleDecision:
            self._reversals.began_s = math.inf
            self._reversals.goal = Role.PREFILL
            return super().step(report, now)

    run = THREE.follow(Idle(THREE.targets))
    assert not run.moves
    with pytest.raises(AssertionError):
        check_goodput(stayed("three"), run)


@pytest.mark.matrix
def test_no_other_ratio_of_sixteen_is_better() -> None:
    """The ratios that are left out above."""
    others = [SIXTEEN.stay(number) for number in range(1, 16) if number not in SIXTEEN.ratios]
    check_goodput(others, followed("sixteen"))


@pytest.mark.matrix
def test_a_large_fleet_follows_what_a_change_a_minute_can() -> None:
    """A fleet of 128 whose phases differ by three engines, and take over in five minutes.

    A load that shifts by more engines in ten minutes is out of reach.
    """
    run = LARGE.follow()
    check_goodput([LARGE.stay(number) for number in LARGE.ratios], run)
    check_moves(run)
    assert {one.goal for one in run.moves if one.began_s > 900} == set(Role)


# Attacks


FLIPS = tuple(one for _ in range(20) for one in (prompts(4.1, 30), answers(2.6, 30)))
FLOOD = Scenario(3, FLIPS, 2.0, ())
"""More than three engines can serve: half a minute of prompts, half a minute of answers."""


def settled(distort: Callable[[FleetReport, float], FleetReport]) -> FleetRun:
    """The run of a steady load under reports that are changed from some moment on."""
    steady = Scenario(8, (prompts(4, 1500),), 2.0, ())
    return steady.follow(distort=distort)


MOST_CHANGES = 8
"""Of 20 minutes, in which a fleet could change 20 times."""


def check_still(run: FleetRun) -> None:
    """It changes seldom: a few times, whatever is reported."""
    check_moves(run)
    assert len(run.moves) <= MOST_CHANGES


def test_a_load_that_flips_each_half_minute_makes_it_change_seldom() -> None:
    check_still(FLOOD.follow())


def test_without_hysteresis_it_oscillates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(role_controller, "STEADY", 0.0)
    monkeypatch.setattr(role_controller, "MARGIN", 0.0)
    monkeypatch.setattr(role_controller, "REMEMBERED", 0)
    with pytest.raises(AssertionError):
        check_still(FLOOD.follow())


def changed(report: FleetReport, names: Sequence[str], **facts: object) -> FleetReport:
    engines = {
        name: replace(one, **facts) if name in names else one  # type: ignore[arg-type]
        for name, one in report.engines.items()
    }
    return replace(report, engines=engines)


def lies(seconds: float) -> Callable[[FleetReport, float], FleetReport]:
    """Each half minute another engine reports a great load, or none."""

    def distort(report: FleetReport, now: float) -> FleetReport:
        if now < seconds:
            return report
        names = sorted(report.engines)
        liar = names[int(now // 30) % len(names)]
        loaded = int(now // 30) % 2
        return changed(report, [liar], num_others=200 * loaded, itl_s=1.0 * loaded, kv_usage=1.0)

    return distort


def test_engines_that_lie_make_it_change_seldom() -> None:
    check_still(settled(lies(300.0)))


def stops_at(seconds: float) -> Callable[[FleetReport, float], FleetReport]:
    """From then on reports are those of that moment, and their age grows."""
    kept: dict[str, EngineReport] = {}

    def distort(report: FleetReport, now: float) -> FleetReport:
        if now < seconds:
            kept.update(report.engines)
            return report
        frozen = {
            name: replace(one, age_s=now - seconds, itl_s=1.0, num_others=300)
            for name, one in kept.items()
        }
        return replace(report, engines=frozen)

    return distort


def check_stopped(run: FleetRun, seconds: float) -> None:
    assert [one for one in run.moves if one.began_s > seconds + 10] == []
    assert run.verdicts[RoleVerdict.UNKNOWN] > 600


def test_reports_that_stop_hold_it_still() -> None:
    run = settled(stops_at(400.0))
    check_stopped(run, 400.0)
    check_moves(run)


def test_one_that_trusts_old_reports_moves_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(EngineReport, "is_trusted", True)
    with pytest.raises(AssertionError):
        check_stopped(settled(stops_at(400.0)), 400.0)


def dies_while_it_changes(controller: RoleController | None = None) -> FleetRun:
    (sure, *_) = [
        one for one in followed("sixteen").moves if one.goal is Role.PREFILL and one.began_s > 300
    ]
    number = int(sure.engine.removeprefix("http://e").removesuffix(":1"))
    death = EngineDeath(number, sure.began_s + 1.5, sure.began_s + 200)
    return SIXTEEN.follow(controller, outages=(death,))


def test_an_engine_that_dies_while_it_changes_loses_no_request() -> None:
    run = dies_while_it_changes()
    check_moves(run)
    assert run.verdicts[RoleVerdict.GIVEN_UP] == 1
    assert run.tried_again > 0


def one_sided(controller: RoleController) -> FleetRun:
    """All that three engines get is prompts, and more than they can compute."""
    return Scenario(3, (LoadPhase(200, 5, 6000, 2),), 2.0, ()).follow(controller)


def test_the_floors_are_held_under_a_load_that_would_take_all() -> None:
    assert one_sided(RoleController(THREE.targets)).least[Role.DECODE] == 1


def test_without_floors_they_are_not_held() -> None:
    """The control."""
    none = replace(THREE.targets, floors=dict.fromkeys(Role, 0))
    assert min(one_sided(RoleController(none)).least.values()) == 0


class TwoAtOnce(RoleController):
    """One that begins a move before the one before has ended."""

    def step(self, report: FleetReport, now: float) -> RoleDecision:
        decision = super().step(report, now)
        if decision.verdict is RoleVerdict.BEGAN:
            self.move = None
            self._reversals.began_s = -math.inf
        return decision


def test_one_that_moves_two_at_once_is_found() -> None:
    """The control of ``check_moves``."""
    with pytest.raises(AssertionError):
        check_moves(SIXTEEN.follow(TwoAtOnce(SIXTEEN.targets)))
