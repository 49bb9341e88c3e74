"""How busy the engines are, by their own Prometheus pages.

One page covers every data-parallel rank behind a URL.  Queues and leases are
added up over the ranks; of cache usage the fullest rank counts, as a request may
meet that one.  Every engine is asked for itself: one that is slow has old
numbers, and the others do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from multidict import CIMultiDict

from pdconn.router.fleet.client import ConnectFailed, ConnectionLost, EngineClient
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.routing.policy import Role

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 2.0

#: vLLM's page is some hundred KiB; what is longer than this is none.
MAX_PAGE_NBYTES = 4 << 20

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"  # of 1, whatever its name says
_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"
_LENT = "pdconn:leases_granted_total"
_LEASES_ENDED = (
    "pdconn:leases_read_total",
    "pdconn:leases_aborted_total",
    "vllm:nixl_num_kv_expired_reqs_total",
)

#: The largest value of each that makes sense; above it floats skip whole numbers.
_LIMITS = dict.fromkeys(
    (_RUNNING, _WAITING, _QUERIES, _HITS, _LENT, *_LEASES_ENDED), float(1 << 53)
) | {_KV_USAGE: 1.0}
_NAMES = tuple(_LIMITS)


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's page; a field is None where the page does not have it.

    Attributes:
        running, waiting: requests.
        kv_usage: of the fullest rank's cache, 0 to 1.
        lent_leases: prompts whose blocks are lent to decode at this moment.
        prefix_queries, prefix_hits: tokens looked up and found, since its start.
        num_ignored: lines that named one of these and made no sense.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    lent_leases: int | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    num_ignored: int = 0


def parse_metrics(text: str) -> Load:
    """What a Prometheus page says of its engine's load.  Pure, and takes any text.

    Only the first ``MAX_PAGE_NBYTES`` letters are read, up to a whole line.

    >>> parse_metrics('vllm:num_requests_running{engine="0"} 3.0').running
    3
    """
    if len(text) > MAX_PAGE_NBYTES:
        text = text[: text.rfind("\n", 0, MAX_PAGE_NBYTES) + 1]
    values: defaultdict[str, list[float]] = defaultdict(list)
    num_ignored = 0
    for line in text.split("\n"):
        if not line.startswith(_NAMES):
            continue
        name, rest = _split(line)
        if name not in _LIMITS:
            continue  # a longer name: vllm:num_requests_waiting_by_reason
        value = _value(rest, _LIMITS[name])
        if value is None:
            num_ignored += 1
        else:
            values[name].append(value)
    return Load(
        running=_total(values, _RUNNING),
        waiting=_total(values, _WAITING),
        kv_usage=max(values[_KV_USAGE], default=None),
        lent_leases=_lent(values),
        prefix_queries=_total(values, _QUERIES),
        prefix_hits=_total(values, _HITS),
        num_ignored=num_ignored,
    )


def _split(line: str) -> tuple[str, str]:
    """A sample's name, and what follows its labels; in these a brace may stand quoted."""
    name, brace, rest = line.partition("{")
    if brace:
        return name.rstrip(), rest.rpartition("}")[2]
    words = line.split(maxsplit=1)
    return words[0], "".join(words[1:])


def _value(rest: str, limit: float) -> float | None:
    """The number of ``VALUE [TIMESTAMP]``, or None where it makes no sense."""
    words = rest.split(maxsplit=2)
    if len(words) not in (1, 2):
        return None
    try:
        value = float(words[0])
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value <= limit else None


def _total(values: defaultdict[str, list[float]], name: str) -> int | None:
    return int(sum(values[name])) if values[name] else None


def _lent(values: defaultdict[str, list[float]]) -> int | None:
    """Granted and not ended; counters are read one after another, so never below 0."""
    granted = _total(values, _LENT)
    if granted is None:
        return None
    return max(0, granted - sum(_total(values, name) or 0 for name in _LEASES_ENDED))


