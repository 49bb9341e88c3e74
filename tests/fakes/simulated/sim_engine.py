"""An engine whose prefix cache is vLLM's own, and whose model is a clock.

::

    HTTP ──► SimEngine ──► SimCache: KVCacheManager, Request, block hasher of vLLM
               │ sleeps          │ take_events
               │ instead of      ▼
               ▼ computing    ZmqEventPublisher of vLLM ──► PUB, ROUTER
             tokens

What a router can see of an engine is real: which blocks are cached and evicted, the events
that say so, their numbers and replay, the page of metrics, what ``usage`` reports as cached.
What it cannot see is made up: a prompt takes as long as it has uncached tokens, one prompt
at a time, every answer one token per step, and tokens are numbers that follow from the prompt.
Importing this module imports vLLM (7 s).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from aiohttp import web
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.v1.request import Request

from pdconn.tools.lab.ports import LOCALHOST, free_ports
from tests.fakes.simulated.sim_cache import CacheShape, SimCache

MODEL = "sim"
VOCABULARY = 50_000
LEASE_S = 30.0


@dataclass(frozen=True)
class Speed:
    """How long computing takes: tokens of prompts, one prompt at a time; and one decode step.

    ``pulled_tokens_per_s``: of prefixes that prefill pulls from another engine.
    """

    prefill_tokens_per_s: float = 20_000.0
    step_s: float = 1 / 50
    pulled_tokens_per_s: float = 1_000_000.0


@dataclass
class Counts:
    """What an engine has done, in requests and tokens of prompts.

    Attributes:
        cached: tokens that its own cache served.
        transferred: tokens that came with a ticket.
        pulled: tokens of prefixes that prefill pulled from another engine.
        computed: tokens of prompts that it computed.
        alone: requests that it answered without a ticket and without lending.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    transferred: int = 0
    pulled: int = 0
    computed: int = 0
    alone: int = 0
    preempted: int = 0


