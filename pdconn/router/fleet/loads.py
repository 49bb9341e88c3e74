"""The load of every engine: from its Prometheus page, and from what this router has sent to it.

Pages are polled once a second, independently: a slow engine has an old load and delays no other.
What this router has in flight it knows at any time, and better.  So of a report only the requests
of others count: those beyond what this router had in flight when the page was asked for, or came.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import ConnectFailed, ConnectionLost, EngineClient
from pdconn.router.fleet.engine_page import Load, parse_metrics
from pdconn.router.fleet.engine_registry import EngineRegistry, KeptPerEngine
from pdconn.router.fleet.flights import InflightTracker
from pdconn.router.fleet.prometheus_page import MAX_PAGE_NBYTES
from pdconn.router.fleet.pull_counts import PullCounts, RecentPulls

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 2.0

COMPLAIN_EVERY_S = 60.0
"""Seconds in which failing pulls of one engine are logged once."""

LEASE_S = 30.0
"""vLLM's default lease; with a longer one an idle engine looks free a little early."""


@dataclass(slots=True)
class KvUsage:
    """Shares of blocks in use, for engines that update theirs only while they run steps.  Pure.

    vLLM counts its blocks in each step.  A prefill engine that has lent blocks and is idle reports
    them as in use long after their leases have ended.  So the report of an idle engine counts for
    the duration of a lease and no longer.
    """

    lease_s: float = LEASE_S
    _unchanged: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note_share(self, engine: str, share: float, *, idle: bool, now: float) -> float:
        """Note a reported share; returns the best known share of blocks in use."""
        if not idle:
            self._unchanged.pop(engine, None)
            return share
        before, since = self._unchanged.setdefault(engine, (share, now))
        if before != share:
            since = now
            self._unchanged[engine] = (share, now)
        return share if now - since < self.lease_s else 0.0

    def keep_engines(self, engines: Collection[str]) -> None:
        """Forget all other engines."""
        self._unchanged = {name: one for name, one in self._unchanged.items() if name in engines}


@dataclass(frozen=True, slots=True)
class LoadReading:
    """A load and its arrival time, by the poller's clock.

    Attributes:
        num_ours: requests of this router that were in flight there.
    """

    load: Load
    at_s: float
    num_ours: int = 0

    @property
    def num_others(self) -> int:
        """Requests there, running and waiting, that this router had not sent."""
        return max(0, (self.load.running or 0) + (self.load.waiting or 0) - self.num_ours)


@dataclass(frozen=True, slots=True)
class _PollBounds:
    """Bounds of a poll: the interval, the time-out, and the size of the page."""

    interval_s: float
    timeout_s: float
    max_page_nbytes: int


