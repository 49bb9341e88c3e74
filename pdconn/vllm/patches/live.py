"""vLLM's own block manager and scheduler of a starting engine, with dummy requests in them.

What pdconn believes of vLLM's insides is tried on these before the engine's first request::

    with live.lent(): ...              nothing is counted, logged or reported; all is put back
    live.computed(n), live.loaded(n)   a dummy request with blocks for ``n`` tokens
    expect(name, expected, seen)       a belief

Dummy requests have equal tokens and equal hashes, which no real prompt has.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from math import lcm
from typing import TYPE_CHECKING, Any

from pdconn.vllm.config import ConfigError

if TYPE_CHECKING:  # what only pins blocks is imported without vLLM
    from vllm.v1.request import Request

    from pdconn.vllm.patches.pool.answer_windows import AnswerWindows

_MOST_BLOCKS = 512
"""Of a dummy request: the test takes milliseconds whatever the engine's blocks are."""

_PUT_BACK = (bool, int, float, str, type(None))
_REFILLED = (dict, set, list, deque)

_NAME = "pdconn-self-test"

_WANDERING = 16
"""Blocks that were cached are freed behind all others, so that each dummy request gets new ones."""


def expect(name: str, expected: object, seen: object) -> None:
    """A belief about vLLM.

    Raises:
        ConfigError: naming the inside that works in another way.
    """
    if seen != expected:
        raise changed(name, expected, seen)


