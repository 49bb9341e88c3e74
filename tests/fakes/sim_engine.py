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

``SimCache`` has no socket and no clock; ``tests/fakes/test_sim_engine.py`` asks it what it
would serve and compares that with what the router believes.  Importing this module imports
vLLM (7 s).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from aiohttp import web
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from pdconn.lab.ports import LOCALHOST, free_ports
from pdconn.router.prefix.hashing import HashScheme

MODEL = "sim"
VOCABULARY = 50_000
LEASE_S = 30.0
HASHING = "sha256_cbor"
MAX_MODEL_LEN = 1 << 17


@dataclass(frozen=True)
class GroupShape:
    """One KV cache group: tokens of its blocks, and its window (None: full attention or states).

    ``is_chunk``: the window is a chunk of local attention.
    """

    block_tokens: int
    window: int | None = None
    eagle: bool = False
    is_state: bool = False
    is_chunk: bool = False


@dataclass(frozen=True)
class CacheShape:
    """An engine's cache: its groups, its blocks, and the settings that change what is hit.

    Attributes:
        num_blocks: of the pool that all groups share.
        hash_block_tokens: vLLM's ``hash_block_size``; None for its default, the groups' GCD.
        retention: vLLM's ``prefix_cache_retention_interval``.
        chunk_tokens: of a prompt that are computed in one step.
    """

    groups: tuple[GroupShape, ...]
    num_blocks: int
    hash_block_tokens: int | None = None
    retention: int | None = None
    chunk_tokens: int = 8192

    @property
    def scheme(self) -> HashScheme:
        """How the engine hashes."""
        gcd = math.gcd(*(group.block_tokens for group in self.groups))
        return HashScheme(HASHING, self.hash_block_tokens or gcd)

    @property
    def eagle_groups(self) -> frozenset[int]:
        """Groups that a drafter reads."""
        return frozenset(i for i, group in enumerate(self.groups) if group.eagle)

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a recurrent state: at ends of blocks, in ``align`` mode."""
        return any(group.is_state for group in self.groups)

    def config(self) -> KVCacheConfig:
        """vLLM's own description of it."""
        specs = [_spec(group) for group in self.groups]
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layers.{i}"], spec, is_eagle_group=group.eagle)
                for i, (spec, group) in enumerate(zip(specs, self.groups, strict=True))
            ],
            prefix_cache_retention_interval=self.retention,
        )


def _spec(group: GroupShape) -> KVCacheSpec:
    if group.is_state:
        return MambaSpec(
            block_size=group.block_tokens,
            shapes=((1,),),
            dtypes=(torch.uint8,),
            mamba_cache_mode="align",
        )
    common = {
        "block_size": group.block_tokens,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.uint8,
    }
    if group.window is None:
        return FullAttentionSpec(**common)
    if group.is_chunk:
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.window)
    return SlidingWindowSpec(**common, sliding_window=group.window)


def _splitting(shape: CacheShape, manager: KVCacheManager) -> Any:
    """As much of vLLM's scheduler as it splits prompts by."""
    block_tokens = math.lcm(*(group.block_tokens for group in shape.groups))
    finest = shape.scheme.block_tokens
    is_fine = finest < block_tokens and manager.coordinator.enable_partial_hash_hits
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_tokens),
        block_size=block_tokens,
        hash_block_size=finest,
        max_num_scheduled_tokens=shape.chunk_tokens,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        use_eagle_block_drop=bool(shape.eagle_groups),
        num_hash_lookahead_tokens=0,  # of 0.33
        mamba_partial_cache_hit=is_fine,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_prefill_checkpoint_alignment=None,
        mamba_shared_prefix_checkpoint=False,
    )


@functools.cache
def _hash_function():  # type: ignore[no-untyped-def]
    """vLLM's hash function, with vLLM's root set to what it gives the first block."""
    function = get_hash_fn_by_name(HASHING)
    init_none_hash(function)
    return function


