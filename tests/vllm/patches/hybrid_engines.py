"""vLLM's own scheduler, with our connector bound, over KV cache groups of every kind.

``state_of`` tells everything that a test at the start may have changed, block by block.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from pdconn.tools.lab.ports import free_ports
from pdconn.vllm.patches.self_test import SelfTest
from tests.fakes.simulated.sim_cache import CacheShape, GroupShape
from tests.vllm.patches.vllm_scheduler import Engine, engine_config, store_in, transfer_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

FULL, WINDOW, CHUNK = GroupShape(16), GroupShape(16, 40), GroupShape(16, 32, is_chunk=True)
STATE = GroupShape(16, is_state=True)

KINDS: dict[str, tuple[GroupShape, ...]] = {
    "full": (FULL,),
    "two full": (FULL, GroupShape(32)),
    "window": (FULL, WINDOW),
    "window alone": (WINDOW,),
    "long window": (FULL, GroupShape(16, 1 << 17)),
    "windows of unequal blocks": (FULL, GroupShape(64, 100), GroupShape(32, 7)),
    "window of one token": (FULL, GroupShape(16, 1)),
    "chunk": (FULL, CHUNK),
    "state": (FULL, STATE),
    "states of larger blocks": (FULL, GroupShape(64, is_state=True)),
    "state alone": (STATE,),
    "state and window": (FULL, STATE, WINDOW),
    "drafter": (FULL, WINDOW, GroupShape(16, eagle=True)),
    "drafter alone": (GroupShape(16, eagle=True),),
    "many": (FULL, *(GroupShape(16, 1000 + each) for each in range(30)), STATE),
}


def started(
    shape: CacheShape,
    role: str = "kv_both",
    *,
    store: Path | None = None,
    longest: int = 4096,
    is_caching: bool = True,
    is_async: bool = True,
    is_watched: bool = False,
    further: int = 0,
    has_scratch: bool = False,
) -> Engine:
    """An engine whose scheduler is built, and that has had no request.

    Args:
        shape: its groups, and its blocks.
        role: vLLM's ``kv_role``.
        store: the root of a store.
        longest: tokens of the longest prompt.
        is_caching: whether prefixes are cached.
        is_async: whether steps overlap.
        is_watched: with KV events, metrics of every block, and statistics.
        further: blocks of each state for drafts, and tokens that windows keep for them; below 0
            one of each state for a checkpoint.
        has_scratch: beside the groups those that no look-up finds: one of which each request has
            a single block, and a window that is computed anew.
    """
    from vllm.config import KVEventsConfig

    [port] = free_ports(1)
    extra: dict[str, Any] = {"side_channel_host": "127.0.0.1", "side_channel_port": port}
    if store is not None:
        extra["store"] = store_in(store)
    config = engine_config(transfer_config(role, **extra), is_async=is_async)
    tokens = math.lcm(*(group.block_tokens for group in shape.groups))
    config.model_config.max_model_len = longest
    config.cache_config.num_gpu_blocks = shape.num_blocks
    config.cache_config.enable_prefix_caching = is_caching
    config.cache_config.block_size = tokens
    if shape.has_states:
        config.cache_config.mamba_cache_mode = "align"
    if is_watched:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        config.observability_config.kv_cache_metrics = True
        config.observability_config.kv_cache_metrics_sample = 1.0
    finest = shape.scheme.block_tokens
    sizes = {"block_size": tokens, "hash_block_size": finest, "log_stats": is_watched}
    cache = shape.config()
    groups = [_with_further(group, further, is_caching) for group in cache.kv_cache_groups]
    if has_scratch:
        groups += _scratch_groups(tokens)
    return Engine(config, replace(cache, kv_cache_groups=groups), **sizes)


def _scratch_groups(block_tokens: int) -> list[KVCacheGroupSpec]:
    """A group with a single block for each request, and a window that is computed anew."""
    spec = CircularBufferSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.uint8
    )
    window: Any = SlidingWindowMLASpec(
        block_size=block_tokens,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.uint8,
        sliding_window=24,
        bounded_replay=True,
    )
    return [KVCacheGroupSpec(["scratch"], spec), KVCacheGroupSpec(["replayed"], window)]


def _with_further(group: Any, further: int, is_caching: bool) -> Any:
    spec = group.kv_cache_spec
    if isinstance(spec, MambaSpec):
        mode = "align" if is_caching else "none"
        spec = replace(spec, mamba_cache_mode=mode, num_speculative_blocks=max(0, further))
        spec = replace(spec, num_prefill_checkpoint_blocks=int(further < 0))
    elif isinstance(spec, SlidingWindowSpec):
        spec = replace(spec, extra_retained_tokens=max(0, further))
    return replace(group, kv_cache_spec=spec)


def drawn(rng: Random) -> tuple[CacheShape, dict[str, Any]]:
    """Groups of any kinds and sizes, and settings of an engine that has them."""
    block = rng.choice((8, 16, 32, 64))
    windows = (2, 7, block, block + 1, 3 * block, 100, 4096)
    kinds = rng.choices(("full", "window", "state"), (4, 3, 2), k=rng.randint(1, 4))
    groups = []
    for kind in kinds:
        tokens = block * rng.choice((1, 1, 1, 2, 4))
        window = rng.choice(windows) if kind == "window" else None
        has_drafter = kind != "state" and rng.random() < 0.1
        groups.append(GroupShape(tokens, window, has_drafter, is_state=kind == "state"))
    if len({group.block_tokens for group in groups}) == 1 and rng.random() < 0.3:
        chunk = groups[0].block_tokens * rng.choice((1, 2, 8))
        groups.append(GroupShape(groups[0].block_tokens, chunk, is_chunk=True))
    shape = CacheShape(
        tuple(groups), rng.choice((20, 60, 400, 3000)), retention=rng.choice((None, None, 0))
    )
    how = {
        "role": rng.choice(("kv_both", "kv_producer", "kv_consumer")),
        "longest": rng.choice((32, 100, 2048, 100_000)),
        "is_async": rng.random() < 0.7,
        "is_caching": rng.random() < 0.85,
        "has_scratch": rng.random() < 0.2,
        "further": rng.choice((0, 0, 1, 2, -1)),
    }
    return shape, how


def self_test(engine: Engine) -> None:
    """As the engine runs it once its workers are registered; runs it again if asked again."""
    ours = engine.connector._scheduler
    tested: SelfTest = ours._self_test
    tested._is_over = False
    pulling = ours.parts.pulling
    tested.run_once(None if pulling is None else pulling.answer_windows)


def state_of(engine: Engine) -> dict[str, Any]:
    """All that the block manager, its pool and the scheduler hold, block by block."""
    scheduler = engine.scheduler
    manager = scheduler.kv_cache_manager
    pool, managers = manager.block_pool, manager.coordinator.single_type_managers
    found: dict[str, Any] = {
        "free list": _free_list(pool),
        "number of free blocks": pool.get_num_free_blocks(),
        "blocks": [repr(block) for block in pool.blocks],
        "found by hash": dict(pool.cached_block_hash_to_block._cache),
        "events": list(pool.kv_event_queue),
        "watchers": [vars(pool.reset_prefix_cache)[each].copy() for each in ("before", "after")],
    }
    if pool.metrics_collector is not None:
        found["metrics"] = repr(vars(pool.metrics_collector))
    owners = {"scheduler": scheduler, "manager": manager, "pool": pool}
    owners |= {f"group {number}": one for number, one in enumerate(managers)}
    for name, owner in owners.items():
        for attribute, value in vars(owner).items():
            if attribute not in ("blocks", "cached_block_hash_to_block"):
                found[f"{name}.{attribute}"] = id(value), _contents(value)
    return found


def _free_list(pool: Any) -> list[int]:
    """Forwards, and back again."""
    queue = pool.free_block_queue
    numbers = []
    block = queue.fake_free_list_head.next_free_block
    while block is not queue.fake_free_list_tail:
        numbers.append(block.block_id)
        block = block.next_free_block
    while block.prev_free_block is not queue.fake_free_list_head:
        block = block.prev_free_block
        numbers.append(block.block_id)
    return numbers


def _contents(value: Any) -> str:
    plain = (bool, int, float, str, dict, set, list, tuple, deque)
    is_plain = isinstance(value, plain) or type(value).__name__.endswith("Stats")
    return repr(value)[:10_000] if is_plain else ""
