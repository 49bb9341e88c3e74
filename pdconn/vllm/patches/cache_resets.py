"""Resets of vLLM's prefix cache are seen by all parts that keep something of what it holds.

What is lent or being saved pins blocks, and a reset refuses while any block is in use; and nothing
that was lent or stored before a reset may be used after it.  vLLM has no hook for that (it calls
``reset_cache`` of connectors only where a caller asks for it), so we stand in front of the block
pool's method, once::

    /reset_prefix_cache, /pause?clear_cache=true, sleep ─► pool.reset_prefix_cache()
        before, the newest watcher first     saves end, leases are taken back: blocks are free
        vLLM's own                           whether it could
        after, the oldest first              what follows of it

Source: ``BlockPool.reset_prefix_cache`` in vLLM's ``v1/core/block_pool.py``, and
``Scheduler.reset_prefix_cache`` in ``v1/core/sched/scheduler.py``, 0.32 and 0.33.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pdconn.vllm.config import ConfigError


class _Resets:
    """Replaces a pool's method, and calls it between its watchers."""

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
    """See every reset of ``block_pool``: before it, and after it with whether there was one.

    Raises:
        ConfigError: this vLLM's pool is reset in another way.
    """
    resets = block_pool.reset_prefix_cache
    if not isinstance(resets, _Resets):
        takes = list(inspect.signature(resets).parameters)
        if takes:
            hint = "this vLLM works in another way, and pdconn does not know it yet"
            seen = ", ".join(takes)
            raise ConfigError("vLLM's reset_prefix_cache", "no arguments", seen, hint)
        resets = block_pool.reset_prefix_cache = _Resets(resets)
    if before is not None:
        resets.before.append(before)
    if after is not None:
        resets.after.append(after)
