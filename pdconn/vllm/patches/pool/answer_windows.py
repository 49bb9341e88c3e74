"""Windows at the ends of answers, kept in the cache for the next turn.

vLLM caches a window at the end of a prompt, so that the same prompt hits again, and none behind it,
where the next turn of the conversation continues::

    prompt and answer            ######################|~~~~~~~~~~~~~~~~~~~~~
    cached, full attention       ============================================
            window, by vLLM                       =====
            window, with this                     =====                ======
    the next turn                ######################|~~~~~~~~~~~~~~~~~~~~~|#######

So a decode engine would have to compute the whole answer again, and could not lend it.  Here the
blocks of the last window are cached when a request ends, as vLLM does where it expects a hit; they
are evicted like others.  Hits end at block boundaries of every group, so the window is kept longer
than attention needs it, by up to one token less than a block.

Used: ``BlockPool.cache_full_blocks``, as ``SingleTypeKVCacheManager.cache_blocks`` uses it.
Checked at the start by :func:`check_answers`.
Tested by ``tests/vllm/windows/test_answers.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

from pdconn.vllm.blocks.kinds import kinds_of
from pdconn.vllm.blocks.partial import PartialBlocks
from pdconn.vllm.patches.live import Live, expect
from pdconn.vllm.patches.pool.admitted_blocks import has_room_to_keep
from pdconn.vllm.patches.pool.kept_windows import keep_more_tokens
from registration.references import AttentionKind

log = logging.getLogger("pdconn.vllm")

SOURCES = {
    "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": (226, 230),
    "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.find_longest_cache_hit": (
        956,
        969,
    ),
    "vllm.v1.core.kv_cache_coordinator:SpecGroup": (594, 602),
}


@dataclass(frozen=True, slots=True)
class _Kept:
    """A manager of windows, and blocks of a request from ``first`` on that will be cached."""

    manager: Any
    first: int
    mask: list[bool]


@dataclass(slots=True)
class AnswerWindows:
    """Caches the last windows of finished requests.

    Attributes:
        managers: vLLM's, of the groups with windows, by transferred group.
        alignment: hits are multiples of so many tokens.
    """

    managers: dict[int, Any]
    alignment: int
    _partial: dict[str, PartialBlocks] = field(default_factory=dict)

    @classmethod
    def from_manager(cls, manager: Any, longest: int) -> AnswerWindows | None:
        """Before an engine's first request; None if windows cannot be cached.

        Args:
            manager: vLLM's ``KVCacheManager``.
            longest: tokens of the longest prompt, which must still fit into the pool.
        """
        # With states, and with drafters that read windows, vLLM looks up hits differently.
        config, coordinator = manager.kv_cache_config, manager.coordinator
        kinds = tuple(kinds_of(config))
        if not isinstance(coordinator, HybridKVCacheCoordinator) or AttentionKind.STATE in kinds:
            return None
        if any(group.use_eagle for group in coordinator.attention_groups):
            return None
        managers = {
            at: coordinator.single_type_managers[group]
            for at, (group, kind) in enumerate(zip(config.transfer_group_ids, kinds, strict=True))
            if kind is AttentionKind.SLIDING_WINDOW
        }
        alignments = {one.cache_hit_alignment_tokens for one in managers.values()}
        if len(alignments) != 1 or not all(one.enable_caching for one in managers.values()):
            return None
        (alignment,) = alignments
        if alignment > 1:
            if not has_room_to_keep(manager, managers.values(), alignment - 1, longest):
                log.warning(
                    "pdconn: windows at the ends of answers are not kept: the longest prompt would "
                    "not fit: max_model_len=%d blocks=%d",
                    longest,
                    manager.block_pool.num_gpu_blocks,
                )
                return None
            keep_more_tokens(managers.values(), alignment - 1)
        return cls(managers, alignment)

    def mark_partial(self, request_id: str, blocks: PartialBlocks) -> None:
        """Record that a pull has not written all of these blocks and those before."""
        self._partial[request_id] = blocks

    def keep_answer(self, request: Any, num_tokens: int) -> None:
        """Cache the last windows of a request that has computed ``num_tokens`` tokens."""
        partial = self._partial.pop(request.request_id, {})
        boundary = num_tokens // self.alignment * self.alignment
        if not boundary:
            return
        kept = list(self._kept(request.request_id, boundary, partial))
        if len(kept) < len(self.managers):
            return  # a window is incomplete, so no hit can end here
        for one in kept:
            if any(one.mask):
                one.manager.block_pool.cache_full_blocks(
                    request=request,
                    blocks=one.manager.req_to_blocks[request.request_id],
                    num_cached_blocks=one.first,
                    num_full_blocks=one.first + len(one.mask),
                    block_size=one.manager.block_size,
                    kv_cache_group_id=one.manager.kv_cache_group_id,
                    block_mask=one.mask,
                )

    def _kept(self, request_id: str, boundary: int, partial: PartialBlocks) -> Iterator[_Kept]:
        """Blocks of each group's last window that are not cached yet, if the window is complete."""
        for group, manager in self.managers.items():
            end = boundary // manager.block_size
            blocks = manager.req_to_blocks.get(request_id, ())[:end]
            reached = -(-(manager.kv_cache_spec.sliding_window - 1) // manager.block_size)
            first = max(0, end - reached)
            if len(blocks) == end and _are_whole(blocks, first, partial.get(group, -1)):
                yield _Kept(manager, first, [one.block_hash is None for one in blocks[first:]])


def _are_whole(blocks: Sequence[Any], first: int, partial: int) -> bool:
    """Whether the blocks from ``first`` on exist, behind block ``partial``."""
    return first > partial and not any(block.is_null for block in blocks[first:])


def check_answers(live: Live) -> None:
    """Check that a later request hits the windows of a finished one.

    Raises:
        ConfigError: it does not.
    """
    end, answers = live.end, live.answers
    if answers is None or not live.is_found:
        return
    look_up = live.manager.coordinator.find_longest_cache_hit_per_group
    found = [one for one in answers.managers.values() if one in live.cached]
    groups = [one.kv_cache_group_id for one in found]
    name = "BlockPool.cache_full_blocks, what a window's look-up finds"
    with live.loaded_request(end) as request:
        answers.keep_answer(request, end)
    _, hits = look_up(live.new_request(end).block_hashes, end)
    expect(name, [end] * len(groups), [hits[group] for group in groups])
