"""Warm-up: a short prompt from every prefill to every decode engine, before client requests.

An engine's first request initializes much that later ones reuse, and so does the first hand-over
between two engines.  With ``--warm-up`` the router performs both before it listens, and again when
an engine joins or comes back::

    /v1/models ──► name of the model
    prefill: the prompt, one token ──► ticket ──► decode: the same prompt, two tokens
    the router itself: one request along the path of client requests, not counted

A pair is warm once decode's own counters show a pull.  An answer alone proves nothing: an engine
whose pull fails computes the prompt itself.

Hand-overs run one at a time, each engine once before any engine twice.  A pair that fails is
retried at growing intervals; a pair that an engine rejects (4xx, no ticket, or no counters) is
skipped.  Clients wait for a warm-up only before the router listens, for a bounded time; and a
failed warm-up marks no engine as down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import (
    Authorization,
    ConnectFailed,
    ConnectionLost,
    EngineClient,
)
from pdconn.router.fleet.engine_page import parse_metrics
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Role
from pdconn.router.fleet.pull_counts import PullCounts
from pdconn.router.openai.bodies import base_models, find_ticket, lend_params
from pdconn.router.openai.requests import TICKET_FIELD
from pdconn.router.router_errors import Refusal

log = logging.getLogger(__name__)

COUNTED_S = 2.0
"""Wait for decode's counters: vLLM publishes them with its steps, and the last step has ended."""
LOOK_EVERY_S = 0.05

PAIR_S = 30.0
"""Time-out of one hand-over; a cold engine may compile for longer, and is retried."""

_WORDS = 64
_PATH = "/v1/completions"
_HEADERS = {"Content-Type": "application/json"}


Send = Callable[[bytes, CIMultiDict[str]], Awaitable[None]]


