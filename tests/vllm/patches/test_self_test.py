"""What is believed of vLLM is tried at the start: a wrong belief refuses the engine, a right one
leaves nothing behind.

vLLM's own scheduler, block manager and block pool, with our connector bound as in an engine.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import (
        FullAttentionManager,
        MambaManager,
        SingleTypeKVCacheManager,
        SlidingWindowManager,
    )
    from vllm.v1.request import Request

    from pdconn.vllm.config import ConfigError
    from pdconn.vllm.patches.live import Live
    from pdconn.vllm.patches.self_test import SelfTest
    from tests.fakes.simulated.sim_cache import CacheShape, GroupShape
    from tests.property.scale import at_least
    from tests.vllm.patches.hybrid_engines import KINDS, drawn, self_test, started, state_of
    from tests.vllm.patches.vllm_scheduler import Engine

Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Engines over groups; closed behind the test."""
    engines: list[Engine] = []

    def made(groups: tuple[GroupShape, ...], num_blocks: int = 700, **how: Any) -> Engine:
        retention = how.pop("retention", None)
        engines.append(started(CacheShape(groups, num_blocks, retention=retention), **how))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


# What is as believed


@pytest.mark.parametrize("kind", KINDS)
def test_a_starting_engine_is_as_before_the_test(kind: str, start: Start, tmp_path: Path) -> None:
    engine = start(KINDS[kind], store=tmp_path / "store" if kind != "two full" else None)
    before = state_of(engine)
    for _ in range(2):
        self_test(engine)
        assert state_of(engine) == before
    assert sum(len(value) for value in before["blocks"]) > 10_000, "something was compared"


@pytest.mark.parametrize(
    "how",
    [
        {"role": "kv_producer"},
        {"role": "kv_consumer"},
        {"role": "kv_producer", "is_async": False},
        {"is_caching": False},
        {"retention": 0},
        {"longest": 20},
        {"num_blocks": 4},
        {"has_scratch": True},
        {"kind": "full", "has_scratch": True},
    ],
    ids=str,
)
def test_engines_of_other_settings_start(how: dict[str, Any], start: Start) -> None:
    engine = start(KINDS[how.pop("kind", "window")], **how)
    before = state_of(engine)
    self_test(engine)
    assert state_of(engine) == before


@pytest.mark.parametrize("seed", range(4))
def test_engines_of_drawn_caches_start(seed: int) -> None:
    rng, segments = Random(seed), set()
    for _ in range(at_least(15)):
        shape, how = drawn(rng)
        engine = started(shape, **how)
        try:
            before = state_of(engine)
            self_test(engine)
            assert state_of(engine) == before
            manager = engine.scheduler.kv_cache_manager
            segments.add(Live(manager, engine.scheduler, None).num_segments)
        except ConfigError as error:
            pytest.fail(f"{error}: {shape} {how}")
        finally:
            engine.close()
    assert len(segments) > 1, "of all sizes"


def test_nothing_is_counted_and_nothing_is_reported(start: Start) -> None:
    """Where KV events, metrics of each block and statistics are on."""
    engine = start(KINDS["window"], is_watched=True)
    scheduler = engine.scheduler
    before = state_of(engine)
    self_test(engine)
    assert state_of(engine) == before
    assert scheduler.kv_cache_manager.take_events() == []
    # Control: a request is seen by all of them, and changes what is compared.
    engine.add(40)
    engine.schedule()
    assert scheduler.kv_cache_manager.take_events()
    after = state_of(engine)
    changed = {name for name in before if after[name] != before[name]}
    assert {"free list", "blocks", "metrics", "found by hash", "group 0.req_to_blocks"} <= changed


