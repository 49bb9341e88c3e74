"""Lets roles follow the load: reports the fleet to the controller, and carries out its moves.

::

    loads, requests in flight, first tokens ──► FleetReport ──► RoleController
                                                                     │ serves
    requests ◄── EngineRegistry.live ◄── assign_roles ◄──────────────┘

A move takes nothing away from requests.  The engine gets no new ones of its old role, finishes what
it has, and gets requests of the new one.  Its KV cache stays as it is: after decode its prefixes
serve its own prefill; after prefill it lends them, as any engine does (``--pull-above``), and it
keeps the sessions that it has promised to keep.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.loads import LoadPoller, LoadReading
from pdconn.router.fleet.member import Role
from pdconn.router.handover.prompt_meter import PromptMeter
from pdconn.router.labels import RoleVerdict
from pdconn.router.roles.role_controller import RoleController, RoleDecision, RoleTargets
from pdconn.router.roles.role_reports import EngineReport, FleetReport
from pdconn.router.roles.role_settings import DRY_RUN, STATIC, RoleSettings
from pdconn.router.router_metrics import RouterMetrics
from pdconn.router.routing.session_table import SessionTable

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Between two steps: loads are polled as often."""
COUNT_KEPT_S = 10.0
"""Between two counts of what sessions keep: ten thousand of them take 4 ms."""
SHOWN = 20
"""Changes that the admin page shows."""


@dataclass(slots=True)
class _ItlSeen:
    """The last count of an engine's pauses between tokens, and their mean since the one before."""

    at_s: float
    sum_s: float
    count: int
    mean_s: float | None = None