class Pair(NamedTuple):
    """A prefill and a decode engine."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class WarmUpPauses:
    """Seconds between two rounds with failures: ``first_s``, then doubled each time."""

    first_s: float = 1.0
    longest_s: float = 30.0


class TakesNoPart(Exception):
    """An engine can never be warmed; the message says why."""


class NotYet(Exception):
    """An engine does not answer yet."""


class NotPulled(NotYet):
    """Decode answered, but its counters show no pull."""


class FleetWarmUp:
    """Keeps every pair of the fleet warm.

    Args:
        engines: the engines to warm.
        client: HTTP client for them.
        limit_s: the longest wait of :meth:`wait_until_warm`; None disables warm-up.
        send: passes a body and headers through the router as if a client had sent them.
        authorization: the ``Authorization`` of the router's own requests, if any.
        pauses: pauses between rounds with failures.
        pair_s: time-out of one hand-over.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        client: EngineClient,
        limit_s: float | None,
        send: Send,
        authorization: Authorization = lambda: None,
        *,
        pauses: WarmUpPauses = WarmUpPauses(),
        pair_s: float = PAIR_S,
    ) -> None:
        self._engines = engines
        self._client = client
        self._limit_s = limit_s
        self._send = send
        self._authorization = authorization
        self._pauses = pauses
        self._pair_s = pair_s
        self._done: dict[Pair, bool] = {}
        self._named: set[Pair] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = limit_s is None

    @property
    def num_warm(self) -> int:
        """Pairs whose decode has pulled."""
        return sum(self._done.values())

    def fleet_changed(self) -> None:
        """Warm engines that joined, forget engines that left."""
        pairs = set(self._pairs())
        self._done = {pair: warm for pair, warm in self._done.items() if pair in pairs}
        self._named &= pairs
        self._begin()

    def engine_up(self, engine: str) -> None:
        """Warm an engine that answers again, as it may have restarted."""
        self._done = {pair: warm for pair, warm in self._done.items() if engine not in pair}
        self._begin()

    async def wait_until_warm(self) -> None:
        """Wait until every pair is warm, at most ``limit_s``; warming goes on in the background."""
        self._begin()
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limit_s):
                await asyncio.wait([self._task])
                await self._send_one()
        log.info("pdconn: warmed up pairs=%d of=%d", self.num_warm, len(self._pairs()))

    async def close(self) -> None:
        """Stop."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        if not self._closed and (self._task is None or self._task.done()) and self._cold():
            self._task = asyncio.create_task(self._run(), name="warm up the fleet")

    def _pairs(self) -> list[Pair]:
        """All pairs, ordered so that each engine comes early."""
        prefill, decode = (self._engines.live(role) for role in (Role.PREFILL, Role.DECODE))
        count = max(len(prefill), len(decode))
        places = [(at, (at + shift) % count) for shift in range(count) for at in range(count)]
        return [
            Pair(prefill[one], decode[other])
            for one, other in places
            if one < len(prefill) and other < len(decode) and prefill[one] != decode[other]
        ]

    def _cold(self) -> list[Pair]:
        return [pair for pair in self._pairs() if pair not in self._done]

    async def _run(self) -> None:
        pause_s = self._pauses.first_s
        while cold := self._cold():
            failed = False
            for pair in cold:
                try:
                    async with asyncio.timeout(self._pair_s):
                        await self._hand_over(pair)
                except TakesNoPart as error:
                    self._done[pair] = False
                    log.info("pdconn: not warmed up prefill=%s decode=%s why=%r", *pair, str(error))
                except NotPulled as error:
                    failed = True
                    if pair not in self._named:
                        self._named.add(pair)
                        log.warning(
                            "pdconn: not warm prefill=%s decode=%s why=%r", *pair, str(error)
                        )
                except (NotYet, ConnectFailed, ConnectionLost, TimeoutError) as error:
                    failed = True
                    log.debug("pdconn: warm-up failed prefill=%s decode=%s: %s", *pair, error)
                else:
                    self._done[pair] = True
            if failed:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._pauses.longest_s)

    async def _send_one(self) -> None:
        """Warm the router's own code paths, once."""
        warm = next((pair for pair, is_warm in self._done.items() if is_warm), None)
        if warm is None:
            return
        try:
            fields, _ = _fields(await self._model(warm.prefill))
            raw = msgspec.json.encode({**fields, "max_tokens": 2, "stream": True})
            await self._send(raw, self._headers(**_HEADERS))
        except (TakesNoPart, NotYet, Refusal, ConnectFailed, ConnectionLost) as error:
            log.debug("pdconn: warm-up of the router failed: %s", error)

    async def _hand_over(self, pair: Pair) -> None:
        fields, salt = _fields(await self._model(pair.prefill))
        before = await self._pulls(pair.decode)
        lend = {**fields, "max_tokens": 1, TICKET_FIELD: lend_params()}
        ticket = find_ticket(await self._post(pair.prefill, lend, salt))
        if ticket is None:
            raise TakesNoPart(f"{pair.prefill} returns no ticket")
        try:
            await self._post(pair.decode, {**fields, "max_tokens": 2, TICKET_FIELD: ticket}, salt)
        except NotYet:
            # With "kv_load_failure_policy": "fail" it is the pull that has failed.
            if not (grown := (await self._pulls(pair.decode)).since(before)).failed:
                raise
        else:
            grown = await self._counted(pair.decode, before, fields, salt)
        if grown.failed:
            why = grown.why or "its log says why"
            raise NotPulled(f"{grown.failed} of {grown.tried} pulls failed ({why}); {grown.remedy}")
        if not grown.received:
            raise NotPulled("it answered and counts no pull: it computed the prompt itself")

    async def _counted(
        self, decode: str, before: PullCounts, fields: dict[str, object], salt: str
    ) -> PullCounts:
        """Decode's counters since ``before``; one more step publishes those of the last one."""
        until_s = time.monotonic() + COUNTED_S
        asked = False
        while not (grown := (await self._pulls(decode)).since(before)).tried:
            if time.monotonic() > until_s:
                break
            if not asked:
                asked = True
                await self._post(decode, {**fields, "prompt": salt, "max_tokens": 1}, salt)
            await asyncio.sleep(LOOK_EVERY_S)
        return grown

    async def _pulls(self, engine: str) -> PullCounts:
        headers = CIMultiDict({"Accept-Encoding": "identity"})
        async with await self._client.get_page(engine, "/metrics", headers) as answer:
            page = await answer.read_rest()
            _check(engine, "/metrics", answer.status)
        counts = parse_metrics(page.decode("utf-8", "replace")).pulls
        if counts is None:
            raise TakesNoPart(f"{engine}: /metrics counts no pulls, so nothing shows that it pulls")
        return counts

    async def _model(self, engine: str) -> str:
        async with await self._client.get_page(engine, "/v1/models", self._headers()) as answer:
            raw = await answer.read_rest()
            _check(engine, "/v1/models", answer.status)
        try:
            names = base_models(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TakesNoPart(f"{engine}: /v1/models: {error}") from error
        if not names:
            raise TakesNoPart(f"{engine}: /v1/models names no model")
        return names[0]

    async def _post(self, engine: str, fields: dict[str, object], salt: str) -> bytes:
        headers = self._headers(**_HEADERS, **{"X-Request-Id": f"pdconn-warm-up-{salt}"})
        body = msgspec.json.encode(fields)
        async with await self._client.post_body(engine, _PATH, body, headers) as answer:
            raw = await answer.read_rest()
            _check(engine, _PATH, answer.status)
            return raw

    def _headers(self, **fields: str) -> CIMultiDict[str]:
        authorization = self._authorization()
        return CIMultiDict(fields | ({"Authorization": authorization} if authorization else {}))


def _fields(model: str) -> tuple[dict[str, object], str]:
    """A request and its salt: a unique prompt, as a cached one would not be handed over."""
    salt = secrets.token_hex(8)
    prompt = " ".join([salt, *(f"w{number}" for number in range(_WORDS))])
    return {"model": model, "prompt": prompt, "temperature": 0}, salt


def _check(engine: str, path: str, status: int) -> None:
    if status == 200:
        return
    what = f"{engine}: {path} answered {status}"
    raise TakesNoPart(what) if 400 <= status < 500 and status not in (408, 429) else NotYet(what)


__all__ = ["FleetWarmUp", "Pair", "WarmUpPauses"]