class LoadPoller:
    """Keeps the last load of each engine that gets requests.

    Attributes:
        inflight: what this router has sent to engines.
        usage: the best known share of their blocks in use.
        latest: holds no engine that left the fleet; one that stopped answering stays, with its age
            (``fresh`` leaves it out).
        pulls: the engines' counters of pulls; failures are logged.

    >>> async with LoadPoller(engines, client) as loads:  # doctest: +SKIP
    ...     loads.fresh(max_age_s=5.0)["http://10.0.0.1:8000"].waiting
    """

    def __init__(
        self,
        engines: EngineRegistry,
        client: EngineClient,
        *,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        max_page_nbytes: int = MAX_PAGE_NBYTES,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.latest: dict[str, LoadReading] = {}
        self.inflight = InflightTracker()
        self.usage = KvUsage(lease_s)
        self.pulls = RecentPulls()
        self._complained_s: dict[str, float] = {}
        self._engines = engines
        self._client = client
        self._bounds = _PollBounds(interval_s, timeout_s, max_page_nbytes)
        self._clock = clock
        self._failing: set[str] = set()
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._ticker: asyncio.Task[None] | None = None

    def fresh(self, max_age_s: float) -> dict[str, Load]:
        """The loads that are not older than ``max_age_s``."""
        since_s = self._clock() - max_age_s
        return {name: last.load for name, last in self.latest.items() if last.at_s >= since_s}

    def requests_at(self, engine: str, max_age_s: float) -> tuple[int, int]:
        """Requests at an engine, and those of them that this router has not sent.

        Args:
            engine: base URL.
            max_age_s: an older report is not used.
        """
        ours, _ = self.inflight.requests_at(engine)
        last = self.latest.get(engine)
        is_fresh = last is not None and last.at_s >= self._clock() - max_age_s
        others = last.num_others if last is not None and is_fresh else 0
        return ours + others, others

    def fleet_changed(self) -> None:
        """Forget engines that left the fleet."""
        for name in [name for name in self.latest if name not in self._engines]:
            del self.latest[name]
            self._complained_s.pop(name, None)
        kept: tuple[KeptPerEngine, ...] = (self.pulls, self.usage)
        for one in kept:
            one.keep_engines(self._engines.names)
        self._failing = {name for name in self._failing if name in self._engines}

    async def poll_now(self) -> None:
        """Poll every engine once; returns when all have answered or timed out."""
        self._poll_all()
        if self._polls:
            await asyncio.wait(list(self._polls.values()))

    async def _run(self) -> None:
        while True:
            self._poll_all()
            await asyncio.sleep(self._bounds.interval_s)

    def _poll_all(self) -> None:
        self.fleet_changed()
        for engine in self._engines.answering():
            if engine not in self._polls:  # else the previous poll is still running
                task = asyncio.create_task(self._poll(engine), name=f"load of {engine}")
                self._polls[engine] = task
                task.add_done_callback(partial(self._poll_ended, engine))

    def _poll_ended(self, engine: str, task: asyncio.Task[None]) -> None:
        del self._polls[engine]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("pdconn: polling the load failed engine=%s", engine, exc_info=error)

    async def _poll(self, engine: str) -> None:
        before, _ = self.inflight.requests_at(engine)
        try:
            async with asyncio.timeout(self._bounds.timeout_s):
                page = await self._page(engine)
        except TimeoutError:
            return self._note_failure(engine, f"no answer within {self._bounds.timeout_s:g} s")
        except (ConnectFailed, ConnectionLost) as error:
            return self._note_failure(engine, str(error))
        if engine not in self._engines:
            return None  # it left the fleet during the poll
        load, now = parse_metrics(page, self._bounds.max_page_nbytes), self._clock()
        # The page is of some moment in between.
        ours = max(before, self.inflight.requests_at(engine)[0])
        self.latest[engine] = LoadReading(load, now, ours)
        self._note_pulls(engine, self.pulls.note_counts(engine, load.pulls, now), now)
        if engine in self._failing:
            self._failing.discard(engine)
            log.info("pdconn: load known again engine=%s", engine)
        return None

    def _note_pulls(self, engine: str, grown: PullCounts, now: float) -> None:
        """Log pulls that failed since the last poll; the requests themselves were answered."""
        if grown.failed and now - self._complained_s.get(engine, float("-inf")) >= COMPLAIN_EVERY_S:
            self._complained_s[engine] = now
            log.warning(
                "pdconn: pulls fail engine=%s failed=%d of=%d why=%r remedy=%r",
                engine,
                grown.failed,
                grown.tried,
                grown.why or "not counted",
                grown.remedy,
            )

    async def _page(self, engine: str) -> str:
        headers = CIMultiDict({"Accept-Encoding": "identity"})
        async with await self._client.get_page(engine, "/metrics", headers) as answer:
            if answer.status != 200:
                raise ConnectionLost(f"/metrics answered {answer.status}")
            pieces: list[bytes] = []
            nbytes = 0
            while piece := await answer.next_chunk():
                nbytes += len(piece)
                if nbytes > self._bounds.max_page_nbytes:
                    raise ConnectionLost(
                        f"/metrics is longer than {self._bounds.max_page_nbytes} bytes"
                    )
                pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    def _note_failure(self, engine: str, why: str) -> None:
        """Log the failure once; whether the engine is down is decided by requests."""
        if engine in self._engines and engine not in self._failing:
            self._failing.add(engine)
            log.warning("pdconn: load unknown engine=%s why=%r", engine, why)

    async def close(self) -> None:
        """Stop polling."""
        ending = [*self._polls.values(), *([] if self._ticker is None else [self._ticker])]
        self._ticker = None
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def __aenter__(self) -> Self:
        self._ticker = asyncio.create_task(self._run(), name="poll loads")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
