"""A prefix cache that is vLLM's own, used the way vLLM's scheduler uses it.

``SimCache`` has no socket and no clock; ``test_sim_engine.py`` beside it asks it what it
would serve and compares that with what the router believes.  Importing this module imports
vLLM (7 s).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
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

from pdconn.router.prefix.hashing import HashScheme
from pdconn.vllm.patches.pool.answer_windows import AnswerWindows
from pdconn.vllm.patches.pool.local_hits import complete_windows
from pdconn.vllm.patches.request_writes import num_computed

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
        longest: tokens of a prompt for which there must be room, whatever is kept beside it.
    """

    groups: tuple[GroupShape, ...]
    num_blocks: int
    hash_block_tokens: int | None = None
    retention: int | None = None
    chunk_tokens: int = 8192
    longest: int = 1

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

    ``completes_windows``: what is brought completes hits of full attention, as ours has it;
    ``keeps_answers``: a request's last window is kept when it ends, as ours has it.

    >>> cache = SimCache(shape)                                      # doctest: +SKIP
    >>> request = cache.request([1] * 40, max_tokens=8)
    >>> cache.admit(request)                                         # tokens found
    0
    >>> cache.compute(request); cache.sample(request); cache.finish(request)
    """

    def __init__(
        self, shape: CacheShape, *, completes_windows: bool = False, keeps_answers: bool = False
    ) -> None:
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
        self._until: dict[str, int] = {}
        self._completes = completes_windows and complete_windows(
            self.manager, lambda request: self._until.get(request.request_id, 0)
        )
        self._splitting = _splitting(shape, self.manager) if shape.has_states else None
        self.answers = (
            AnswerWindows.from_manager(self.manager, shape.longest) if keeps_answers else None
        )

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

    def admit(self, request: Request, until: int = 0) -> int | None:
        """Take what is cached and the first blocks of the rest; the tokens found.

        ``until``: what the cache lacks of so many first tokens comes from elsewhere and need not
        be computed.  None where there is no room now.
        """
        self.begin_step()
        last = request.num_tokens - self.shape.has_states
        until = min(until, last)  # a state may not be behind the last token, computed again
        blocks, found = self._look_up(request, until)
        beyond = max(0, until - found)
        fresh = 0 if beyond else self._chunk(request, found)
        room = self.manager.allocate_slots(
            request,
            fresh,
            num_new_computed_tokens=found,
            new_computed_blocks=blocks,
            num_external_computed_tokens=beyond,
            delay_cache_blocks=beyond > 0,
            full_sequence_must_fit=True,
        )
        if room is None:
            return None
        request.num_computed_tokens = found + beyond + fresh
        if beyond:
            self.manager.cache_blocks(request, request.num_computed_tokens)
            # The last one is computed again, for the first token.
            request.num_computed_tokens = min(until, request.num_tokens - 1)
        return found

    def _look_up(self, request: Request, until: int) -> tuple[Any, int]:
        """Blocks and tokens of the cache; a pull completes what only full attention has."""
        blocks: Any
        found: int
        blocks, found, request.shared_prefix_boundary, *_ = self.manager.get_computed_blocks(
            request
        )
        if until > found and (self._completes or self.shape.has_states):
            self._until[request.request_id] = until
            look = self.manager.get_computed_blocks_for_connector
            blocks, found, request.shared_prefix_boundary, *_ = look(request)
            del self._until[request.request_id]
        return blocks, found

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
        if self.answers is not None:
            settled = request.num_computed_tokens - request.num_in_flight_tokens
            self.manager.remove_skipped_blocks(request.request_id, settled)
            self.answers.keep_answer(request, num_computed(request))
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