class EngineReporter:
    """Builds reports of engines.

    Args:
        engines, loads: of the fleet.
        sessions: which engine keeps how much.
        clock: that of ``loads``.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        loads: LoadPoller,
        sessions: SessionTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines, self._loads, self._sessions = engines, loads, sessions
        self._clock = clock
        self._itl: dict[str, _ItlSeen] = {}
        self._kept: Mapping[str, int] = {}
        self._kept_at_s = -math.inf

    def reports(self) -> dict[str, EngineReport]:
        """Of every engine of the fleet, now."""
        now = self._clock()
        if now - self._kept_at_s >= COUNT_KEPT_S:
            self._kept, self._kept_at_s = self._sessions.tokens_kept(), now
        kept, up = self._kept, set(self._engines.answering())
        self._itl = {name: one for name, one in self._itl.items() if name in self._engines}
        return {
            name: self._report(name, name in up, kept.get(name, 0)) for name in self._engines.names
        }

    def _report(self, engine: str, up: bool, kept_tokens: int) -> EngineReport:
        ours, _ = self._loads.inflight.requests_at(engine)
        roles = frozenset(self._engines.roles(engine))
        last = self._loads.latest.get(engine)
        if last is None:
            return EngineReport(engine=engine, roles=roles, up=up, num_ours=ours)
        idle = not ours and not last.num_others
        return EngineReport(
            engine=engine,
            roles=roles,
            up=up,
            age_s=max(0.0, self._clock() - last.at_s),
            num_ours=ours,
            num_others=last.num_others,
            num_waiting=last.load.waiting or 0,
            # An idle engine counts blocks that are free again (loads.KvUsage).
            kv_usage=0.0 if idle else last.load.kv_usage,
            itl_s=self._mean_itl_s(engine, last),
            kept_tokens=kept_tokens,
        )

    def _mean_itl_s(self, engine: str, last: LoadReading) -> float | None:
        """The mean pause between two tokens, of those between the last two pages."""
        sum_s, count = last.load.itl_sum_s, last.load.itl_count
        if sum_s is None or count is None:
            return None
        seen = self._itl.get(engine)
        if seen is None:
            self._itl[engine] = _ItlSeen(last.at_s, sum_s, count)
        elif last.at_s > seen.at_s:
            num, took_s = count - seen.count, sum_s - seen.sum_s
            # A restart begins anew.
            mean_s = took_s / num if num > 0 and took_s >= 0 else None
            self._itl[engine] = _ItlSeen(last.at_s, sum_s, count, mean_s)
        return self._itl[engine].mean_s


class RoleFollower:
    """Steps the controller, and tells what it decides; inert with static roles.

    Attributes:
        meter: of prompts, a watcher of requests.
        when_changed: called after an engine has begun or ended to change.

    >>> async with RoleFollower(settings, engines, reporter, meter, metrics):  # doctest: +SKIP
    ...     await serve()
    """

    def __init__(
        self,
        settings: RoleSettings,
        engines: EngineRegistry,
        reporter: EngineReporter,
        meter: PromptMeter,
        metrics: RouterMetrics,
    ) -> None:
        self._settings, self._engines, self._reporter = settings, engines, reporter
        self._metrics = metrics
        self.meter = meter
        self.when_changed: Callable[[], object] = lambda: None
        self._controller = _controller(settings)
        self._last: RoleDecision | None = None
        self._changes: list[dict[str, object]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether there is a controller."""
        return self._controller is not None

    def fleet_changed(self) -> None:
        """Give new engines their role at once, before they get requests."""
        if self._controller is None:
            return
        names = self._engines.names
        is_movable = any(len(self._engines.roles(name)) > 1 for name in names)
        if names and not is_movable and self._settings.roles != DRY_RUN:
            log.warning(
                "pdconn: --roles follow, but no engine is listed in both roles engines=%d",
                len(names),
            )
        self._step(self._controller)

    def state(self) -> dict[str, object] | None:
        """For the admin page; None with static roles."""
        one = self._last
        if one is None:
            return None
        return {
            "mode": self._settings.roles,
            "verdict": one.verdict.value,
            "reason": one.reason,
            "serving": {role.value: _count(one, role) for role in Role},
            "changing": one.move.engine if one.move is not None and _is_moving(one) else None,
            "wanted": {role.value: number for role, number in one.wanted.items()},
            "best": {role.value: number for role, number in one.best.items()},
            "needs": {}
            if one.needs is None
            else {
                role.value: {"engines": round(one.needs.of(role), 2), "why": one.needs.why[role]}
                for role in Role
            },
            "serves": {
                name: None if role is None else role.value for name, role in one.serves.items()
            },
            "changes": self._changes[::-1],
        }

    def _step(self, controller: RoleController) -> None:
        sent_tokens, sent_prompts, prefilled, first_tokens = self.meter.take_counts()
        report = FleetReport(
            engines=self._reporter.reports(),
            sent_tokens=sent_tokens,
            sent_prompts=sent_prompts,
            backlog_tokens=self.meter.backlog_tokens(self._engines.names),
            prefilled=prefilled,
            first_tokens=first_tokens,
        )
        decision = self._last = controller.step(report, time.monotonic())
        if self._settings.roles != DRY_RUN:
            self._engines.assign_roles(decision.serves)
        self._metrics.roles_decided(decision)
        if decision.verdict in _TOLD:
            self._tell(decision)
            self.when_changed()

    def _tell(self, decision: RoleDecision) -> None:
        """Log a change, and keep it for the page."""
        move = decision.move
        assert move is not None
        what = _TOLD[decision.verdict]
        if self._settings.roles == DRY_RUN:
            what = f"would change, dry run: {what}"
        log.info(
            "pdconn: role %s engine=%s from=%s to=%s why=%r",
            what,
            move.engine,
            move.origin.value,
            move.goal.value,
            decision.reason,
        )
        self._changes.append(
            {
                "at": time.time(),
                "engine": move.engine,
                "from": move.origin.value,
                "to": move.goal.value,
                "what": what,
                "why": decision.reason,
            }
        )
        del self._changes[:-SHOWN]

    async def _run(self, controller: RoleController) -> None:
        interval_s = min(INTERVAL_S, self._settings.role_period_s / 10)
        while True:
            await asyncio.sleep(interval_s)
            try:
                self._step(controller)
            except Exception:  # the outermost loop: roles must go on
                log.exception("pdconn: deciding about roles failed")

    async def __aenter__(self) -> Self:
        if self._controller is not None:
            self._task = asyncio.create_task(self._run(self._controller), name="follow the load")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


_TOLD = {
    RoleVerdict.BEGAN: "begins to change",
    RoleVerdict.ENDED: "changed",
    RoleVerdict.GIVEN_UP: "change given up",
}


def _count(decision: RoleDecision, role: Role) -> int:
    return sum(one is role for one in decision.serves.values())


def _is_moving(decision: RoleDecision) -> bool:
    return decision.move is not None and decision.serves.get(decision.move.engine, ...) is None


def _controller(settings: RoleSettings) -> RoleController | None:
    if settings.roles == STATIC or settings.ttft_target_s is None or settings.itl_target_s is None:
        return None
    return RoleController(
        RoleTargets(
            ttft_s=settings.ttft_target_s,
            itl_s=settings.itl_target_s,
            floors=settings.floors,
            period_s=settings.role_period_s,
            drain_s=settings.role_drain_s,
            moves=settings.roles != DRY_RUN,
        )
    )