def changed(name: str, expected: object, seen: object) -> ConfigError:
    """The error that stops an engine: one line that names what works in another way."""
    hint = "this vLLM works in another way, and pdconn does not know it yet"
    return ConfigError(f"vLLM's {name}", expected, seen, hint)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner`` has another attribute for a while."""
    had = vars(owner).get(name, owner)  # no attribute of an object is the object
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had is owner:
            delattr(owner, name)
        else:
            setattr(owner, name, had)


class Live:
    """The block manager of an engine that has not had a request, to try beliefs on.

    Attributes:
        manager: vLLM's ``KVCacheManager``.
        scheduler: vLLM's, which has that manager.
        pool: its ``BlockPool``.
        answers: what caches windows of requests that end; None if nothing does.
        cached: managers of the groups whose blocks are found by hashes.
        segment: tokens; a hit is a multiple of so many.
        num_segments: that fit into a dummy request: 2, or fewer where the pool or the longest
            prompt is too small; 0 without prefix caching.
        tokens: of a dummy request's longest prompt, which is one longer than its segments.
    """

    def __init__(self, manager: Any, scheduler: Any, answers: AnswerWindows | None) -> None:
        self.manager, self.scheduler, self.pool = manager, scheduler, manager.block_pool
        self.answers = answers
        self.managers = manager.coordinator.single_type_managers
        self.cached = [one for one in self.managers if _is_cached(one)]
        sizes = [one.block_size for one in self.cached]
        sizes += [one.cache_hit_alignment_tokens for one in self.cached]
        self.segment = lcm(*sizes) if sizes else min(one.block_size for one in self.managers)
        self._numbers = itertools.count()
        most = 2 if sizes else 0
        self.num_segments = next((n for n in range(most, 0, -1) if self._fits(n)), 0)

    @property
    def tokens(self) -> int:
        """See the class; without a whole segment what fits into a block of each group."""
        least = min(one.block_size for one in self.managers)
        return self.end + 1 if self.end else min(least, self.manager.max_model_len)

    @property
    def end(self) -> int:
        """Tokens of a dummy request's whole segments; 0 where there is no room for one."""
        return self.num_segments * self.segment

    @property
    def is_found(self) -> bool:
        """Whether a later request finds the whole segments of one before it, to the last token.

        It does not with a drafter, since hits are shorter by what that reads, nor with a window of
        one token, of which vLLM keeps nothing.
        """
        has_drafter = any(one.use_eagle for one in self.managers)
        others = [one for one in self.cached if not _is_state(one)]
        return self.end > 0 and not has_drafter and not any(map(_keeps_nothing, others))

    def _fits(self, segments: int) -> bool:
        tokens = segments * self.segment + 1
        needed = self._num_blocks(tokens)
        free = self.pool.get_num_free_blocks()
        return tokens <= self.manager.max_model_len and needed <= min(free, _MOST_BLOCKS)

    def _num_blocks(self, tokens: int) -> int:
        """At most, of a request; states have blocks for drafts and for a checkpoint, too."""
        return sum(-(-tokens // one.block_size) + _num_further(one) for one in self.managers)

    def request(self, tokens: int) -> Request:
        """A dummy request that has no blocks yet."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        size = self.pool.hash_block_size
        name = f"{_NAME}-{next(self._numbers)}"
        made = Request(name, [0] * tokens, SamplingParams(max_tokens=1), None)
        made.block_hashes.extend(f"{_NAME}-{at}".encode() for at in range(tokens // size))
        return made

    @contextmanager
    def computed(self, tokens: int) -> Iterator[Request]:
        """A dummy request that has computed so many tokens of the longest prompt."""
        request = self.request(self.tokens)
        self.manager.new_step_starts()
        self._allocate(request, tokens)
        request.num_computed_tokens = tokens
        yield request
        self.manager.free(request)

    @contextmanager
    def loaded(self, tokens: int, *, hit: Any = None, held: int = 0) -> Iterator[Request]:
        """A dummy request that has blocks for tokens which a connector brings, and are not there.

        Args:
            tokens: of its prompt that it has blocks for.
            hit: blocks that it has of a hit.
            held: tokens of that hit.
        """
        request = self.request(self.tokens)
        self.manager.new_step_starts()
        self._allocate(
            request,
            0,
            num_new_computed_tokens=held,
            new_computed_blocks=hit,
            num_external_computed_tokens=tokens - held,
            delay_cache_blocks=True,
        )
        yield request
        self.manager.free(request)

    def _allocate(self, request: Request, tokens: int, **more: Any) -> None:
        got = self.manager.allocate_slots(request, tokens, has_scheduled_reqs=False, **more)
        if got is None:
            free = self.pool.get_num_free_blocks()
            raise changed("KVCacheManager.allocate_slots", "blocks", f"none, {free} are free")

    def blocks(self, request: Request) -> list[Any]:
        """Blocks of a dummy request, of all groups, holes left out."""
        held = (one.req_to_blocks[request.request_id] for one in self.managers)
        return [block for table in held for block in table if not block.is_null]

    def forget(self) -> None:
        """No dummy request finds blocks of those before it."""
        expect("BlockPool.reset_prefix_cache", True, self.pool.reset_prefix_cache())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the manager, the pool and the scheduler to a test, and put all of them back.

        Nothing of the pool is walked through but the blocks at the front of its free list.
        """
        pool, owners = self.pool, (self.manager, self.pool, self.scheduler, *self.managers)
        expect("BlockPool of a starting engine", 0, len(pool.cached_block_hash_to_block))
        before = [(owner, _state_of(owner)) for owner in owners]
        references = pool.null_block.ref_cnt  # vLLM counts those of the null block, and reads none
        front = _front(pool, self._num_blocks(self.tokens) * _WANDERING)
        with ExitStack() as quiet:
            log = logging.getLogger(type(pool).__module__)
            quiet.enter_context(replaced(log, "disabled", True))
            quiet.enter_context(replaced(pool, "metrics_collector", None))
            quiet.enter_context(replaced(pool, "enable_kv_cache_events", False))
            quiet.enter_context(replaced(self.manager, "log_stats", False))
            # A reset goes through all blocks of the pool: of those only these have been used.
            quiet.enter_context(replaced(pool, "blocks", _Front(pool.blocks, front)))
            yield
            pool.touch(front)  # they leave the free list, wherever they are in it now,
            pool.free_blocks(front)  # and come to its front again, in their old order
        for owner, state in before:
            _put_back(owner, state)
        pool.null_block.ref_cnt = references
        order = [one.block_id for one in front]
        seen = [one.block_id for one in _front(pool, len(front))]
        expect("BlockPool.free_blocks", f"free blocks {order[:8]}", f"free blocks {seen[:8]}")
        expect("BlockPool.free_blocks", order, seen)
        expect("BlockPool.reset_prefix_cache", 0, len(pool.cached_block_hash_to_block))


class _Front:
    """A pool's blocks by their numbers, of which only some are gone through."""

    def __init__(self, blocks: Sequence[Any], front: Sequence[Any]) -> None:
        self._blocks, self._front = blocks, front

    def __getitem__(self, number: int) -> Any:
        return self._blocks[number]

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._front)


def _front(pool: Any, count: int) -> list[Any]:
    """Blocks at the front of a pool's free list, at most ``count``."""
    found: list[Any] = []
    block = pool.free_block_queue.fake_free_list_head.next_free_block
    while len(found) < min(count, pool.get_num_free_blocks()):
        found.append(block)
        block = block.next_free_block
    return found


def _is_cached(manager: Any) -> bool:
    return bool(manager.enable_caching and manager.kv_cache_spec.prefix_cacheable)


def _num_further(manager: Any) -> int:
    """Blocks of a request beside those of its tokens, at most."""
    return int(manager.kv_cache_spec.num_speculative_blocks) + 2 if _is_state(manager) else 1


def _is_state(manager: Any) -> bool:
    from pdconn.vllm.blocks.kinds import is_state

    return is_state(manager.kv_cache_spec)


def _keeps_nothing(manager: Any) -> bool:
    """Whether a token attends to none before it, so that vLLM's look-ups want no block."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = manager.kv_cache_spec
    return isinstance(spec, SlidingWindowSpec) and spec.sliding_window < 2


def _state_of(owner: Any) -> dict[str, tuple[Any, Any]]:
    """Values of an object that a test may change: plain ones, and what containers contain."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(owner).items():
        if isinstance(value, _PUT_BACK):
            found[name] = value, value
        elif isinstance(value, _REFILLED) and name != "blocks":  # those of a pool are 100 000
            found[name] = value, copy(value)
    return found


def _put_back(owner: Any, state: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (value, contents) in state.items():
        if isinstance(value, _REFILLED) and value != contents:
            value.clear()
            refill = value.extend if isinstance(value, list | deque) else value.update
            refill(contents)
        setattr(owner, name, value)
