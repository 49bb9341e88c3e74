"""Local hits of full attention that windows do not have: a pull completes them.

vLLM uses the part of a prompt that every KV cache group holds.  A window's blocks are cached at the
end of a prompt, not where two prompts diverge, so of a prefix shared with another prompt full
attention holds everything and the windows nothing::

    tokens held      full attention  ################........
                     window          ........................
                     pulled          without this module all of it; with it what is behind
                                     the #, and the window at the end

vLLM supports that for states only: its scheduler calls
``KVCacheManager.get_computed_blocks_for_connector`` if a connector
``supports_divergent_local_hybrid_hits``, and uses the hit of all groups if the connector then loads
nothing.  Here the bound manager's method does the same for windows, for requests whose pull is
certain; other requests get vLLM's own result.

Replaced: ``get_computed_blocks_for_connector`` of the block manager of one engine.
Checked at the start by :func:`check_hits`.
Tested by ``tests/vllm/windows/test_lagging.py`` and ``tests/vllm/lends/test_held.py``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.kv_cache_interface import KVCacheConfig

from pdconn.vllm.blocks.kinds import kinds_of, may_lag
from pdconn.vllm.patches.live import Live, expect
from pdconn.vllm.patches.pool.kept_windows import has_window
from pdconn.vllm.patches.pool.uncached_blocks import never_cache
from registration.references import AttentionKind

log = logging.getLogger("pdconn.vllm")

SOURCES = {
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": (264, 266),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks_for_connector": (323, 330),
    "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit_per_group": (
        933,
        943,
    ),
    "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit": (796, 806),
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit": (558, 664),
}

_HOOK = "get_computed_blocks_for_connector"
_PARAMETERS = (["request"], ["request", "max_cache_hit_length"])
_WINDOWED = {AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL}


def complete_windows(manager: Any, pulled_until: Callable[[Any], int]) -> bool:
    """Let pulls complete hits of full attention that windows do not have.

    Args:
        manager: vLLM's ``KVCacheManager``.
        pulled_until: returns the tokens up to which a request's pull loads everything behind its
            local hit, if the pull is certain to be tried; 0 otherwise.

    Returns:
        Whether the model has such groups, and the manager's method was replaced.
    """
    coordinator = manager.coordinator
    if not _lags(manager):
        return False
    agreed = getattr(manager, _HOOK, None)
    found = None if agreed is None else list(inspect.signature(agreed).parameters)
    if found not in _PARAMETERS or coordinator.full_attention_group_id is None:
        log.warning(
            "pdconn: this vLLM looks up hits differently, so prompts that share a prefix are "
            "pulled whole: method=%s expected=%s got=%s",
            _HOOK,
            _PARAMETERS[-1],
            found,
        )
        return False
    setattr(manager, _HOOK, _Lookup(manager, agreed, pulled_until))
    return True


def _lags(manager: Any) -> bool:
    """Whether windows can hold less of a prompt than full attention, and there are no states."""
    kinds = set(kinds_of(manager.kv_cache_config))
    if AttentionKind.FULL not in kinds or not kinds & _WINDOWED or AttentionKind.STATE in kinds:
        return False
    if not isinstance(manager.coordinator, HybridKVCacheCoordinator):
        return False
    return not any(group.use_eagle for group in manager.coordinator.attention_groups)


class _Lookup:
    """Replaces the manager's method: returns the hit of full attention if a pull completes it."""

    def __init__(self, manager: Any, agreed: Any, pulled_until: Callable[[Any], int]) -> None:
        self._manager = manager
        self._agreed = agreed
        self._pulled_until = pulled_until
        self._full: int = manager.coordinator.full_attention_group_id

    def __call__(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int, bool]:
        limits = () if max_cache_hit_length is None else (max_cache_hit_length,)
        agreed: tuple[Any, int, int, bool] = self._agreed(request, *limits)
        if not self._manager.prefix_cache_lookup_enabled(request):
            return agreed
        # At least one token is left to pull; otherwise there would be no pull.
        limit = min((self._pulled_until(request) - 1, *limits))
        if limit <= agreed[1]:
            return agreed
        look_up = self._manager.coordinator.find_longest_cache_hit_per_group
        computed, hits = look_up(request.block_hashes, limit)
        full = hits[self._full]
        if full <= agreed[1]:
            return agreed
        if full < max(hits):  # a chunk counts as held before its beginning; full may be evicted
            computed, _ = look_up(request.block_hashes, full)
        return self._manager.create_kv_cache_blocks(computed), full, 0, True


def held_by_all(manager: Any, request: Any, num_local: int) -> int:
    """Tokens that every group holds of a request's prompt, of vLLM's hit of ``num_local``."""
    # With states, and with windows that a pull completes, vLLM's hit is that of full attention.
    config = manager.kv_cache_config
    if not may_lag(config) and not isinstance(getattr(manager, _HOOK), _Lookup):
        return num_local
    agreed = agreed_tokens(manager, request)
    # Connectors are given hits in whole blocks.
    size = max(group.kv_cache_spec.block_size for group in config.kv_cache_groups)
    return min(num_local, agreed - agreed % size)


