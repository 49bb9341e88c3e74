"""Which engine serves which role, as the load changes.  Pure: no clock, no IO.

::

    prefill ◄──► decode      by the controller, one engine at a time

    serves its role ──begins──► finishes its requests, gets no others ──► serves the other role
                                     │ it goes down, drains or leaves
                                     └──► given up: its role is the old one

An engine that is listed in both roles is movable: it serves one of them at a time.  Others keep
the role that they are listed in.  Each step gets a report of the fleet and decides at most one
thing; the cases of ``RoleController.step`` are numbered in the order in which they are checked.

What keeps it still, while a load flickers or reports lie:

- a move begins only if a role misses its target, another ratio is better by ``MARGIN``, and both
  have been so for ``STEADY`` of a period;
- one engine begins to move in a period at most, and the next only after it has ended;
- a move against the direction of the one before waits longer, twice as long for each quick
  reversal (within ``QUICK`` periods) in the last ``REMEMBERED`` periods;
- reports that are old or absurd end the step before anything is decided.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdconn.router.fleet.member import Role
from pdconn.router.labels import RoleVerdict
from pdconn.router.roles.role_needs import NeedsEstimator, RoleNeeds
from pdconn.router.roles.role_reports import EngineReport, FleetReport

MARGIN = 0.1
"""A ratio is better if its pressure is lower by this share."""
STEADY = 1 / 6
"""Periods for which a role must be short in the same direction."""
QUICK = 5
"""Periods from one move to the next within which a reversal counts: later, the load has changed."""
REMEMBERED = 20
"""Periods for which a reversal counts."""
LEAST_STEP_S = 1e-3
MOST_REASON = 200

OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTargets:
    """What the controller keeps to.

    Attributes:
        ttft_s, itl_s: the targets.
        floors: the least engines of each role.
        period_s: at most one engine begins to change in this time.
        drain_s: an engine takes its new role after this time at the latest.
        moves: whether moves are carried out; without, they are only said.
    """

    ttft_s: float
    itl_s: float
    floors: Mapping[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 1))
    period_s: float = 60.0
    drain_s: float = 60.0
    moves: bool = True


@dataclass(frozen=True, slots=True)
class RoleMove:
    """An engine that changes its role."""

    engine: str
    origin: Role
    goal: Role
    began_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDecision:
    """The outcome of one step.

    Attributes:
        verdict, reason: what was decided, and why in words.
        serves: the role of every engine; None while it changes.
        needs: of both roles, None while they are unknown.
        wanted: engines that each role should have, whatever it has; without needs the last ones,
            and before the first needs those that it has.
        best: engines of each role in the best ratio of those that are there.
        move: under way after this step.
        left: requests of the old role at an engine that has just taken its new one.
    """

    verdict: RoleVerdict
    reason: str
    serves: Mapping[str, Role | None]
    needs: RoleNeeds | None = None
    wanted: Mapping[Role, int] = field(default_factory=dict)
    best: Mapping[Role, int] = field(default_factory=dict)
    move: RoleMove | None = None
    left: int = 0


@dataclass(slots=True)
class _Reversals:
    """The direction of the last move, and when moves were against the one before."""

    goal: Role | None = None
    began_s: float = -math.inf
    at_s: deque[float] = field(default_factory=lambda: deque(maxlen=16))

    def note_move(self, goal: Role, period_s: float, now: float) -> None:
        is_quick = now - self.began_s < QUICK * period_s
        if self.goal is not None and goal is not self.goal and is_quick:
            self.at_s.append(now)
        self.goal, self.began_s = goal, now

    def wait_s(self, goal: Role, period_s: float, now: float) -> float:
        """Seconds from the last move until one to ``goal`` may begin."""
        if goal is self.goal or self.goal is None:
            return period_s
        recent = sum(at_s > now - REMEMBERED * period_s for at_s in self.at_s)
        return period_s * 2.0**recent


class RoleController:
    """Decides about the roles of a fleet.

    Attributes:
        serves: the role of each engine; None while it changes.
        move: under way.
        estimator: of the needs.

    >>> from pdconn.router.roles.role_reports import FleetReport
    >>> both = EngineReport(engine="http://a:1", roles=frozenset(Role))
    >>> one = RoleController(RoleTargets(ttft_s=2.0, itl_s=0.05))
    >>> one.step(FleetReport(engines={"http://a:1": both}), 0.0).verdict
    <RoleVerdict.UNKNOWN: 'unknown'>
    """

    def __init__(self, targets: RoleTargets) -> None:
        self.targets = targets
        self.serves: dict[str, Role | None] = {}
        self.move: RoleMove | None = None
        self.estimator = NeedsEstimator(targets.ttft_s, targets.itl_s, targets.period_s)
        self._reversals = _Reversals()
        self._short: tuple[Role, float] | None = None
        self._wanted: dict[Role, int] = {}
        self._stepped_s: float | None = None

    def step(self, report: FleetReport, now: float) -> RoleDecision:
        """Decide by a report of the fleet.

        Args:
            report: of what is there, and has happened since the step before.
            now: seconds that never go back.
        """
        before_s, self._stepped_s = self._stepped_s, now
        dt_s = 1.0 if before_s is None else max(LEAST_STEP_S, now - before_s)
        self._follow_fleet(report)
        serving = self._serving(report)
        needs = self._needs(report, serving, now, dt_s)
        # 1. An engine changes its role: nothing else begins before it has ended.
        if self.move is not None:
            return self._continue_move(self.move, report, needs, now)
        # 2. What is measured is old or absurd.
        if needs is None:
            self._short = None
            return self._held(RoleVerdict.UNKNOWN, "reports are old or absurd", None)
        # 3. A role has fewer engines than its floor.
        for role in Role:
            if len(serving[role]) < self.targets.floors[role]:
                return self._restore_floor(role, serving, needs, now)
        return self._balance(report, serving, needs, now)

    def _balance(
        self,
        report: FleetReport,
        serving: Mapping[Role, Sequence[EngineReport]],
        needs: RoleNeeds,
        now: float,
    ) -> RoleDecision:
        """Begin a move to a better ratio, or tell why not: cases 4 to 8 of a step."""
        have = len(serving[Role.PREFILL])
        total = have + len(serving[Role.DECODE])
        best = self._best_prefill(report, needs, have, total)
        now_pressure = needs.pressure(have, total - have)
        best_pressure = needs.pressure(best, total - best)
        # 4. Both roles keep their targets.
        if now_pressure <= 1:
            self._short = None
            return self._held(RoleVerdict.IN_TARGET, "both roles keep their targets", needs, best)
        goal = Role.PREFILL if best > have else Role.DECODE
        short = _shortage(needs, have, total - have)
        # 5. No other ratio is better by enough.
        if best == have or best_pressure > now_pressure * (1 - MARGIN):
            self._short = None
            return self._held(RoleVerdict.NO_BETTER, f"{short}; no ratio helps", needs, best)
        # 6. It has not been so for long.
        if self._short is None or self._short[0] is not goal:
            self._short = goal, now
        if now - self._short[1] < STEADY * self.targets.period_s:
            return self._held(RoleVerdict.UNSTEADY, f"{short}, since a moment", needs, best)
        # 7. The last change was shortly before.
        wait_s = self._reversals.wait_s(goal, self.targets.period_s, now)
        if now - self._reversals.began_s < wait_s:
            left_s = self._reversals.began_s + wait_s - now
            return self._held(RoleVerdict.TOO_SOON, f"{short}; {left_s:.0f} s to go", needs, best)
        # 8. The engine with the least to finish and to keep begins to change.  There is one: the
        # ratios that were compared leave engines of one role where they are.
        engine = self._choose(serving[OTHER[goal]])
        assert engine is not None
        return self._begin_move(engine, goal, f"{short}: {needs.why[goal]}", needs, now, best=best)

    # The fleet

    def _follow_fleet(self, report: FleetReport) -> None:
        """Give new engines a role; forget those that left."""
        engines = report.engines
        self.serves = {name: role for name, role in self.serves.items() if name in engines}
        for name, one in engines.items():
            if len(one.roles) == 1:
                (self.serves[name],) = one.roles
        for name in engines:
            if name not in self.serves:
                self.serves[name] = self._role_of_new(engines)

    def _role_of_new(self, engines: Mapping[str, EngineReport]) -> Role:
        """The role of an engine that joins: the one that is further from its due."""
        counts = {
            role: sum(one is role and engines[name].up for name, one in self.serves.items())
            for role in Role
        }
        for role in Role:
            if counts[role] < self.targets.floors[role]:
                return role
        return max(Role, key=lambda role: self._wanted.get(role, 1) / max(1, counts[role]))

    def _serving(self, report: FleetReport) -> dict[Role, list[EngineReport]]:
        """Engines that are up, by the role that they serve."""
        return {
            role: [
                one for one in report.engines.values() if one.up and self.serves[one.engine] is role
            ]
            for role in Role
        }

    def _needs(
        self,
        report: FleetReport,
        serving: Mapping[Role, Sequence[EngineReport]],
        now: float,
        dt_s: float,
    ) -> RoleNeeds | None:
        """What each role needs; None if most reports of a role count for nothing."""
        counted = {role: list(engines) for role, engines in serving.items()}
        if self.move is not None and (one := report.engines.get(self.move.engine)) is not None:
            counted[self.move.origin].append(one)
        if any(not _are_known(engines) for engines in counted.values()) or not report.engines:
            return None
        needs = self.estimator.measure(report, counted, now=now, dt_s=dt_s)
        for role in Role:
            self._wanted[role] = max(self.targets.floors[role], math.ceil(needs.of(role)))
        return needs

    def _best_prefill(self, report: FleetReport, needs: RoleNeeds, have: int, total: int) -> int:
        """Prefill engines of the ratio with the least pressure; of several, the nearest."""
        fixed = {
            role: sum(one.up and one.roles == {role} for one in report.engines.values())
            for role in Role
        }
        floors = self.targets.floors
        least = max(floors[Role.PREFILL], fixed[Role.PREFILL] if self.targets.moves else 0)
        kept = max(floors[Role.DECODE], fixed[Role.DECODE] if self.targets.moves else 0)
        return min(
            range(least, max(least, total - kept) + 1),
            key=lambda prefill: (needs.pressure(prefill, total - prefill), abs(prefill - have)),
        )

    # Moves

    def _choose(self, donors: Sequence[EngineReport]) -> str | None:
        """The movable engine with the least to finish; of several, the least to keep."""
        movable = [one for one in donors if len(one.roles) > 1 or not self.targets.moves]
        best = min(
            movable, key=lambda one: (one.num_requests, one.kept_tokens, one.engine), default=None
        )
        return None if best is None else best.engine

    def _restore_floor(
        self,
        role: Role,
        serving: Mapping[Role, Sequence[EngineReport]],
        needs: RoleNeeds,
        now: float,
    ) -> RoleDecision:
        """Move an engine to a role below its floor, unless the other would fall below its own."""
        donors = serving[OTHER[role]]
        engine = self._choose(donors)
        why = f"{role.value} has {len(serving[role])} of {self.targets.floors[role]} engines"
        is_soon = now - self._reversals.began_s < self.targets.period_s
        if is_soon or engine is None or len(donors) <= self.targets.floors[OTHER[role]]:
            return self._held(RoleVerdict.BELOW_FLOOR, why, needs)
        return self._begin_move(engine, role, why, needs, now)

    def _begin_move(
        self,
        engine: str,
        goal: Role,
        why: str,
        needs: RoleNeeds,
        now: float,
        *,
        best: int | None = None,
    ) -> RoleDecision:
        move = RoleMove(engine, OTHER[goal], goal, now, why[:MOST_REASON])
        self._short = None
        self._reversals.note_move(goal, self.targets.period_s, now)
        if self.targets.moves:
            self.move, self.serves[engine] = move, None
        return self._decided(RoleVerdict.BEGAN, why, needs, best, move=move)

    def _continue_move(
        self, move: RoleMove, report: FleetReport, needs: RoleNeeds | None, now: float
    ) -> RoleDecision:
        one = report.engines.get(move.engine)
        # 1a. The engine is gone: when it is back it has its old role.
        if one is None or not one.up:
            self.move = None
            if one is not None:
                self.serves[move.engine] = move.origin
            return self._decided(RoleVerdict.GIVEN_UP, f"{move.engine} is not up", needs, move=move)
        # 1b. It has finished, or it is late: either way no request is lost, the engine serves both.
        late = now - move.began_s >= self.targets.drain_s
        left = one.num_requests
        if late or not left:
            self.move, self.serves[move.engine] = None, move.goal
            why = f"{left} requests left" if left else "all requests ended"
            return self._decided(RoleVerdict.ENDED, why, needs, move=move, left=left)
        # 1c. It finishes.
        return self._decided(RoleVerdict.MOVING, f"{left} requests to finish", needs, move=move)

    def _held(
        self, verdict: RoleVerdict, why: str, needs: RoleNeeds | None, best: int | None = None
    ) -> RoleDecision:
        return self._decided(verdict, why, needs, best)

    def _decided(
        self,
        verdict: RoleVerdict,
        why: str,
        needs: RoleNeeds | None,
        best: int | None = None,
        *,
        move: RoleMove | None = None,
        left: int = 0,
    ) -> RoleDecision:
        serving = Counter(self.serves.values())
        total = serving[Role.PREFILL] + serving[Role.DECODE]
        ratio = {} if best is None else {Role.PREFILL: best, Role.DECODE: total - best}
        return RoleDecision(
            verdict=verdict,
            reason=why[:MOST_REASON],
            serves=dict(self.serves),
            needs=needs,
            wanted={role: self._wanted.get(role, serving[role]) for role in Role},
            best=ratio,
            move=move,
            left=left,
        )


def _are_known(engines: Sequence[EngineReport]) -> bool:
    """Whether more than half of the engines have a report that counts; none is known as well."""
    return 2 * sum(one.is_trusted for one in engines) > len(engines) or not engines


def _shortage(needs: RoleNeeds, prefill: int, decode: int) -> str:
    """The role that is shorter, and by how much."""
    have = {Role.PREFILL: prefill, Role.DECODE: decode}
    role = max(Role, key=lambda one: needs.pressure_of(one, have[one]))
    return f"{role.value} needs {needs.of(role):.1f} engines and has {have[role]}"