class Leases:
    """Prompts whose blocks prefill engines hold until decode has read them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._held: dict[str, tuple[SimEngine, Request, asyncio.TimerHandle]] = {}

    def grant(self, engine: SimEngine, request: Request) -> str:
        """Hold the blocks of a request, for ``LEASE_S`` at most."""
        name = f"lease-{next(self._numbers)}"
        expiry = asyncio.get_running_loop().call_later(LEASE_S, self.end, name)
        self._held[name] = engine, request, expiry
        return name

    def end(self, name: str) -> None:
        """Decode has read the blocks, or will not."""
        lease = self._held.pop(name, None)
        if lease is not None:
            engine, request, expiry = lease
            expiry.cancel()
            engine.release(request)

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """End all of them."""
        for name in list(self._held):
            self.end(name)


def answer_tokens(prompt: Sequence[int], number: int) -> list[int]:
    """What every engine answers to a prompt: the same, so that traces are."""
    seed = blake2b(repr((len(prompt), prompt[-8:])).encode(), digest_size=8).digest()
    first = int.from_bytes(seed, "big")
    return [(first + 7919 * i * i) % VOCABULARY for i in range(number)]


class SimEngine:
    """One engine on real sockets: HTTP, events and their replay."""

    def __init__(self, shape: CacheShape, leases: Leases, speed: Speed | None = None) -> None:
        self.cache = SimCache(shape, completes_windows=True, keeps_answers=True)
        self.counts = Counts()
        self.leases = leases
        self.speed = speed or Speed()
        self.port, self._events_port, self._replay_port = free_ports(3)
        self._requests = Counter[str]()
        self._computing = asyncio.Lock()
        self._room = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._publisher: ZmqEventPublisher | None = None

    @property
    def url(self) -> str:
        """The engine's name."""
        return f"http://{LOCALHOST}:{self.port}"

    @property
    def word(self) -> str:
        """The engine on the router's command line, with its events."""
        events, replay = (f"tcp://{LOCALHOST}:{p}" for p in (self._events_port, self._replay_port))
        return f"{self.url},events={events},replay={replay}"

    async def start(self) -> None:
        """Listen."""
        self._publisher = ZmqEventPublisher(
            0, f"tcp://*:{self._events_port}", f"tcp://*:{self._replay_port}"
        )
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, LOCALHOST, self.port).start()

    async def stop(self) -> None:
        """Close everything."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.shutdown)

    # What it does

    def release(self, request: Request) -> None:
        """Its blocks may go, and those waiting for room look again."""
        self.cache.finish(request)
        task = asyncio.create_task(self._tell_room())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_room(self) -> None:
        async with self._room:
            self._room.notify_all()

    def _publish(self) -> None:
        batch = self.cache.take_batch(time.time())
        if batch is not None and self._publisher is not None:
            self._publisher.publish(batch)

    async def _admit(self, request: Request, until: int) -> int:
        async with self._room:
            while (found := self.cache.admit(request, until)) is None:
                await self._room.wait()
        return found

    async def _prefill(self, request: Request, until: int = 0) -> int:
        """Until its first token can be sampled; the tokens that the cache served.

        ``until``: so many first tokens come from elsewhere, as far as the cache lacks them.
        """
        if until >= request.num_tokens:
            found = await self._admit(request, until)
            self.counts.transferred += request.num_tokens - found
            self._publish()
            return found
        async with self._computing:
            found = await self._admit(request, until)
            pulled = max(0, until - found)
            self.counts.pulled += pulled
            await asyncio.sleep(pulled / self.speed.pulled_tokens_per_s)
            computed = request.num_computed_tokens - found - pulled
            while True:
                self.counts.computed += computed
                await asyncio.sleep(computed / self.speed.prefill_tokens_per_s)
                self._publish()
                if self.cache.is_computed(request):
                    return found
                before = request.num_computed_tokens
                while not self.cache.step(request):
                    async with self._room:
                        await self._room.wait()
                computed = request.num_computed_tokens - before

    async def _tokens(self, request: Request, answer: Sequence[int]) -> AsyncIterator[int]:
        """The answer, a token each step; without room it begins again, as in vLLM."""
        due_s = time.monotonic()
        for number, token in enumerate(answer):
            while not self.cache.step(request):
                self.counts.preempted += 1
                self.cache.preempt(request)
                await self._prefill(request)
            if number:
                due_s += self.speed.step_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            request.append_output_token_ids(token)
            self._publish()
            yield token

    # HTTP

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        asked = body.get("kv_transfer_params") or {}
        ours = asked.get("pdconn") or {}
        lends = bool(asked.get("do_remote_decode"))
        prompt = _tokens_of(body["prompt"])
        request = self.cache.request(prompt, 1 if lends else body.get("max_tokens", 16))
        lease: str | None = None
        try:
            if "lend" in ours and (refusal := self._refusal(request, ours["lend"])) is not None:
                return web.json_response(refusal)
            ticket = ours.get("from") or (asked if asked.get("do_remote_prefill") else None)
            until = 0 if ticket is None else ticket["tokens"]
            with self._counted("waiting"):
                found = await self._prefill(request, until)
            if ticket is not None:
                self.leases.end(ticket["lease"])
            if "lend" not in ours:
                self._note(request, found, alone=not lends and ticket is None)
            usage = _usage(request, min(max(found, until), request.num_prompt_tokens - 1))
            with self._counted("running"):
                answer = answer_tokens(prompt, request.max_tokens)
                if ticket is not None and not lends:
                    await asyncio.sleep(self.speed.step_s)  # its first token is a step's too
                if body.get("stream"):
                    return await self._stream(http, request, answer, usage)
                tokens = [token async for token in self._tokens(request, answer)]
            page: dict[str, Any] = {"choices": [{"index": 0, "text": _text(tokens)}], **usage}
            if lends:
                lease = self.leases.grant(self, request)
                covered = ours.get("lend", len(prompt))
                given = {"do_remote_prefill": True, "lease": lease, "tokens": covered}
                page["kv_transfer_params"] = given
            return web.json_response(page)
        finally:
            if lease is None:
                self.release(request)
            self._publish()

    def _refusal(self, request: Request, num_tokens: int) -> dict[str, Any] | None:
        """The answer where the cache holds less than a prefix that is asked for."""
        held = self.cache.hit(request)
        if held >= num_tokens:
            return None
        return {"choices": [], "kv_transfer_params": {"pdconn": {"lend": num_tokens, "held": held}}}

    @contextmanager
    def _counted(self, state: str) -> Iterator[None]:
        self._requests[state] += 1
        try:
            yield
        finally:
            self._requests[state] -= 1

    def _note(self, request: Request, found: int, alone: bool) -> None:
        self.counts.requests += 1
        self.counts.prompt_tokens += request.num_prompt_tokens
        self.counts.cached += found
        self.counts.alone += alone

    async def _stream(
        self, http: web.Request, request: Request, answer: Sequence[int], usage: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        async for token in self._tokens(request, answer):
            chunk = {"choices": [{"index": 0, "text": _text([token])}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        last = json.dumps({"choices": [], **usage}).encode()
        await response.write(b"data: " + last + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await http.json()
        text = body.get("prompt")
        if text is None:
            text = "".join(message["content"] for message in body["messages"])
        tokens = _tokens_of(text)
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    async def _health(self, http: web.Request) -> web.Response:
        del http
        return web.Response()

    async def _models(self, http: web.Request) -> web.Response:
        del http
        return web.json_response({"data": [{"id": MODEL, "root": MODEL, "parent": None}]})

    async def _metrics(self, http: web.Request) -> web.Response:
        del http
        values = {
            "vllm:num_requests_running": self._requests["running"],
            "vllm:num_requests_waiting": self._requests["waiting"],
            "vllm:kv_cache_usage_perc": max(0.0, self.cache.manager.usage),
            "vllm:prefix_cache_queries_total": self.counts.prompt_tokens,
            "vllm:prefix_cache_hits_total": self.counts.cached,
        }
        lines = (f'{name}{{engine="0"}} {value}\n' for name, value in values.items())
        return web.Response(text="".join(lines))


@asynccontextmanager
async def sim_engines(
    number: int, shape: CacheShape, speed: Speed | None = None
) -> AsyncIterator[list[SimEngine]]:
    """Engines that lend to each other, all in this event loop."""
    leases = Leases()
    engines = [SimEngine(shape, leases, speed) for _ in range(number)]
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        leases.close()
        for engine in engines:
            await engine.stop()


def _tokens_of(prompt: str | list[int]) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


def _text(tokens: Sequence[int]) -> str:
    return "".join(f" {token}" for token in tokens)


def _usage(request: Request, cached: int) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {
        "usage": {
            "prompt_tokens": request.num_prompt_tokens,
            "completion_tokens": request.max_tokens,
            "prompt_tokens_details": details,
        }
    }