def test_the_pool_is_not_gone_through(start: Start) -> None:
    """A pool of fifty times the blocks takes no longer."""
    groups = KINDS["many"]
    small, large = start(groups, 2_000), start(groups, 100_000)
    times: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(7):
        for number, engine in enumerate((small, large)):
            began = time.perf_counter()
            self_test(engine)
            times[number].append(time.perf_counter() - began)
    assert statistics.median(times[1]) < 3 * statistics.median(times[0])
    # Control: to go through all of them does take longer.
    began = time.perf_counter()
    large.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    whole = time.perf_counter() - began
    began = time.perf_counter()
    small.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    assert whole > 3 * (time.perf_counter() - began)


def test_it_is_run_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sleep workers register anew, and requests may be there."""
    engine = start(KINDS["full"])
    self_test(engine)
    engine.add(40)
    engine.schedule()
    tested = engine.connector._scheduler._self_test
    tested.run_once(None)
    with pytest.raises(ConfigError, match="starting engine"):
        self_test(engine)


def test_an_engine_that_binds_no_manager_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bind_kv_cache_manager: .*got none"):
        SelfTest(None).run_once(None)


def test_a_manager_that_no_scheduler_binds_is_refused(start: Start) -> None:
    manager = start(KINDS["full"]).scheduler.kv_cache_manager
    with pytest.raises(ConfigError, match="by no scheduler's constructor"):
        SelfTest(manager).run_once(None)


# What is not


Change = Callable[[pytest.MonkeyPatch], None]


def wrong(owner: Any, name: str, make: Callable[[Any], Any]) -> Change:
    """A vLLM whose method is another."""
    return lambda patch: patch.setattr(owner, name, make(vars(owner)[name]))


def gone(owner: Any, name: str) -> Change:
    return lambda patch: patch.delattr(owner, name)


def ignoring(**given: Any) -> Callable[[Any], Any]:
    """A method that takes no notice of arguments."""
    return lambda right: lambda *args, **more: right(*args, **more | given)


def adding(number: int) -> Callable[[Any], Any]:
    return lambda right: lambda *args, **more: right(*args, **more) + number


def another_schedule(right: Any) -> Any:
    def schedule(self: Any) -> None:
        self._update_after_schedule(None)
        self._build_kv_connector_meta(None, None)
        self.kv_connector_block_state = None

    return schedule


def without_a_salt(right: Any) -> Any:
    def init(self: Any, *args: Any, **more: Any) -> None:
        right(self, *args, **more)
        del self.cache_salt

    return init


def counting_elsewhere(right: Any) -> Any:
    def init(self: Any, *args: Any, **more: Any) -> None:
        right(self, *args, **more)
        self.first_uncached_block = self.num_cached_block
        del self.num_cached_block

    return init


def caching_from_the_start(right: Any) -> Any:
    """Of a request that was not cached yet."""

    def cache_blocks(self: Any, request: Any, *args: Any, **more: Any) -> None:
        if not any(block.block_hash for block in self.req_to_blocks[request.request_id]):
            self.num_cached_block.pop(request.request_id, None)
        right(self, request, *args, **more)

    return cache_blocks


def touching_no_counts(right: Any) -> Any:
    return lambda self, blocks: None


def touching_twice(right: Any) -> Any:
    def touch(self: Any, blocks: Any) -> None:
        right(self, blocks)
        for block in blocks:
            block.ref_cnt += 1

    return touch


def freeing_nothing(right: Any) -> Any:
    def free_blocks(self: Any, blocks: Any) -> None:
        right(self, [block for block in blocks if block.block_hash is not None])

    return free_blocks


def freeing_backwards(right: Any) -> Any:
    return lambda self, blocks: right(self, list(reversed(list(blocks))))


def resetting_in_use(right: Any) -> Any:
    def reset_prefix_cache(self: Any) -> bool:
        for block in self.blocks:
            block.reset_hash()
        return True

    return reset_prefix_cache


def resetting_the_map_alone(right: Any) -> Any:
    def reset_prefix_cache(self: Any) -> bool:
        if self.num_gpu_blocks - self.get_num_free_blocks() > 1:
            return False
        self.cached_block_hash_to_block._cache.clear()
        return True

    return reset_prefix_cache


def resetting_past_the_pools_attribute(right: Any) -> Any:
    return lambda self: type(self.block_pool).reset_prefix_cache(self.block_pool)


def resetting_twice(right: Any) -> Any:
    return lambda self: right(self) and right(self)


def freeing_all_that_is_skipped_and_one(right: Any) -> Any:
    def remove(self: Any, request_id: str, first: int, last: int) -> None:
        right(self, request_id, first, last + 1)

    return remove


def keeping_one_of_the_skipped(right: Any) -> Any:
    def remove(self: Any, request_id: str, first: int, last: int) -> None:
        right(self, request_id, min(first + 1, last), last)

    return remove


def saying_no_prompt(right: Any) -> Any:
    return lambda self, request_id, processed, num_prompt_tokens=None: right(
        self, request_id, processed
    )


def skipping(tokens: int) -> Callable[[Any], Any]:
    return lambda right: lambda self, computed: max(0, right(self, computed) + tokens)


def hitting_less(right: Any) -> Any:
    def get_computed_blocks(self: Any, *args: Any) -> Any:
        blocks, tokens, boundary = right(self, *args)
        return blocks, max(0, tokens - 16), boundary

    return get_computed_blocks


def agreeing_per_group(right: Any) -> Any:
    def per_group(self: Any, hashes: Any, most: int) -> Any:
        blocks, tokens, _ = self.find_longest_cache_hit(hashes, most)
        return blocks, (tokens,) * len(blocks)

    return per_group


def counting_blocks_per_group(right: Any) -> Any:
    def per_group(self: Any, hashes: Any, most: int) -> Any:
        blocks, tokens = right(self, hashes, most)
        return blocks, tuple(each // 16 for each in tokens)

    return per_group


def caching_the_other_blocks(right: Any) -> Any:
    def cache_full_blocks(self: Any, *args: Any, block_mask: Any = None, **more: Any) -> None:
        mask = None if block_mask is None else [not each for each in block_mask]
        right(self, *args, block_mask=mask, **more)

    return cache_full_blocks


def marking_other_tokens(right: Any) -> Any:
    def insert(self: Any, key: Any, block: Any, num_tokens: int) -> None:
        right(self, key, block, num_tokens and num_tokens + 16)

    return insert


def counting_no_flight(right: Any) -> Any:
    def update(self: Any, step: Any) -> None:
        right(self, step)
        for name in step.num_scheduled_tokens:
            self.requests[name].num_in_flight_tokens = 0

    return update


def noting_no_step(right: Any) -> Any:
    def update(self: Any, step: Any) -> None:
        right(self, step)
        for name in step.num_scheduled_tokens:
            self.requests[name].last_sched_seq = self.processed_step_seq

    return update


def keeping_what_is_over(right: Any) -> Any:
    return lambda self: None


def failing_nobody(right: Any) -> Any:
    def handle(self: Any, failed: set[str]) -> set[str]:
        right(self, failed)
        return set()

    return handle


def failing_everybody(right: Any) -> Any:
    return lambda self, failed: right(self, failed) or failed


def grouping_otherwise(right: Any) -> Any:
    def init(self: Any, *args: Any, **more: Any) -> None:
        right(self, *args, **more)
        self.attention_groups = [SimpleNamespace(eagle="no")]

    return init


def reading_by_a_drafter(right: Any) -> Any:
    def init(self: Any, *args: Any, **more: Any) -> None:
        right(self, *args, **more)
        self.single_type_managers[0].use_eagle = True

    return init


def numbering_anew(right: Any) -> Any:
    def init(self: Any, *args: Any, **more: Any) -> None:
        right(self, *args, **more)
        self.blocks = [*self.blocks[1:], self.blocks[0]]

    return init


BEFORE, AFTER = "before the engine is built", "after"

WRONG: dict[str, tuple[str, str, str, Change]] = {
    # What changes: when, of which kind of cache, the line names, how.
    "connectors are asked later": (
        AFTER, "full", "schedule", wrong(Scheduler, "schedule", another_schedule)),
    "requests have no salt": (
        AFTER, "full", "cache_salt", wrong(Request, "__init__", without_a_salt)),
    "requests are as long as before they were shortened": (
        AFTER, "full", "tokens of a shortened prompt",
        lambda patch: patch.setattr(Request, "num_tokens", property(lambda self: 40))),
    "a block's number is not its place": (
        BEFORE, "full", "BlockPool.blocks|ref_cnt", wrong(BlockPool, "__init__", numbering_anew)),
    "touching a block holds no reference": (
        AFTER, "full", "BlockPool.touch", wrong(BlockPool, "touch", touching_no_counts)),
    "touching a block holds two": (
        AFTER, "full", "BlockPool.touch", wrong(BlockPool, "touch", touching_twice)),
    "free blocks are counted otherwise": (
        AFTER, "full", "reset_prefix_cache",
        wrong(BlockPool, "get_num_free_blocks", adding(1))),
    "blocks without a hash are not freed": (
        AFTER, "full", "BlockPool.free_blocks|get_num_free_blocks",
        wrong(BlockPool, "free_blocks", freeing_nothing)),
    "blocks are freed in another order": (
        AFTER, "full", "BlockPool.free_blocks", wrong(BlockPool, "free_blocks", freeing_backwards)),
    "a reset forgets blocks in use": (
        BEFORE, "full", "reset_prefix_cache, of blocks in use",
        wrong(BlockPool, "reset_prefix_cache", resetting_in_use)),
    "a reset leaves hashes at blocks": (
        BEFORE, "full", "reset_prefix_cache, blocks that are still found",
        wrong(BlockPool, "reset_prefix_cache", resetting_the_map_alone)),
    "a reset goes past the pool's method": (
        AFTER, "full", "reset_prefix_cache, what the pool's method saw",
        wrong(KVCacheManager, "reset_prefix_cache", resetting_past_the_pools_attribute)),
    "a reset is made twice": (
        AFTER, "full", "reset_prefix_cache, what the pool's method saw",
        wrong(KVCacheCoordinator, "reset_prefix_cache", resetting_twice)),
    "requests are admitted by all of their blocks": (
        AFTER, "window", "max_admission_blocks_per_request",
        wrong(SingleTypeKVCacheManager, "get_num_blocks_to_allocate",
              ignoring(apply_admission_cap=False))),
    "a block of the window is freed": (
        AFTER, "window", "remove_skipped_blocks, at a window",
        wrong(SingleTypeKVCacheManager, "_remove_blocks_in_range",
              freeing_all_that_is_skipped_and_one)),
    "a block before the window is kept": (
        AFTER, "window", "remove_skipped_blocks, behind a window",
        wrong(SingleTypeKVCacheManager, "_remove_blocks_in_range", keeping_one_of_the_skipped)),
    "freeing is not told of the prompt": (
        AFTER, "window", "calls of remove_skipped_blocks",
        wrong(KVCacheCoordinator, "remove_skipped_blocks", saying_no_prompt)),
    "freeing is told of tokens in flight": (
        AFTER, "window", "calls of remove_skipped_blocks",
        wrong(KVCacheCoordinator, "remove_skipped_blocks",
              lambda right: lambda self, name, processed, num_prompt_tokens: right(
                  self, name, processed + 1, num_prompt_tokens))),
    "a window skips a token that is read": (
        AFTER, "window", "get_num_skipped_tokens",
        wrong(SlidingWindowManager, "get_num_skipped_tokens", skipping(1))),
    "blocks are cached that a load has not written": (
        AFTER, "window", "blocks with a hash of a load",
        wrong(KVCacheManager, "allocate_slots", ignoring(delay_cache_blocks=False))),
    "caching begins elsewhere": (
        AFTER, "window", "cache_blocks, before num_cached_block",
        wrong(SingleTypeKVCacheManager, "cache_blocks", caching_from_the_start)),
    "cached blocks are counted elsewhere": (
        BEFORE, "window", "num_cached_block",
        wrong(SingleTypeKVCacheManager, "__init__", counting_elsewhere)),
    "groups do not say that a drafter reads them": (
        BEFORE, "window", "attention_groups, use_eagle",
        wrong(HybridKVCacheCoordinator, "__init__", reading_by_a_drafter)),
    "groups say otherwise that a drafter reads them": (
        BEFORE, "window", "bind_kv_cache_manager.*AttributeError.*use_eagle",
        wrong(HybridKVCacheCoordinator, "__init__", grouping_otherwise)),
    "nothing is cached": (
        AFTER, "window", "cache_blocks",
        wrong(FullAttentionManager, "cache_blocks", lambda right: lambda *args, **more: None)),
    "a hit is shorter than what is held": (
        AFTER, "two full", "get_computed_blocks",
        wrong(KVCacheManager, "get_computed_blocks", hitting_less)),
    "groups are not looked up one by one": (
        AFTER, "window", "find_longest_cache_hit_per_group",
        wrong(HybridKVCacheCoordinator, "find_longest_cache_hit_per_group", agreeing_per_group)),
    "hits of groups are counted in blocks": (
        AFTER, "window", "find_longest_cache_hit_per_group",
        wrong(HybridKVCacheCoordinator, "find_longest_cache_hit_per_group",
              counting_blocks_per_group)),
    "groups cannot be looked up one by one": (
        AFTER, "window", "find_longest_cache_hit_per_group",
        gone(HybridKVCacheCoordinator, "find_longest_cache_hit_per_group")),
    "a mask says which blocks are left out": (
        AFTER, "windows of unequal blocks", "cache_full_blocks|cache_blocks|get_computed_blocks",
        wrong(BlockPool, "cache_full_blocks", caching_the_other_blocks)),
    "a state is marked with other tokens": (
        AFTER, "state", "tokens of a state",
        wrong(BlockPool, "_insert_block_hash", marking_other_tokens)),
    "a state is not offered": (
        AFTER, "state", "take_boundary_state_offloads",
        wrong(KVCacheManager, "take_boundary_state_offloads", lambda right: lambda self: {})),
    "a state is kept nowhere": (
        AFTER, "state", "cache_blocks|get_computed_blocks|state",
        wrong(MambaManager, "cache_blocks", lambda right: lambda *args, **more: None)),
    "tokens in flight are not counted": (
        AFTER, "full", "_update_after_schedule",
        wrong(Scheduler, "_update_after_schedule", counting_no_flight)),
    "a request's last step is not noted": (
        AFTER, "full", "_free_request_blocks, of a step in flight",
        wrong(Scheduler, "_update_after_schedule", noting_no_step)),
    "blocks of a step in flight are freed": (
        AFTER, "full", "_free_request_blocks, of a step in flight",
        wrong(Scheduler, "_request_blocks_can_be_freed", lambda right: lambda self, request: True)),
    "blocks of a step that is over are kept": (
        AFTER, "full", "_drain_deferred_frees",
        wrong(Scheduler, "_drain_deferred_frees", keeping_what_is_over)),
    "a failed load fails nobody": (
        AFTER, "full", "_handle_failed_recving",
        wrong(Scheduler, "_handle_failed_recving", failing_nobody)),
    "a failed load fails its request whatever the policy": (
        AFTER, "full", "_handle_failed_recving",
        wrong(Scheduler, "_handle_failed_recving", failing_everybody)),
}  # fmt: skip


@pytest.mark.parametrize("belief", WRONG)
def test_a_wrong_belief_stops_the_engine_with_a_line_that_names_it(
    belief: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    when, kind, named, change = WRONG[belief]
    if when == BEFORE:
        change(monkeypatch)
    else:
        engine = start(KINDS[kind])
        change(monkeypatch)
    with pytest.raises(ConfigError, match=named) as refused:
        self_test(start(KINDS[kind]) if when == BEFORE else engine)
    line = str(refused.value)
    assert line.startswith("vLLM's ")
    assert "\n" not in line
    assert len(line) < 600
