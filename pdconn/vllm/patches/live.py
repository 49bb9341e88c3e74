"""vLLM's own block manager and scheduler of a starting engine, with dummy requests in them.

Assumptions about vLLM's internals are tested on these before the engine's first request::

    with live.lent(): ...              nothing is counted, logged or reported; all is restored
    live.computed_request(n)           a dummy request that has computed ``n`` tokens
    live.loaded_request(n)             a dummy request with blocks for a load of ``n`` tokens
    expect(name, expected, seen)       an assumption

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
"""Blocks of a dummy request, so that the test takes milliseconds in any engine."""

_PUT_BACK = (bool, int, float, str, type(None))
_REFILLED = (dict, set, list, deque)

_NAME = "pdconn-self-test"

_WANDERING = 16
"""Cached blocks are freed to the end of the free list, so each dummy request has other blocks."""


def expect(name: str, expected: object, seen: object) -> None:
    """Check an assumption about vLLM.

    Raises:
        ConfigError: naming the internal that works differently.
    """
    if seen != expected:
        raise changed(name, expected, seen)


def changed(name: str, expected: object, seen: object) -> ConfigError:
    """The error that stops an engine: one line that names what works differently."""
    hint = "this vLLM works differently, and pdconn does not support it yet"
    return ConfigError(f"vLLM's {name}", expected, seen, hint)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of ``owner``, and restore it at the end."""
    had = vars(owner).get(name, owner)  # ``owner`` itself: it has no such attribute
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had is owner:
            delattr(owner, name)
        else:
            setattr(owner, name, had)


class Live:
    """The block manager of an engine that has not had a request, for the self-test.

    Attributes:
        manager: vLLM's ``KVCacheManager``.
        scheduler: vLLM's, which has that manager.
        pool: its ``BlockPool``.
        answers: caches windows of finished requests; None if there is none.
        cached: managers of the groups whose blocks are found by hashes.
        segment: tokens; hits are multiples of this.
        num_segments: of a dummy request: 2, or fewer if the pool or the longest prompt is too
            small; 0 without prefix caching.
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
        """Tokens of a dummy request's longest prompt: its segments and one more, or one block."""
        least = min(one.block_size for one in self.managers)
        return self.end + 1 if self.end else min(least, self.manager.max_model_len)

    @property
    def end(self) -> int:
        """Tokens of a dummy request's whole segments; 0 if no segment fits."""
        return self.num_segments * self.segment

    @property
    def is_found(self) -> bool:
        """Whether a later request hits all whole segments of an earlier one."""
        # With a drafter hits are shorter; and of a window of one token vLLM keeps nothing.
        has_drafter = any(one.use_eagle for one in self.managers)
        others = [one for one in self.cached if not _is_state(one)]
        return self.end > 0 and not has_drafter and not any(map(_keeps_nothing, others))

    def _fits(self, segments: int) -> bool:
        tokens = segments * self.segment + 1
        needed = self._num_blocks(tokens)
        free = self.pool.get_num_free_blocks()
        return tokens <= self.manager.max_model_len and needed <= min(free, _MOST_BLOCKS)

    def _num_blocks(self, tokens: int) -> int:
        """Blocks of a request, at most; states have some for drafts and for a checkpoint, too."""
        return sum(-(-tokens // one.block_size) + _num_further(one) for one in self.managers)

    def new_request(self, tokens: int) -> Request:
        """A dummy request without blocks."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        size = self.pool.hash_block_size
        name = f"{_NAME}-{next(self._numbers)}"
        made = Request(name, [0] * tokens, SamplingParams(max_tokens=1), None)
        made.block_hashes.extend(f"{_NAME}-{at}".encode() for at in range(tokens // size))
        return made

    @contextmanager
    def computed_request(self, tokens: int) -> Iterator[Request]:
        """A dummy request that has computed ``tokens`` tokens of the longest prompt."""
        request = self.new_request(self.tokens)
        self.manager.new_step_starts()
        self._allocate(request, tokens)
        request.num_computed_tokens = tokens
        yield request
        self.manager.free(request)

    @contextmanager
    def loaded_request(self, tokens: int, *, hit: Any = None, held: int = 0) -> Iterator[Request]:
        """A dummy request with blocks for tokens that a connector has yet to load.

        Args:
            tokens: of its prompt for which it has blocks.
            hit: blocks of a local hit.
            held: tokens of that hit.
        """
        request = self.new_request(self.tokens)
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
        """Blocks of a dummy request, of all groups, without holes."""
        held = (one.req_to_blocks[request.request_id] for one in self.managers)
        return [block for table in held for block in table if not block.is_null]

    def forget_cached(self) -> None:
        """Reset the prefix cache: later dummy requests do not hit blocks of earlier ones."""
        expect("BlockPool.reset_prefix_cache", True, self.pool.reset_prefix_cache())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Restore the manager, the pool and the scheduler at the end.

        Of the pool only the blocks at the front of its free list are visited.
        """
        pool, owners = self.pool, (self.manager, self.pool, self.scheduler, *self.managers)
        expect("BlockPool of a starting engine", 0, len(pool.cached_block_hash_to_block))
        before = [(owner, _state_of(owner)) for owner in owners]
        references = pool.null_block.ref_cnt  # counted by vLLM, but never read
        front = _front(pool, self._num_blocks(self.tokens) * _WANDERING)
        with ExitStack() as quiet:
            log = logging.getLogger(type(pool).__module__)
            quiet.enter_context(replaced(log, "disabled", True))
            quiet.enter_context(replaced(pool, "metrics_collector", None))
            quiet.enter_context(replaced(pool, "enable_kv_cache_events", False))
            quiet.enter_context(replaced(self.manager, "log_stats", False))
            # A reset visits all blocks of the pool, of which only these have been used.
            quiet.enter_context(replaced(pool, "blocks", _Front(pool.blocks, front)))
            yield
            pool.touch(front)  # remove them from the free list, wherever they are,
            pool.free_blocks(front)  # and put them at its front again, in their former order
        for owner, state in before:
            _put_back(owner, state)
        pool.null_block.ref_cnt = references
        order = [one.block_id for one in front]
        seen = [one.block_id for one in _front(pool, len(front))]
        expect("BlockPool.free_blocks", f"free blocks {order[:8]}", f"free blocks {seen[:8]}")
        expect("BlockPool.free_blocks", order, seen)
        expect("BlockPool.reset_prefix_cache", 0, len(pool.cached_block_hash_to_block))


class _Front:
    """A pool's blocks by their numbers; iterates over some of them only."""

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
    """Blocks of a request in addition to those of its tokens, at most."""
    return int(manager.kv_cache_spec.num_speculative_blocks) + 2 if _is_state(manager) else 1


def _is_state(manager: Any) -> bool:
    from pdconn.vllm.blocks.kinds import is_state

    return is_state(manager.kv_cache_spec)


def _keeps_nothing(manager: Any) -> bool:
    """Whether a token attends to no earlier one, so that vLLM's look-ups need no block."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = manager.kv_cache_spec
    return isinstance(spec, SlidingWindowSpec) and spec.sliding_window < 2


def _state_of(owner: Any) -> dict[str, tuple[Any, Any]]:
    """Attributes of an object that a test may change: plain values, and copies of containers."""
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
