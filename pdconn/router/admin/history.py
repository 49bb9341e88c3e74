"""The last ten minutes for the charts of the admin page: one sample every two seconds.

The router keeps them, not the page, so that a reload loses nothing and all viewers see the same
data.  Rates and shares are averaged, so that charts stay readable at low request rates::

    requests a second     the last 10 s
    shares, times         the last 30 s
    failed pulls          the last 5 minutes, as engines count them

Bounded: ``MOST_SAMPLES`` samples, each of at most ``MOST_NAMES`` engines and as many pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
from aiohttp import web

from pdconn.router.router_metrics import Moment, RouterMetrics
from pdconn.router.routing.decide import LOAD_FOR_S, RequestRouter

INTERVAL_S = 2.0
MOST_SAMPLES = 300
MOST_NAMES = 128
_RATE_OVER = 5
_SHARE_OVER = 15


@dataclass(frozen=True, slots=True)
class EngineSample:
    """The load of one engine; a field is None where the engine does not report it.

    ``inflight`` counts requests that this router has sent to it.
    """

    kv_usage: float | None
    running: int | None
    waiting: int | None
    inflight: int


@dataclass(frozen=True, slots=True)
class RouterSample:
    """One sample.

    Attributes:
        seq: number of samples taken before this one.
        at: seconds since the epoch.
        requests_per_s, failed_per_s: rates of requests that ended.
        handed_over: share of the answered requests whose decode had a ticket; None without
            requests.
        pulls_failed: share of the engines' pulls that failed; None without pulls.
        ttft_p50_ms, ttft_p95_ms: from arrival to the first token; None without requests.
        engines: samples by engine name.
        pods: blocks in each prefix cache, by pod.
    """

    seq: int
    at: float
    requests_per_s: float
    failed_per_s: float
    handed_over: float | None
    pulls_failed: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    engines: dict[str, EngineSample]
    pods: dict[str, int]


class History:
    """The ring of samples of one router.

    ``boot`` identifies the router process: the page starts over when it changes.
    """

    def __init__(
        self,
        router: RequestRouter,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.time,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._clock = clock
        self._interval_s = interval_s
        self._samples: deque[RouterSample] = deque(maxlen=MOST_SAMPLES)
        self._moments: deque[Moment] = deque(maxlen=_SHARE_OVER)
        self._taken = 0
        self.boot = clock()

    def take_sample(self) -> RouterSample:
        """Take one sample and append it."""
        moments = self._moments
        moments.append(self._metrics.take_moment())
        latest = list(islice(reversed(moments), _RATE_OVER))
        over_s = len(latest) * self._interval_s
        served = sum(one.served for one in moments)
        times_s = sorted(second for one in moments for second in one.first_tokens_s)
        sample = RouterSample(
            self._taken,
            self._clock(),
            sum(one.ended for one in latest) / over_s,
            sum(one.failed for one in latest) / over_s,
            sum(one.handed_over for one in moments) / served if served else None,
            self._pulls_failed(),
            _quantile_ms(times_s, 0.5),
            _quantile_ms(times_s, 0.95),
            self._engines(),
            self._pods(),
        )
        self._taken += 1
        self._samples.append(sample)
        return sample

    def since(self, seq: int) -> bytes:
        """The samples from number ``seq`` on, as JSON with one column per engine and pod."""
        shown = [one for one in self._samples if one.seq >= seq]
        engines = _names(one.engines for one in shown)
        pods = _names(one.pods for one in shown)
        rows = [
            {
                **{name: getattr(one, name) for name in _PLAIN},
                "engines": [one.engines.get(name) for name in engines],
                "pods": [one.pods.get(name) for name in pods],
            }
            for one in shown
        ]
        head = {"boot": self.boot, "interval_s": self._interval_s, "most": MOST_SAMPLES}
        return msgspec.json.encode({**head, "engines": engines, "pods": pods, "samples": rows})

    def __len__(self) -> int:
        return len(self._samples)

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """Takes samples while the admin pages are served; a context of ``app.cleanup_ctx``."""
        del app
        task = asyncio.create_task(self._run(), name="samples of the admin page")
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _run(self) -> None:
        while True:
            self.take_sample()
            await asyncio.sleep(self._interval_s)

    def _engines(self) -> dict[str, EngineSample]:
        router = self._router
        loads = router.loads.fresh(LOAD_FOR_S)
        made = {}
        for name in islice(router.engines.names, MOST_NAMES):
            load, inflight = loads.get(name), router.loads.inflight.requests_at(name)[0]
            if load is None:
                made[name] = EngineSample(None, None, None, inflight)
            else:
                made[name] = EngineSample(load.kv_usage, load.running, load.waiting, inflight)
        return made

    def _pulls_failed(self) -> float | None:
        loads, names = self._router.loads, islice(self._router.engines.names, MOST_NAMES)
        counted = [loads.pulls.lately(name) for name in names]
        tried = sum(one.tried for one in counted)
        return sum(one.failed for one in counted) / tried if tried else None

    def _pods(self) -> dict[str, int]:
        caches = self._router.caches
        pods = caches.index.pods
        return {
            name: 0 if (pod := pods.get(name)) is None else pod.num_blocks
            for name in islice(caches.feeds, MOST_NAMES)
        }


_PLAIN = (
    "seq", "at", "requests_per_s", "failed_per_s", "handed_over", "pulls_failed", "ttft_p50_ms",
    "ttft_p95_ms",
)  # fmt: skip


def _names(columns: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in columns for name in names))


def _quantile_ms(ascending: Sequence[float], share: float) -> float | None:
    """The smallest time that is at least as long as ``share`` of all.

    >>> _quantile_ms([0.1, 0.2, 0.3, 0.4], 0.5)
    200.0
    """
    if not ascending:
        return None
    rank = max(1, -(-len(ascending) * share // 1))
    return round(1000 * ascending[int(rank) - 1], 3)
