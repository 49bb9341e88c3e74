"""An engine in virtual time: vLLM's own scheduler and cache, and what our connector keeps.

::

    ask ──► Scheduler ── hooks ──► PdconnConnector: Keeping, Promises, BlockNeeds
              │ schedule(), then the step's seconds, then its tokens
              └── KV events ──► whoever listens (the router's index)

A step takes a fixed time and that of the prompt tokens that it computes.  What is pulled takes its
bytes' time, in which the lender's blocks stay pinned; no byte moves.  Attention is full, or full
in one KV cache group beside others of sliding windows, all of one number of layers.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdconn.router.fleet.engine_page import Load
from pdconn.router.prefix.groups import GroupSpec
from pdconn.vllm.patches.pool.pinned_blocks import NumberedPins, block_ids_of
from pdconn.vllm.values import KeepShares
from tests.fakes.simulated.sim_cache import CacheShape, GroupShape
from tests.simulation.world import World
from tests.vllm.keeps.conversing import counted
from tests.vllm.patches.hybrid_engines import started
from tests.vllm.patches.vllm_scheduler import KVConnectorOutput, Request

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

HASHING = "sha256_cbor"
IDLE_S = 0.01
"""Between two steps of an engine whose requests all wait."""


@dataclass(frozen=True)
class Speed:
    """Of engines.

    Attributes:
        prefill_per_s: tokens of prompts that are computed in a second, as of ``pdconn plan``.
        pulled_per_s: tokens that are pulled in a second: the link's bytes, over those of a token.
        step_s: of a step, beside its prompt tokens.
    """

    prefill_per_s: float = 25_000.0
    pulled_per_s: float = 500_000.0
    step_s: float = 0.02


@dataclass(frozen=True)
class Windows:
    """Groups of sliding windows beside one of full attention.

    Attributes:
        groups: their number; 0 for full attention alone.
        tokens: of a window.
    """

    groups: int = 0
    tokens: int = 1024

    def spec(self, block_tokens: int) -> GroupSpec:
        """One of them, as the router knows it."""
        return GroupSpec("sliding_window", self.tokens, block_tokens)


@dataclass(frozen=True)
class CacheSize:
    """Of an engine's cache, and how much of it promises may pin.

    Attributes:
        num_blocks: blocks of all layers.  Where there are groups of windows, a block of the pool
            is of the layers of one group, and there are as many more of them.
    """

    block_tokens: int
    num_blocks: int
    shares: KeepShares = field(default_factory=KeepShares)
    chunk_tokens: int = 8192
    longest: int = 1 << 15
    windows: Windows = Windows()

    @property
    def shape(self) -> CacheShape:
        """Its groups, and the blocks of the pool that they share."""
        window = GroupShape(self.block_tokens, self.windows.tokens)
        groups = (GroupShape(self.block_tokens), *(window,) * self.windows.groups)
        return CacheShape(groups, len(groups) * self.num_blocks, retention=0)

    @property
    def tokens(self) -> int:
        """Of all layers, that fit into it."""
        return self.block_tokens * self.num_blocks

    def held_tokens(self, num_tokens: int) -> float:
        """Tokens of all layers that take the bytes of a prompt: of windows only the last blocks."""
        whole = -(-num_tokens // self.block_tokens)
        last = min(whole, self.windows.spec(self.block_tokens).tail_blocks)
        held = whole + self.windows.groups * last
        return self.block_tokens * held / (1 + self.windows.groups)


@dataclass
class Answer:
    """What an engine says of a request.

    Attributes:
        cached: tokens of its prompt that the engine's own cache had.
        tokens: of the answer.
        told: under ``pdconn`` of its parameters.
    """

    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Asked:
    request: Any
    on_first: Callable[[Answer], None]
    on_end: Callable[[Answer], None]
    pulled: bool
    missing: int = 0
    answer: Answer = field(default_factory=Answer)


class SessionEngine:
    """One engine.

    Args:
        world: time.
        name: its URL in the router.
        size: of its cache.
        speed: of its steps.
        is_prefill: its first tokens are handed over, and blocks stay pinned for the pull.
        publish: gets each batch of KV events.
    """

    def __init__(
        self,
        world: World,
        name: str,
        size: CacheSize,
        speed: Speed,
        *,
        is_prefill: bool,
        publish: Callable[[Any], None],
    ) -> None:
        self.name, self.size, self._world, self._speed = name, size, world, speed
        self._is_prefill = is_prefill
        self._core = started(size.shape, longest=size.longest, is_async=False, is_watched=True)
        self.scheduler = self._core.scheduler
        self.scheduler.max_num_scheduled_tokens = size.chunk_tokens
        self.scheduler.kv_event_publisher.publish = publish
        self._pool.metrics_collector = None
        self.keeping: Any = self._core.connector._scheduler.parts.keeping
        self.keeping._clock = lambda: world.now
        self.keeping._shares = size.shares
        self.keeping.bind_gpu_block_pool(self._pool)
        self.counts = counted(self.keeping)
        hit = self._core.connector.get_num_new_matched_tokens

        def matched(request: Any, num_local: int) -> tuple[int | None, bool]:
            answer = hit(request, num_local)
            asked = self._asked.get(request.request_id)
            if asked is None:
                return answer  # type: ignore[no-any-return]
            asked.answer.cached = num_local
            if not asked.pulled:
                return answer  # type: ignore[no-any-return]
            asked.missing = request.num_tokens - num_local
            return asked.missing, True

        self._core.connector.get_num_new_matched_tokens = matched
        self._lent = NumberedPins()
        self._lent.pool = self._pool
        self._hasher = get_request_block_hasher(size.block_tokens, get_hash_fn_by_name(HASHING))
        self._asked: dict[str, _Asked] = {}
        self._received: set[str] = set()
        self._pulling: set[str] = set()
        self._numbers = itertools.count()
        self._is_stepping = False

    @property
    def _pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def load(self) -> Load:
        """What its page of metrics says; kept blocks count as free."""
        pool = self._pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() - self.keeping.num_blocks
        running, waiting = len(self.scheduler.running), len(self._asked)
        usage = max(0.0, used / pool.num_gpu_blocks)
        kept = self.keeping.num_blocks / self.size.shares.limits_of(pool.num_gpu_blocks).size
        return Load(
            running=running,
            waiting=max(0, waiting - running),
            kv_usage=usage,
            kept_share=kept,
        )

    def ask(
        self,
        tokens: Sequence[int],
        num_answer: int,
        params: dict[str, Any] | None,
        on_end: Callable[[Answer], None],
        *,
        on_first: Callable[[Answer], None] = lambda answer: None,
        pulled: bool = False,
    ) -> None:
        """A request; ``pulled``: what the cache lacks of its prompt comes from a lender."""
        name = f"{self.name}/{next(self._numbers)}"
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = self._core.sampling(extra_args=extra)
        sampling.max_tokens = num_answer
        request = Request(name, list(tokens), sampling, None, block_hasher=self._hasher)
        self._asked[name] = _Asked(request, on_first, on_end, pulled)
        self.scheduler.add_request(request)
        if not self._is_stepping:
            self._is_stepping = True
            self._world.at(0.0, self._step)

    def close(self) -> None:
        """End what it has of threads."""
        self._core.close()

    # Steps

    def _step(self) -> None:
        if not self.scheduler.has_requests():
            self._is_stepping = False
            return
        self._core.schedule()
        out = self._core.in_flight[-1]
        counts = out.num_scheduled_tokens
        prompts = 0
        for name, count in counts.items():
            asked = self._asked[name]
            before = asked.request.num_computed_tokens - count
            left = asked.request.num_prompt_tokens - before
            prompts += min(count, max(0, left)) if count > 1 or left > 0 else 0
            if self._is_prefill and asked.request.num_computed_tokens >= asked.request.num_tokens:
                self._lend(name, asked.request.num_tokens)
        self._begin_pulls()
        took_s = self._speed.step_s + prompts / self._speed.prefill_per_s
        self._world.at(took_s if counts else IDLE_S, self._computed)

    def _lend(self, name: str, num_tokens: int) -> None:
        """The blocks stay for as long as the pull takes."""
        groups = block_ids_of(self.scheduler.kv_cache_manager, name)
        number = next(self._numbers)
        self._lent.pin_blocks(number, [block for ids in groups for block in ids if block])
        over_s = 2 * self._speed.step_s + self._pull_s(num_tokens)
        self._world.at(over_s, partial(self._lent.unpin_blocks, number))

    def _pull_s(self, num_tokens: int) -> float:
        """Of the last tokens of a prompt."""
        nbytes = num_tokens if not self.size.windows.groups else self.size.held_tokens(num_tokens)
        return nbytes / self._speed.pulled_per_s

    def _begin_pulls(self) -> None:
        for name, asked in self._asked.items():
            if not asked.pulled or name in self._pulling:
                continue
            request = asked.request
            if request.status.name != "WAITING_FOR_REMOTE_KVS":
                continue
            self._pulling.add(name)
            self._world.at(self._pull_s(asked.missing), partial(self._arrived, name))

    def _arrived(self, name: str) -> None:
        self._received.add(name)

    def _computed(self) -> None:
        reports = KVConnectorOutput(finished_recving=self._received) if self._received else None
        self._received = set()
        outputs = self._core.process(reports)
        for one in outputs:
            asked = self._asked.get(one.request_id)
            if asked is None:
                continue
            answer = asked.answer
            if one.new_token_ids and not answer.tokens:
                self._world.at(0.0, partial(asked.on_first, answer))
            answer.tokens += one.new_token_ids
            if one.finished:
                del self._asked[one.request_id]
                self._pulling.discard(one.request_id)
                params = one.kv_transfer_params or {}
                answer.told = params.get("pdconn") or {}
                self.counts["preempted"] += asked.request.num_preemptions
                self._world.at(0.0, partial(asked.on_end, answer))
        self._step()