def held_tokens(
    config: KVCacheConfig, blocks: Sequence[Sequence[Any]], num_local: int
) -> tuple[int, ...]:
    """Tokens that each transferred group of a request holds, of a local hit.

    vLLM looks up one group of full attention; another one may hold less.

    Args:
        config: the engine's groups.
        blocks: vLLM's blocks of the request by group, just allocated: those of a hit have a hash.
        num_local: tokens of full attention's hit.

    Returns:
        By group; for states ``num_local``, since they are always pulled.
    """
    held = []
    for group, kind in zip(config.transfer_group_ids, kinds_of(config), strict=True):
        size = config.kv_cache_groups[group].kv_cache_spec.block_size
        whole = 0 if kind is AttentionKind.STATE else num_local // size
        hit = _behind_the_last_hit(blocks[group][:whole])
        held.append(num_local if hit == whole else hit * size)
    return tuple(held)


def _behind_the_last_hit(blocks: Sequence[Any]) -> int:
    """Number of blocks up to the last one with a hash; 0 if a window has a hole before it."""
    for at in range(len(blocks), 0, -1):
        block = blocks[at - 1]
        if block.is_null:
            return 0
        if block.block_hash is not None:
            return at
    return 0


def agreed_tokens(manager: Any, request: Any) -> int:
    """Tokens of a request's prompt that every group holds now."""
    return int(manager.get_computed_blocks(request)[1])


def agreed_hit(manager: Any, request: Any, limit: int) -> tuple[Sequence[Sequence[Any]], int]:
    """The hit of a request in all groups, up to ``limit`` tokens: blocks by group, and tokens."""
    found, tokens, *_ = manager.coordinator.find_longest_cache_hit(request.block_hashes, limit)
    return found, int(tokens)


def blocks_of_hit(manager: Any, request: Any, limit: int) -> tuple[list[int], int]:
    """Blocks without which a finished request's tokens would not hit again.

    Args:
        manager: vLLM's ``KVCacheManager``.
        request: vLLM's ``Request``, which still has its blocks.
        limit: tokens up to which it may hit.

    Returns:
        Block ids, of all groups, and the tokens of the hit.
    """
    found, tokens = agreed_hit(manager, request, limit)
    blocks = [one.block_id for group in found for one in group if not one.is_null]
    # Where a drafter reads a group, vLLM finds one block more than it uses.
    for one in manager.coordinator.single_type_managers if tokens else ():
        further = one.req_to_blocks.get(request.request_id, ())[tokens // one.block_size :][:1]
        if one.use_eagle:
            blocks += [block.block_id for block in further if block.block_hash is not None]
    return blocks, tokens


def check_hits(live: Live) -> None:
    """Check that look-ups find computed blocks, and the tokens that each group holds.

    Raises:
        ConfigError: naming the look-up that works differently.
    """
    coordinator, end = live.manager.coordinator, live.end
    if isinstance(coordinator, HybridKVCacheCoordinator):
        name = "HybridKVCacheCoordinator.attention_groups, use_eagle"
        said = any(group.use_eagle is True for group in coordinator.attention_groups)
        expect(name, any(one.use_eagle for one in live.cached), said)
    if not live.is_found:
        return
    with live.computed_request(end) as request:
        tables = [list(one.req_to_blocks[request.request_id]) for one in live.managers]
    other = live.new_request(live.tokens)
    expect("KVCacheManager.get_computed_blocks", end, agreed_tokens(live.manager, other))
    found, tokens = agreed_hit(live.manager, other, end)
    expect("KVCacheCoordinator.find_longest_cache_hit", end, tokens)
    for hit, table in zip(found, tables, strict=True):
        numbers = {block.block_id for block in hit if not block.is_null}
        strange = sorted(numbers - {block.block_id for block in table})
        expect("KVCacheCoordinator.find_longest_cache_hit, other blocks", [], strange)
    live.forget_cached()
    # Only sliding windows that are cached can lag: a chunk that has just ended needs no block.
    config = live.manager.kv_cache_config
    kinds = zip(config.transfer_group_ids, kinds_of(config), strict=True)
    may_lag = any(
        kind is AttentionKind.SLIDING_WINDOW and live.managers[group] in live.cached
        for group, kind in kinds
    )
    if live.num_segments > 1 and may_lag and _lags(live.manager):
        _check_a_lagging_window(live)


def _check_a_lagging_window(live: Live) -> None:
    """Check that full attention's hit is found where windows hold nothing, and that both differ."""
    manager, half, whole = live.manager, live.segment, 2 * live.segment
    config = manager.kv_cache_config
    groups = {at: live.managers[group] for at, group in enumerate(config.transfer_group_ids)}
    # Scratch memory of requests is transferred, too, but never hit.
    groups = {at: one for at, one in groups.items() if one in live.cached}
    windows = {at: half // one.block_size - 1 for at, one in groups.items() if has_window(one)}
    with live.loaded_request(half) as request:
        never_cache(manager, config, request.request_id, windows)
        manager.cache_blocks(request, half)
    agreed = getattr(type(manager), _HOOK).__get__(manager)
    hit, full, *others = _Lookup(manager, agreed, lambda request: whole + 1)(
        live.new_request(live.tokens)
    )
    name = "HybridKVCacheCoordinator.find_longest_cache_hit_per_group"
    expect(f"{name}, full attention", [half, 0, True], [full, *others])
    with live.loaded_request(whole, hit=hit, held=half) as request:
        blocks = manager.get_blocks(request.request_id).blocks
        held = held_tokens(config, blocks, half)
    kinds = list(kinds_of(config))
    expected = {at: half if kinds[at] is AttentionKind.FULL else 0 for at in groups}
    seen = {at: held[at] for at in groups}
    expect("KVCacheManager.allocate_slots, tokens held by group", expected, seen)
