"""The controller of roles, step by step: each numbered case, and what it never does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.router.fleet.member import Role
from pdconn.router.labels import RoleVerdict
from pdconn.router.roles import role_controller
from pdconn.router.roles.role_controller import (
    REMEMBERED,
    STEADY,
    RoleController,
    RoleDecision,
    RoleTargets,
)
from pdconn.router.roles.role_reports import STALE_S, EngineReport, FleetReport, PrefillSample

TARGETS = RoleTargets(ttft_s=2.0, itl_s=0.05)
BOTH = frozenset(Role)
RATE = 10_000.0
"""Tokens that an engine prefills in a second."""


def engine(number: int, **facts: object) -> EngineReport:
    known = EngineReport(engine=f"http://e{number}:1", roles=BOTH, age_s=0.0, kv_usage=0.1)
    return replace(known, **facts)  # type: ignore[arg-type]


def fleet(engines: Sequence[EngineReport], tokens_per_s: float = 0.0) -> FleetReport:
    """A report after one second in which so many tokens were sent to prefill."""
    samples = tuple(PrefillSample(tokens, 0, tokens / RATE) for tokens in (500, 8000))
    return FleetReport(
        engines={one.engine: one for one in engines},
        sent_tokens=round(tokens_per_s),
        sent_prompts=1,
        prefilled=samples,
    )


def stepped(
    controller: RoleController, report: FleetReport, seconds: int, start: int = 0
) -> list[RoleDecision]:
    return [controller.step(report, float(start + n)) for n in range(seconds)]


def verdicts(decisions: Sequence[RoleDecision]) -> list[RoleVerdict]:
    """Each verdict once, as long as it lasts."""
    found: list[RoleVerdict] = []
    for one in decisions:
        if not found or found[-1] is not one.verdict:
            found.append(one.verdict)
    return found


def of_role(decision: RoleDecision, role: Role | None) -> int:
    return sum(one is role for one in decision.serves.values())


def test_engines_with_both_roles_are_shared_out_and_others_keep_theirs() -> None:
    fixed = engine(9, roles=frozenset({Role.DECODE}))
    decision = RoleController(TARGETS).step(fleet([fixed, *map(engine, range(3))]), 0.0)
    assert decision.serves["http://e9:1"] is Role.DECODE
    assert (of_role(decision, Role.PREFILL), of_role(decision, Role.DECODE)) == (2, 2)


def test_an_idle_fleet_stays_as_it_is() -> None:
    seen = stepped(RoleController(TARGETS), fleet([*map(engine, range(4))]), 600)
    assert verdicts(seen) == [RoleVerdict.IN_TARGET]


def test_a_role_that_is_short_gets_an_engine_which_first_finishes_its_requests() -> None:
    controller = RoleController(TARGETS)
    busy = [engine(n, num_ours=2) for n in range(4)]
    seen = stepped(controller, fleet(busy, 2.5 * RATE), 40)
    assert RoleVerdict.BEGAN in verdicts(seen)
    began = next(one for one in seen if one.verdict is RoleVerdict.BEGAN)
    assert began.move is not None
    assert (began.move.origin, began.move.goal) == (Role.DECODE, Role.PREFILL)
    assert seen[-1].verdict is RoleVerdict.MOVING
    assert seen[-1].serves[began.move.engine] is None
    done = [engine(n, num_ours=0 if one.engine == began.move.engine else 2)
            for n, one in enumerate(busy)]  # fmt: skip
    ended = controller.step(fleet(done, 2.5 * RATE), 40.0)
    assert ended.verdict is RoleVerdict.ENDED
    assert ended.serves[began.move.engine] is Role.PREFILL
    assert ended.left == 0


def test_an_engine_that_does_not_finish_takes_its_role_in_time() -> None:
    controller = RoleController(replace(TARGETS, drain_s=20.0))
    busy = fleet([engine(n, num_ours=2) for n in range(4)], 2.5 * RATE)
    seen = stepped(controller, busy, 120)
    at = {one.verdict: number for number, one in reversed([*enumerate(seen)])}
    assert at[RoleVerdict.ENDED] - at[RoleVerdict.BEGAN] == 20
    assert seen[at[RoleVerdict.ENDED]].left == 2


def test_the_engine_with_the_least_to_finish_and_to_keep_moves() -> None:
    def first(*engines: EngineReport) -> str:
        controller = RoleController(TARGETS)
        controller.serves = {one.engine: Role.DECODE for one in engines}
        controller.serves["http://e0:1"] = Role.PREFILL
        seen = stepped(controller, fleet(engines, 2.5 * RATE), 30)
        began = next(one for one in seen if one.verdict is RoleVerdict.BEGAN)
        assert began.move is not None
        return began.move.engine

    others = (engine(0), engine(1, num_ours=5), engine(2, num_ours=3))
    assert first(*others, engine(3, num_ours=4)) == "http://e2:1"
    kept = engine(2, num_ours=3, kept_tokens=9000)
    assert first(*others[:2], kept, engine(3, num_ours=3)) == "http://e3:1"


def test_a_shortage_of_a_moment_moves_nothing() -> None:
    controller = RoleController(TARGETS)
    engines = [*map(engine, range(4))]
    steady_s = int(STEADY * TARGETS.period_s)
    seen = stepped(controller, fleet(engines), 60)
    for start in range(60, 600, 60):
        seen += stepped(controller, fleet(engines, 6 * RATE), steady_s // 2, start)
        seen += stepped(controller, fleet(engines), 60 - steady_s // 2, start + steady_s // 2)
    assert RoleVerdict.BEGAN not in verdicts(seen)
    assert RoleVerdict.UNSTEADY in verdicts(seen)


def test_without_steadiness_it_moves_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(role_controller, "STEADY", 0.0)
    with pytest.raises(AssertionError):
        test_a_shortage_of_a_moment_moves_nothing()


def test_no_ratio_is_changed_for_one_that_is_hardly_better() -> None:
    """Prefill is short, and decode would be nearly as short with one engine less."""
    controller = RoleController(TARGETS)
    engines = [engine(n, num_ours=28, itl_s=0.0303) for n in range(4)]
    seen = stepped(controller, fleet(engines, 1.75 * RATE), 300)
    assert RoleVerdict.BEGAN not in verdicts(seen)
    assert verdicts(seen)[-1] is RoleVerdict.NO_BETTER


def test_without_a_margin_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(role_controller, "MARGIN", 0.0)
    with pytest.raises(AssertionError):
        test_no_ratio_is_changed_for_one_that_is_hardly_better()


@pytest.mark.parametrize(
    "lie",
    [
        {"age_s": STALE_S + 1},
        {"age_s": None},
        {"age_s": -1.0},
        {"kv_usage": math.nan},
        {"kv_usage": 7.0},
        {"itl_s": -0.5},
        {"itl_s": math.inf},
        {"num_others": -3},
        {"num_waiting": 1 << 40},
    ],
)
def test_old_or_absurd_reports_hold_it_still(lie: dict[str, object]) -> None:
    controller = RoleController(TARGETS)
    seen = stepped(controller, fleet([engine(n, **lie) for n in range(4)], 9 * RATE), 300)
    assert verdicts(seen) == [RoleVerdict.UNKNOWN]
    assert seen[-1].wanted == dict.fromkeys(Role, 2)  # as many as there are
    assert RoleVerdict.BEGAN in verdicts(
        stepped(controller, fleet([engine(n) for n in range(4)], 2.5 * RATE), 60, 300)
    )


def test_an_engine_that_goes_down_while_it_changes_keeps_its_role() -> None:
    controller = RoleController(TARGETS)
    busy = [engine(n, num_ours=2) for n in range(4)]
    seen = stepped(controller, fleet(busy, 2.5 * RATE), 30)
    move = seen[-1].move
    assert move is not None
    dead = [replace(one, up=one.engine != move.engine) for one in busy]
    decision = controller.step(fleet(dead, 2.5 * RATE), 30.0)
    assert decision.verdict is RoleVerdict.GIVEN_UP
    assert decision.serves[move.engine] is Role.DECODE
    assert controller.step(fleet(dead, 2.5 * RATE), 31.0).verdict is not RoleVerdict.MOVING


def test_a_role_below_its_floor_gets_an_engine_unless_the_other_is_at_its_own() -> None:
    controller = RoleController(TARGETS)
    engines = [*map(engine, range(4))]
    serves = controller.step(fleet(engines), 0.0).serves
    dead = [replace(one, up=serves[one.engine] is Role.DECODE) for one in engines]
    decision = controller.step(fleet(dead), 100.0)
    assert (decision.verdict, decision.move and decision.move.goal) == (
        RoleVerdict.BEGAN,
        Role.PREFILL,
    )
    alone = [replace(one, up=one.engine == "http://e1:1") for one in engines]
    other = RoleController(TARGETS)
    other.serves = dict(serves)
    assert other.step(fleet(alone), 100.0).verdict is RoleVerdict.BELOW_FLOOR


def test_engines_of_one_role_are_never_moved_but_the_numbers_that_are_wanted_are_told() -> None:
    engines = [engine(n, roles=frozenset({role})) for n, role in enumerate([*Role, *Role])]
    controller = RoleController(TARGETS)
    last = stepped(controller, fleet(engines, 3.4 * RATE), 300)[-1]
    assert last.verdict is RoleVerdict.NO_BETTER
    assert last.wanted[Role.PREFILL] >= 4
    assert last.wanted[Role.DECODE] == 1
    dry = RoleController(replace(TARGETS, moves=False))
    seen = stepped(dry, fleet(engines, 2.5 * RATE), 300)
    began = [one for one in seen if one.verdict is RoleVerdict.BEGAN]
    assert 2 <= len(began) <= 5  # it says so once in a period, and does nothing
    assert all(one.serves == seen[0].serves for one in seen)


def test_a_move_back_waits_twice_as_long_each_time() -> None:
    """Loads that flip at once after each move: the times between moves grow."""
    controller = RoleController(TARGETS)
    busy = [engine(n, num_ours=0) for n in range(3)]
    crowded = [engine(n, num_ours=200, itl_s=0.1) for n in range(3)]
    began: list[float] = []
    seen: set[RoleVerdict] = set()
    last = Role.PREFILL
    for now in range(3600):
        report = fleet(crowded) if last is Role.PREFILL else fleet(busy, 1.6 * RATE)
        report = replace(report, engines={
            name: replace(one, num_ours=0) if controller.serves.get(name) is None else one
            for name, one in report.engines.items()
        })  # fmt: skip
        decision = controller.step(report, float(now))
        seen.add(decision.verdict)
        if decision.verdict is RoleVerdict.BEGAN and decision.move is not None:
            began.append(decision.move.began_s)
            last = decision.move.goal
    between = [later - sooner for sooner, later in itertools.pairwise(began)]
    assert RoleVerdict.TOO_SOON in seen
    within = [one for one in began if one < REMEMBERED * TARGETS.period_s]
    assert len(within) <= 6
    assert between[1] > 1.5 * between[0]
    assert min(between) >= TARGETS.period_s


Step = tuple[list[dict[str, object]], float, float]
"""Facts of the engines, tokens sent to prefill in a second, and the pause before."""

REPORTS = st.builds(
    lambda up, ours, others, age, itl, kv: {
        "up": up, "num_ours": ours, "num_others": others, "age_s": age, "itl_s": itl,
        "kv_usage": kv,
    },
    st.booleans(),
    st.integers(0, 500),
    st.integers(-10, 500),
    st.one_of(st.none(), st.floats(0, 10)),
    st.one_of(st.none(), st.floats(allow_nan=True)),
    st.one_of(st.none(), st.floats(-1, 2)),
)  # fmt: skip
STEPS = st.lists(
    st.tuples(
        st.lists(REPORTS, min_size=5, max_size=5),
        st.floats(0, 1e6),
        st.floats(0.1, 120.0),
    ),
    min_size=1,
    max_size=60,
)


def check_laws(
    controller: RoleController, steps: Sequence[tuple[list[dict[str, object]], float, float]]
) -> None:
    """At most one engine changes, one begins in a period, and none leaves a role at its floor."""
    now, began_s = 0.0, -math.inf
    for facts, tokens, pause_s in steps:
        now += pause_s
        engines = [engine(n, **one) for n, one in enumerate(facts)]
        before = dict(controller.serves)
        decision = controller.step(fleet(engines, tokens), now)
        assert of_role(decision, None) <= 1
        if decision.verdict is RoleVerdict.BEGAN and decision.move is not None:
            assert now - began_s >= TARGETS.period_s
            began_s = now
            move = decision.move
            left = [one for one in engines if one.up and before.get(one.engine) is move.origin]
            assert len(left) > TARGETS.floors[move.origin]
        for role in decision.needs.why if decision.needs else ():
            assert math.isfinite(decision.needs.of(role) if decision.needs else 0.0)


@given(STEPS)
def test_whatever_is_reported_the_laws_hold(
    steps: list[Step],
) -> None:
    check_laws(RoleController(TARGETS), steps)


class Hasty(RoleController):
    """One that forgets the move under way, and when it began."""

    def step(self, report: FleetReport, now: float) -> RoleDecision:
        decision = super().step(report, now)
        self.move = None
        self._reversals.began_s = -math.inf
        return decision


PROMPTS_ALONE: list[Step] = [([{"kv_usage": 0.0}] * 9, 99 * RATE, 11.0)] * 40


@pytest.mark.parametrize(
    "broken",
    [
        Hasty(TARGETS),
        RoleController(replace(TARGETS, period_s=5.0)),
        RoleController(replace(TARGETS, floors=dict.fromkeys(Role, 0))),
    ],
    ids=["two at once", "too often", "no floor"],
)
def test_a_controller_that_breaks_a_law_is_found(broken: RoleController) -> None:
    """The controls."""
    with pytest.raises(AssertionError):
        check_laws(broken, PROMPTS_ALONE)
    check_laws(RoleController(TARGETS), PROMPTS_ALONE)