@dataclass(frozen=True, slots=True)
class LoadReading:
    """A load and when it came, by the poller's clock."""

    load: Load
    at_s: float


class LoadPoller:
    """Keeps the last load of each engine that gets requests.

    ``latest`` holds no engine that is gone; one that stopped answering stays in
    it, with its age (``fresh`` leaves it out).

    >>> async with LoadPoller(engines, upstream) as loads:  # doctest: +SKIP
    ...     loads.fresh(max_age_s=5.0)["http://10.0.0.1:8000"].waiting
    """

    def __init__(
        self,
        engines: EngineRegistry,
        upstream: EngineClient,
        *,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.latest: dict[str, LoadReading] = {}
        self._engines = engines
        self._upstream = upstream
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._silent: set[str] = set()
        self._asks: dict[str, asyncio.Task[None]] = {}
        self._ticker: asyncio.Task[None] | None = None

    def fresh(self, max_age_s: float) -> dict[str, Load]:
        """The loads that are not older than that."""
        since_s = self._clock() - max_age_s
        return {name: seen.load for name, seen in self.latest.items() if seen.at_s >= since_s}

    def age_s(self, engine: str) -> float | None:
        """Seconds since an engine's load came, or None where none did."""
        seen = self.latest.get(engine)
        return None if seen is None else self._clock() - seen.at_s

    def fleet_changed(self) -> None:
        """Forget engines that are gone."""
        for name in [name for name in self.latest if name not in self._engines]:
            del self.latest[name]
        self._silent = {name for name in self._silent if name in self._engines}

    async def poll_now(self) -> None:
        """Ask every engine once; returns when the last has answered, or had its time."""
        self._ask_all()
        if self._asks:
            await asyncio.wait(list(self._asks.values()))

    async def _run(self) -> None:
        while True:
            self._ask_all()
            await asyncio.sleep(self._interval_s)

    def _ask_all(self) -> None:
        self.fleet_changed()
        for engine in dict.fromkeys(name for role in Role for name in self._engines.live(role)):
            if engine not in self._asks:  # else it is slow, and asked already
                task = asyncio.create_task(self._ask(engine), name=f"load of {engine}")
                self._asks[engine] = task
                task.add_done_callback(partial(self._asked, engine))

    def _asked(self, engine: str, task: asyncio.Task[None]) -> None:
        del self._asks[engine]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("reading a load failed engine=%s", engine, exc_info=error)

    async def _ask(self, engine: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                page = await self._page(engine)
        except TimeoutError:
            return self._note_silent(engine, f"silent for {self._timeout_s:g} s")
        except (ConnectFailed, ConnectionLost) as error:
            return self._note_silent(engine, str(error))
        if engine not in self._engines:
            return None  # it went while it answered
        self.latest[engine] = LoadReading(parse_metrics(page), self._clock())
        if engine in self._silent:
            self._silent.discard(engine)
            log.info("load known again engine=%s", engine)
        return None

    async def _page(self, engine: str) -> str:
        headers = CIMultiDict({"Accept-Encoding": "identity"})
        async with await self._upstream.get(engine, "/metrics", headers) as answer:
            if answer.status != 200:
                raise ConnectionLost(f"/metrics says {answer.status}")
            pieces: list[bytes] = []
            nbytes = 0
            while piece := await answer.next():
                nbytes += len(piece)
                if nbytes > MAX_PAGE_NBYTES:
                    raise ConnectionLost(f"/metrics is longer than {MAX_PAGE_NBYTES} bytes")
                pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    def _note_silent(self, engine: str, why: str) -> None:
        """Said once: requests find out for themselves whether the engine is down."""
        if engine in self._engines and engine not in self._silent:
            self._silent.add(engine)
            log.warning("load unknown engine=%s why=%r", engine, why)

    async def close(self) -> None:
        """Stop asking."""
        ending = [*self._asks.values(), *([] if self._ticker is None else [self._ticker])]
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