class SimCache:
    """A prefix cache, used the way vLLM's scheduler uses it.

    >>> cache = SimCache(shape)                                      # doctest: +SKIP
    >>> request = cache.request([1] * 40, max_tokens=8)
    >>> cache.admit(request)                                         # tokens found
    0
    >>> cache.compute(request); cache.sample(request); cache.finish(request)
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._numbers = itertools.count()
        self._hasher = get_request_block_hasher(shape.scheme.block_tokens, _hash_function())
        self._encoder = msgspec.msgpack.Encoder()
        self.manager = KVCacheManager(
            shape.config(),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=math.lcm(*(group.block_tokens for group in shape.groups)),
            hash_block_size=shape.scheme.block_tokens,
            max_in_flight_tokens=shape.chunk_tokens,
            enable_caching=True,
            use_eagle=bool(shape.eagle_groups),
            enable_kv_cache_events=True,
        )
        self._splitting = _splitting(shape, self.manager) if shape.has_states else None

    def request(self, tokens: Sequence[int], max_tokens: int = 1, **extra: Any) -> Request:
        """A request as it reaches the scheduler, with its hashes."""
        return Request(
            f"sim-{next(self._numbers)}",
            list(tokens),
            SamplingParams(max_tokens=max_tokens, extra_args=extra or None),
            None,
            block_hasher=self._hasher,
        )

    def hit(self, request: Request) -> int:
        """Tokens that the cache would serve now.  Changes nothing."""
        found: int = self.manager.get_computed_blocks(request)[1]
        return found

    def admit(self, request: Request, *, transferred: bool = False) -> int | None:
        """Take what is cached and the first blocks of the rest; the tokens found.

        ``transferred``: the rest comes from elsewhere and need not be computed.  None where
        there is no room now.
        """
        found: int
        self.begin_step()
        look = self.manager.get_computed_blocks
        if transferred and self.shape.has_states:
            # A connector completes what only full attention has.
            look = self.manager.get_computed_blocks_for_connector
        blocks, found, request.shared_prefix_boundary, *_ = look(request)
        # A state may not be behind the last token, which is computed again.
        last = request.num_tokens - self.shape.has_states
        transferred = transferred and last > found
        beyond = last - found if transferred else 0
        fresh = 0 if transferred else self._chunk(request, found)
        room = self.manager.allocate_slots(
            request,
            fresh,
            num_new_computed_tokens=found,
            new_computed_blocks=blocks,
            num_external_computed_tokens=beyond,
            delay_cache_blocks=transferred,
            full_sequence_must_fit=True,
        )
        if room is None:
            return None
        request.num_computed_tokens = found + beyond + fresh
        if transferred:
            self.manager.cache_blocks(request, request.num_computed_tokens)
            # The last one is computed again, for the first token.
            request.num_computed_tokens = min(last, request.num_tokens - 1)
        return found

    def begin_step(self) -> None:
        """The copies of the step before are done."""
        self.manager.new_step_starts()
        self.end_copies()

    def end_copies(self) -> None:
        """Blocks of a state that were copied, and their copies, are no longer held for it."""
        _, held = self.manager.take_kv_cache_block_copies()
        self.manager.block_pool.free_blocks(held)
        self.manager.take_boundary_state_offloads()

    def _chunk(self, request: Request, found: int = 0) -> int:
        """Tokens of the next step; states are kept where a step ends."""
        done = request.num_computed_tokens + found
        fresh = min(self.shape.chunk_tokens, request.num_tokens - done)
        if self._splitting is None or not fresh:
            return fresh
        split: int = Scheduler._mamba_block_aligned_split(self._splitting, request, fresh, found)
        return split

    def step(self, request: Request) -> bool:
        """Blocks for the next tokens; False where there is no room."""
        self.begin_step()
        fresh = self._chunk(request)
        if fresh and self.manager.allocate_slots(request, fresh) is None:
            return False
        request.num_computed_tokens += fresh
        return True

    def is_computed(self, request: Request) -> bool:
        """Whether the next token can be sampled."""
        return bool(request.num_computed_tokens >= request.num_tokens)

    def finish(self, request: Request) -> None:
        """Its blocks may go, last ones first."""
        self.manager.free(request)

    def preempt(self, request: Request) -> None:
        """Its blocks are needed elsewhere; it begins again."""
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def clear(self) -> bool:
        """Forget everything; False while a request holds blocks."""
        self.end_copies()
        return bool(self.manager.reset_prefix_cache())

    def take_batch(self, now_s: float) -> KVEventBatch | None:
        """What has changed since the last time."""
        events = self.manager.take_events()
        return KVEventBatch(ts=now_s, events=events) if events else None

    def payloads(self, now_s: float = 0.0) -> Iterator[bytes]:
        """The same as a publisher writes it: one message or none."""
        batch = self.take_batch(now_s)
        if batch is not None:
            yield self._encoder.encode(batch)


@dataclass(frozen=True)
class Speed:
    """How long computing takes: tokens of prompts, one prompt at a time; and one decode step."""

    prefill_tokens_per_s: float = 20_000.0
    step_s: float = 1 / 50


@dataclass
class Counts:
    """What an engine has done, in requests and tokens of prompts.

    Attributes:
        cached: tokens that its own cache served.
        transferred: tokens that came with a ticket.
        computed: tokens of prompts that it computed.
        alone: requests that it answered without a ticket and without lending.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    transferred: int = 0
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
        self.cache = SimCache(shape)
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

    async def _admit(self, request: Request, transferred: bool) -> int:
        async with self._room:
            while (found := self.cache.admit(request, transferred=transferred)) is None:
                await self._room.wait()
        return found

    async def _prefill(self, request: Request, transferred: bool) -> int:
        """Until its first token can be sampled; the tokens that the cache served."""
        if transferred:
            found = await self._admit(request, True)
            self.counts.transferred += request.num_tokens - found
            self._publish()
            return found
        async with self._computing:
            found = await self._admit(request, False)
            computed = request.num_computed_tokens - found
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
                await self._prefill(request, False)
            if number:
                due_s += self.speed.step_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            request.append_output_token_ids(token)
            self._publish()
            yield token

    # HTTP

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        prompt = _tokens_of(body["prompt"])
        asked = body.get("kv_transfer_params") or {}
        lends, transferred = asked.get("do_remote_decode"), bool(asked.get("do_remote_prefill"))
        request = self.cache.request(prompt, 1 if lends else body.get("max_tokens", 16))
        lease: str | None = None
        try:
            with self._counted("waiting"):
                found = await self._prefill(request, transferred)
            self._note(request, found, alone=not lends and not transferred)
            if transferred:
                self.leases.end(asked["lease"])
            answer = answer_tokens(prompt, request.max_tokens)
            usage = _usage(request, request.num_prompt_tokens - 1 if transferred else found)
            with self._counted("running"):
                if transferred:
                    await asyncio.sleep(self.speed.step_s)  # its first token is a step's too
                if body.get("stream"):
                    return await self._stream(http, request, answer, usage)
                tokens = [token async for token in self._tokens(request, answer)]
            page: dict[str, Any] = {"choices": [{"index": 0, "text": _text(tokens)}], **usage}
            if lends:
                lease = self.leases.grant(self, request)
                page["kv_transfer_params"] = {"do_remote_prefill": True, "lease": lease}
            return web.json_response(page)
        finally:
            if lease is None:
                self.release(request)
            self._publish()

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
