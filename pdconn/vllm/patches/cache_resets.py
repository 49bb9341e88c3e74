"""Notifies parts of the connector of resets of vLLM's prefix cache.

Leases and saves pin blocks, and vLLM refuses a reset while any block is in use; and no KV that was
lent or stored before a reset may be used after it.  vLLM has no hook for that (it calls
``reset_cache`` of connectors only if its caller requests it), so the block pool's method is
wrapped, once::

    /reset_prefix_cache, /pause?clear_cache=true, sleep ─► pool.reset_prefix_cache()
        before, the newest watcher first     saves and leases end: blocks are free
        vLLM's own                           whether it has reset the cache
        after, the oldest first              effects of the reset

Replaced: ``reset_prefix_cache`` of the block pool of one engine, which all resets call.
Checked at the start by :func:`check_resets`.
Tested by ``tests/vllm/patches/test_cache_resets.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdconn.vllm.config import ConfigError
from pdconn.vllm.patches.live import Live, changed, expect, replaced

SOURCES = {
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": (827, 871),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache": (674, 683),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.reset_prefix_cache": (393, 397),
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": (2840, 3184),
}


class _Resets:
    """Replaces a pool's method: calls watchers, the method, and watchers again."""

    def __init__(self, resetting: Callable[[], Any]) -> None:
        self._resetting = resetting
        self.before: list[Callable[[], object]] = []
        self.after: list[Callable[[bool], object]] = []

    def __call__(self) -> bool:
        for call in reversed(self.before):
            call()
        is_reset = bool(self._resetting())
        for call_with in self.after:
            call_with(is_reset)
        return is_reset


def watch_resets(
    block_pool: Any,
    *,
    before: Callable[[], object] | None = None,
    after: Callable[[bool], object] | None = None,
) -> None:
    """Call ``before`` before each reset of ``block_pool``, and ``after`` with its result.

    Raises:
        ConfigError: the pool's method takes arguments in this vLLM.
    """
    resets = block_pool.reset_prefix_cache
    if not isinstance(resets, _Resets):
        takes = list(inspect.signature(resets).parameters)
        if takes:
            hint = "this vLLM works differently, and pdconn does not support it yet"
            seen = ", ".join(takes)
            raise ConfigError("vLLM's reset_prefix_cache", "no arguments", seen, hint)
        resets = block_pool.reset_prefix_cache = _Resets(resets)
    if before is not None:
        resets.before.append(before)
    if after is not None:
        resets.after.append(after)


@contextmanager
def unwatched(block_pool: Any) -> Iterator[None]:
    """No watcher is called inside: the pool has only dummy requests."""
    resets = block_pool.reset_prefix_cache
    if not isinstance(resets, _Resets):
        raise changed("BlockPool.reset_prefix_cache", "one that is watched", type(resets).__name__)
    with replaced(resets, "before", []), replaced(resets, "after", []):
        yield


def check_resets(live: Live) -> None:
    """Check that each reset by the scheduler calls the watchers once, and leaves nothing cached.

    Raises:
        ConfigError: naming the method that works differently.
    """
    resets, seen = live.pool.reset_prefix_cache, list[bool | str]()
    resets.before.append(lambda: seen.append("before"))
    resets.after.append(seen.append)
    name = "Scheduler.reset_prefix_cache"
    with live.computed_request(live.end or live.tokens) as request:
        blocks = [block for block in live.blocks(request) if block.block_hash is not None]
        if live.is_found:
            expect("SingleTypeKVCacheManager.cache_blocks, blocks", True, bool(blocks))
        expect(f"{name}, of blocks in use", False, live.scheduler.reset_prefix_cache())
        lost = [block.block_id for block in blocks if block.block_hash is None]
        expect(f"{name}, blocks in use that it forgot", [], lost)
    expect(name, True, live.scheduler.reset_prefix_cache())
    expect(f"{name}, what the pool's method saw", ["before", False, "before", True], seen)
    kept = [block.block_id for block in blocks if block.block_hash is not None]
    expect(f"{name}, blocks that are still found", [], kept)
    found = live.manager.get_computed_blocks(live.new_request(live.tokens))[0].get_block_ids()
    expect(f"{name}, blocks of a hit", set(), set().union(*found) - {0})  # a chunk's may be null
