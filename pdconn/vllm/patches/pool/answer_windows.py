"""Windows at the ends of answers, kept in the cache for the next turn.

vLLM keeps what a window needs where a prompt ended, so that the same prompt hits again, and
nothing behind it, where the next turn of the conversation goes on::

    prompt and answer            ######################|~~~~~~~~~~~~~~~~~~~~~
    cached, full attention       ============================================
            window, by vLLM                       =====
            window, with this                     =====                ======
    the next turn                ######################|~~~~~~~~~~~~~~~~~~~~~|#######

So a decode engine would have to compute the whole answer again, and could not lend it.  Here the
blocks of the last window are cached when a request ends, as vLLM would at a place that it expects
a hit at; they are evicted like others.  A hit ends where a block of every group does, so that up
to a block's tokens less one of the window are kept longer than attention needs them.

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
    """A manager of windows, and blocks of a request from ``first`` on that are to be cached."""

    manager: Any
    first: int
    mask: list[bool]


@dataclass(slots=True)
class AnswerWindows:
    """Caches the last window of requests that end.

    Attributes:
        managers: vLLM's, of the groups with windows, by transferred group.
        alignment: a hit is a multiple of so many tokens.
    """

    managers: dict[int, Any]
    alignment: int
    _partial: dict[str, PartialBlocks] = field(default_factory=dict)

    @classmethod
    def of(cls, manager: Any, longest: int) -> AnswerWindows | None:
        """For an engine before its first request; None if its cache has nothing to keep.

        Beside states, and with drafters that read windows, vLLM looks hits up in other ways.

        Args:
            manager: vLLM's ``KVCacheManager``.
            longest: tokens of the longest prompt, for which there must be room all the same.
        """
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
                    "pdconn: windows at the ends of answers are not kept, there is hardly room for "
                    "one prompt of the longest: max_model_len=%d blocks=%d",
                    longest,
                    manager.block_pool.num_gpu_blocks,
                )
                return None
            keep_more_tokens(managers.values(), alignment - 1)
        return cls(managers, alignment)

    def mark_partial(self, request_id: str, blocks: PartialBlocks) -> None:
        """Of these blocks, and those before, a pull has not written everything."""
        self._partial[request_id] = blocks

    def keep_answer(self, request: Any, num_tokens: int) -> None:
        """A request is about to leave; ``num_tokens`` tokens were computed, or 0 if that failed."""
        partial = self._partial.pop(request.request_id, {})
        boundary = num_tokens // self.alignment * self.alignment
        if not boundary:
            return
        kept = list(self._kept(request.request_id, boundary, partial))
        if len(kept) < len(self.managers):
            return  # some window is not there, so that no hit can end here
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
        """By group what of its last window is not cached yet, where all of that is there."""
        for group, manager in self.managers.items():
            end = boundary // manager.block_size
            blocks = manager.req_to_blocks.get(request_id, ())[:end]
            reached = -(-(manager.kv_cache_spec.sliding_window - 1) // manager.block_size)
            first = max(0, end - reached)
            if len(blocks) == end and _are_whole(blocks, first, partial.get(group, -1)):
                yield _Kept(manager, first, [one.block_hash is None for one in blocks[first:]])


def _are_whole(blocks: Sequence[Any], first: int, partial: int) -> bool:
    """Whether the blocks from ``first`` on are there, and behind block ``partial``."""
    return first > partial and not any(block.is_null for block in blocks[first:])


def check_answers(live: Live) -> None:
    """Whether the windows of a request that ends are found by a later one.

    Raises:
        ConfigError: they are not, or were found before.
    """
    end, answers = live.end, live.answers
    if answers is None or not live.is_found:
        return
    look_up = live.manager.coordinator.find_longest_cache_hit_per_group
    found = [one for one in answers.managers.values() if one in live.cached]
    groups = [one.kv_cache_group_id for one in found]
    name = "BlockPool.cache_full_blocks, what a window's look-up finds"
    with live.loaded(end) as request:
        answers.keep_answer(request, end)
    _, hits = look_up(live.request(end).block_hashes, end)
    expect(name, [end] * len(groups), [hits[group] for group in groups])
