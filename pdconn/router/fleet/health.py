"""Tracks which engines are up: a failed connection or probe marks one down, a probe marks it up.

    a request failed: no connection ─────────────────────────► down ──/health answers 200──► up
    ...: connection broken, 5xx ──► /health, on a connection ──►│ ▲
                                    of its own: fails           └─┘ /health fails

A request that fails after connecting may have failed for a reason of its own, or of its connection;
``/health`` shows whether the engine has failed.  vLLM answers 503 there when its engine core has
died, also when its API server stays alive (``VLLM_KEEP_ALIVE_ON_ENGINE_DEATH``).  While an engine
is down a task probes it at growing intervals, or short ones while no engine of its role is up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import (
    ConnectFailed,
    ConnectionLost,
    EngineClient,
    OutOfResources,
)
from pdconn.router.fleet.engine_registry import EngineRegistry, Outage
from pdconn.router.fleet.member import Role

log = logging.getLogger(__name__)

#: Time-out of ``/health``; a slower engine is not healthy.
PROBE_TIMEOUT_S = 2.0

#: The reason for an engine that could not be probed: nothing is known of it.
_NOT_ASKED = "this process has no resources left to ask /health with"

#: The reason for an engine that joined during a round of probes.
_NOT_PROBED = "not probed yet"


class Health:
    """Keeps the outages in ``EngineRegistry`` up to date.

    Args:
        changed: called with each engine that goes down or comes up, and whether it is up.

    Attributes:
        when_up: called with each engine that is up again.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        client: EngineClient,
        changed: Callable[[str, bool], object],
        *,
        decodes_alone: bool = True,
        timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._silent = f"no answer from /health within {timeout_s:g} s"
        self._decodes_alone = decodes_alone
        self._engines = engines
        self._client = client
        self._changed = changed
        self._probes: dict[asyncio.Task[None], str] = {}
        self._suspected: set[str] = set()
        self._closed = False
        self._round: asyncio.Task[dict[str, str | None]] | None = None
        self.when_up: Callable[[str], object] = lambda engine: None

    async def close(self) -> None:
        """Stop probing."""
        self._closed = True
        ending = [*self._probes, *([] if self._round is None else [self._round])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def fleet_changed(self) -> None:
        """Stop probing engines that left the fleet."""
        for task, engine in self._probes.items():
            if engine not in self._engines:
                task.cancel()

    def suspect(self, engine: str, why: str, request_id: str) -> None:
        """A request to this engine failed: mark it down if its ``/health`` fails too."""
        if self._closed or engine not in self._engines or engine in self._suspected:
            return
        if self._engines.outage(engine) is not None:
            return
        self._suspected.add(engine)
        work = self._examine(engine, why, request_id)
        task = asyncio.create_task(work, name=f"examine {engine}")
        self._probes[task] = engine
        task.add_done_callback(self._probe_ended)

    async def _examine(self, engine: str, why: str, request_id: str) -> None:
        try:
            found = await self.why_ill(engine)
        finally:
            self._suspected.discard(engine)
        if found is not None:
            self.report_down(engine, f"{why}; {found}", request_id)

    def report_down(self, engine: str, why: str, request_id: str) -> None:
        """A request could not connect to this engine: skip it until it answers again."""
        if engine not in self._engines:
            return  # the engine has left the fleet
        if self._engines.outage(engine) is not None:
            return  # another request failed first, and a task is already probing
        outage = self._engines.mark_down(engine, why)
        self._changed(engine, False)
        log.warning(
            "pdconn: engine down engine=%s roles=%s why=%r request=%s next_probe_s=%g",
            engine,
            ",".join(role.value for role in self._engines.roles(engine)),
            why,
            request_id,
            outage.backoff_s,
        )
        if not self._closed:
            task = asyncio.create_task(self._probe_until_up(engine, outage), name=f"probe {engine}")
            self._probes[task] = engine
            task.add_done_callback(self._probe_ended)

    def _probe_ended(self, task: asyncio.Task[None]) -> None:
        engine = self._probes.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("pdconn: probing failed engine=%s", engine, exc_info=error)

    async def _probe_until_up(self, engine: str, outage: Outage) -> None:
        """Probe until this outage ends: the engine is up, has another outage, or left the fleet."""
        while True:
            await self._pause(engine, outage)
            why = await self.probe(engine)
            if self._engines.outage(engine) is not outage:
                return
            if why is None:
                return self._report_up(engine)
            outage = self._engines.mark_down(engine, why)

    async def _pause(self, engine: str, outage: Outage) -> None:
        """Wait for the next probe; shorter while a role has no other engine, as requests wait then.

        The last other engine may go down during the wait, so that is checked repeatedly.
        """
        left_s, step_s = outage.backoff_s, 2 * outage.first_backoff_s
        while left_s > 0:
            await asyncio.sleep(min(left_s, step_s))
            left_s -= step_s
            if any(not self._engines.live(role) for role in self._engines.roles(engine)):
                return

    def _report_up(self, engine: str) -> None:
        if self._engines.mark_up(engine):
            self._changed(engine, True)
            log.info("pdconn: engine up engine=%s", engine)
            self.when_up(engine)

    async def why_ill(self, engine: str) -> str | None:
        """Why an engine is not healthy; None if it is, or if this process cannot ask it."""
        found = await self.probe(engine)
        return None if found == _NOT_ASKED else found

    async def probe(self, engine: str) -> str | None:
        """Request one engine's ``/health``: None if healthy, else the reason."""
        try:
            async with asyncio.timeout(self._timeout_s):
                async with await self._client.get_page(engine, "/health", CIMultiDict()) as answer:
                    await answer.read_rest()
                    return None if answer.status == 200 else f"/health answered {answer.status}"
        except TimeoutError:
            return self._silent
        except OutOfResources:
            return _NOT_ASKED
        except (ConnectFailed, ConnectionLost) as error:
            return str(error)

    async def probe_all(self) -> dict[str, str | None]:
        """Probe all engines concurrently.  Concurrent callers share one round.

        The answer has exactly the engines that are in the fleet when it is returned.
        """
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._probe_round(), name="probe round")
        reasons = await asyncio.shield(self._round)
        return {name: reasons.get(name, _NOT_PROBED) for name in self._engines.names}

    async def _probe_round(self) -> dict[str, str | None]:
        names = self._engines.names
        reasons = dict(zip(names, await asyncio.gather(*map(self.probe, names)), strict=True))
        for engine, why in reasons.items():
            if why is None:
                self._report_up(engine)
        return reasons

    def report_failed(self, reasons: Mapping[str, str | None], request_id: str) -> None:
        """Mark engines that ``/health`` shows as down; neither a slow answer counts nor none."""
        for engine, why in reasons.items():
            if why is not None and why not in {self._silent, _NOT_PROBED, _NOT_ASKED}:
                self.report_down(engine, why, request_id)

    async def page(self, *, name_engines: bool) -> dict[str, object]:
        """The router's own ``/health``: each role needs a healthy engine that is not draining.

        Without prefill it is ``degraded`` where decode computes prompts itself.  Without
        ``name_engines`` it holds neither addresses nor reasons, which may contain addresses.
        """
        reasons = await self.probe_all()
        self.report_failed(reasons, "/health")
        lines = {
            role.value: [
                self._line(name, reasons[name], name_engines)
                for name in self._engines.in_role(role)
            ]
            for role in Role
        }
        return {"status": self._status(reasons), **lines}

    def _status(self, reasons: Mapping[str, str | None]) -> str:
        served = {
            role
            for role in Role
            for name in self._engines.in_role(role)
            if reasons[name] is None and not self._engines.is_draining(name)
        }
        if served == set(Role):
            return "ok"
        return "degraded" if self._decodes_alone and Role.DECODE in served else "unavailable"

    def _line(self, engine: str, why: str | None, name_engines: bool) -> dict[str, object]:
        draining = {"draining": True} if self._engines.is_draining(engine) else {}
        if not name_engines:
            return {"up": why is None, **draining}
        return {"engine": engine, "up": why is None, "why": why, **draining}
