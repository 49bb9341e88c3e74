"""Noticing that engines go down and come back.

Going down is noticed by the request that asked in vain; from then on a task
asks the engine's ``/health``, ever more rarely, until it says 200.
"""

from __future__ import annotations

import asyncio
import logging

from multidict import CIMultiDict

from pdconn.router.background import Background
from pdconn.router.engines import Engines
from pdconn.router.metrics import ProxyMetrics
from pdconn.router.upstream import Lost, Unreached, Upstream

log = logging.getLogger(__name__)

#: An engine that takes longer to say that it is well, is not.
PROBE_TIMEOUT_S = 2.0


class Health:
    """Keeps ``Engines`` true to what the engines say."""

    def __init__(self, engines: Engines, upstream: Upstream, metrics: ProxyMetrics) -> None:
        self._engines = engines
        self._upstream = upstream
        self._metrics = metrics
        self._revivals = Background(limit=len(engines.names))
        self._round: asyncio.Task[dict[str, str | None]] | None = None

    async def close(self) -> None:
        """Stop probing."""
        await self._revivals.close(grace_s=0)
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)

    def report_down(self, engine: str, why: str, request_id: str) -> None:
        """A request asked in vain: skip this engine until it answers again."""
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
        self._revivals.spawn(self._revive(engine), f"revive {engine}")

    async def _revive(self, engine: str) -> None:
        while (outage := self._engines.outage(engine)) is not None:
            await asyncio.sleep(outage.backoff_s)
            why = await self.probe(engine)
            if why is None:
                self._report_up(engine)
            else:
                self._engines.mark_down(engine, why)

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
        except (Unreached, Lost) as error:
            return str(error)

    async def probe_all(self) -> dict[str, str | None]:
        """Ask every engine at once.  Callers at the same time share one round."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._probe_round(), name="probe round")
        return await asyncio.shield(self._round)

    async def _probe_round(self) -> dict[str, str | None]:
        names = self._engines.names
        reasons = dict(zip(names, await asyncio.gather(*map(self.probe, names)), strict=True))
        for engine, why in reasons.items():
            if why is None:
                self._report_up(engine)
        return reasons
