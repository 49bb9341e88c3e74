"""Noticing that engines go down and come back.

Going down is noticed by the request that asked in vain; from then on a task
asks the engine's ``/health``, ever more rarely, until it says 200, or until the
engine is none of the fleet any more.
"""

from __future__ import annotations

import asyncio
import logging

from multidict import CIMultiDict

from pdconn.router.fleet.client import ConnectFailed, ConnectionLost, EngineClient
from pdconn.router.fleet.registry import EngineRegistry, Outage
from pdconn.router.metrics import ProxyMetrics
from pdconn.router.routing.policy import Role

log = logging.getLogger(__name__)

#: An engine that takes longer to say that it is well, is not.
PROBE_TIMEOUT_S = 2.0

#: What is said of an engine that came while the others were asked.
_TOO_NEW = "not asked yet"


class Health:
    """Keeps ``EngineRegistry`` true to what the engines say."""

    def __init__(
        self, engines: EngineRegistry, upstream: EngineClient, metrics: ProxyMetrics
    ) -> None:
        self._engines = engines
        self._upstream = upstream
        self._metrics = metrics
        self._revivals: dict[asyncio.Task[None], str] = {}
        self._closed = False
        self._round: asyncio.Task[dict[str, str | None]] | None = None

    async def close(self) -> None:
        """Stop probing."""
        self._closed = True
        ending = [*self._revivals, *([] if self._round is None else [self._round])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def fleet_changed(self) -> None:
        """Stop probing engines that are gone."""
        for task, engine in self._revivals.items():
            if engine not in self._engines:
                task.cancel()

    def report_down(self, engine: str, why: str, request_id: str) -> None:
        """A request asked in vain: skip this engine until it answers again."""
        if engine not in self._engines:
            return  # it has gone for good, and so will this request
        if self._engines.outage(engine) is not None:
            return  # another request said so first; one task probes it already
        outage = self._engines.mark_down(engine, why)
        self._metrics.engine_up(engine, up=False)
        log.warning(
            "engine down engine=%s roles=%s why=%r request=%s next_probe_s=%g",
            engine,
            ",".join(role.value for role in self._engines.roles(engine)),
            why,
            request_id,
            outage.backoff_s,
        )
        if not self._closed:
            task = asyncio.create_task(self._revive(engine, outage), name=f"revive {engine}")
            self._revivals[task] = engine
            task.add_done_callback(self._revival_ended)

    def _revival_ended(self, task: asyncio.Task[None]) -> None:
        engine = self._revivals.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("probing failed engine=%s", engine, exc_info=error)

    async def _revive(self, engine: str, outage: Outage) -> None:
        """Probe until this outage ends: by us, by another, or with the engine."""
        while True:
            await asyncio.sleep(outage.backoff_s)
            why = await self.probe(engine)
            if self._engines.outage(engine) is not outage:
                return
            if why is None:
                return self._report_up(engine)
            outage = self._engines.mark_down(engine, why)

    def _report_up(self, engine: str) -> None:
        if self._engines.mark_up(engine):
            self._metrics.engine_up(engine, up=True)
            log.info("engine up engine=%s", engine)

    async def probe(self, engine: str) -> str | None:
        """Ask one engine's ``/health``: None when it is well, else the reason."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                async with await self._upstream.get(engine, "/health", CIMultiDict()) as answer:
                    await answer.rest()
                    return None if answer.status == 200 else f"/health says {answer.status}"
        except TimeoutError:
            return f"/health silent for {PROBE_TIMEOUT_S:g} s"
        except (ConnectFailed, ConnectionLost) as error:
            return str(error)

    async def probe_all(self) -> dict[str, str | None]:
        """Ask every engine at once.  Callers at the same time share one round.

        The answer holds exactly the engines of when it is given.
        """
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._probe_round(), name="probe round")
        reasons = await asyncio.shield(self._round)
        return {name: reasons.get(name, _TOO_NEW) for name in self._engines.names}

    async def _probe_round(self) -> dict[str, str | None]:
        names = self._engines.names
        reasons = dict(zip(names, await asyncio.gather(*map(self.probe, names)), strict=True))
        for engine, why in reasons.items():
            if why is None:
                self._report_up(engine)
        return reasons

    async def page(self) -> dict[str, object]:
        """What ``/health`` shows: each role needs an engine that is well and not draining."""
        reasons = await self.probe_all()
        well = all(
            any(reasons[name] is None and not self._engines.is_draining(name) for name in names)
            for names in map(self._engines.of, Role)
        )
        roles = {
            role.value: [self._line(name, reasons[name]) for name in self._engines.of(role)]
            for role in Role
        }
        return {"status": "ok" if well else "unavailable", **roles}

    def _line(self, engine: str, why: str | None) -> dict[str, object]:
        draining = {"draining": True} if self._engines.is_draining(engine) else {}
        return {"engine": engine, "up": why is None, "why": why, **draining}
