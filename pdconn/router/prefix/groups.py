"""The blocks of a prefix that a KV cache group needs to continue after it.  Pure.

    needs                       kinds of vLLM's ``kv_cache_spec_kind``
    WHOLE   every block         full_attention, mla_attention, sink_full_attention
    WINDOW  the last            sliding_window, sliding_window_mla
            ceil((window - 1) / block) blocks, or all from block 0
    CHUNK   the blocks of the   chunked_local_attention
            current chunk
    STATE   the last block,     mamba
            or its filled part
    NOTHING                     encoder_only_attention, cross_attention, unknown, windows and
                                chunks of unknown size, chunks that are no multiple of the block

Source: ``find_longest_cache_hit`` of vLLM's ``v1/core/single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

STORED = "storage"
"""The medium of blocks in a store: outside the engine, loaded in whole rows."""
REMOTE = "remote"
"""The medium of blocks in a store on another host, whatever the storage device."""
OUTSIDE = frozenset({STORED, REMOTE, "fs", "obj"})
"""Media outside the engine's memory: it has to load these blocks, and cannot lend them."""


class Needs(Enum):
    """The blocks that a group needs at the end of a hit."""

    WHOLE = "whole"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"
    NOTHING = "nothing"


KINDS: dict[str, Needs] = {
    "full_attention": Needs.WHOLE,
    "mla_attention": Needs.WHOLE,
    "sink_full_attention": Needs.WHOLE,
    "sliding_window": Needs.WINDOW,
    "sliding_window_mla": Needs.WINDOW,
    "chunked_local_attention": Needs.CHUNK,
    "mamba": Needs.STATE,
    "encoder_only_attention": Needs.NOTHING,
    "cross_attention": Needs.NOTHING,
    "unknown": Needs.NOTHING,
}


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A KV cache group, as events or a snapshot describe it.

    Attributes:
        kind: a key of ``KINDS``; any other counts as ``unknown``.
        window: tokens of a sliding window or of a chunk; None without one, or where the engine does
            not report it (vLLM does not for chunks).
        block_tokens: tokens per block.
        eagle: whether a hit needs one block more than it counts (EAGLE and MTP drafters
            recompute the last one).
    """

    kind: str
    window: int | None
    block_tokens: int
    eagle: bool = False

    @property
    def needs(self) -> Needs:
        """The blocks that a hit needs."""
        needs = KINDS.get(self.kind, Needs.NOTHING)
        if needs is Needs.WINDOW and not self.window:
            return Needs.NOTHING
        if needs is Needs.CHUNK and (not self.window or self.window % self.block_tokens):
            return Needs.NOTHING
        return needs

    @property
    def peeks(self) -> bool:
        """Whether a hit needs the block after it."""
        return self.eagle and self.needs in (Needs.WHOLE, Needs.WINDOW)

    @property
    def tail_blocks(self) -> int:
        """Blocks of a window or state that a hit needs at its end, and with EAGLE after it."""
        if self.needs is Needs.STATE or self.window is None:
            return 1
        return -(-(self.window - 1) // self.block_tokens) + self.peeks


def ends_anywhere(specs: Collection[GroupSpec], hash_block_tokens: int) -> bool:
    """Whether vLLM allows a hit to end after any hash block, not only after a block of every group.

    It does with states whose blocks are longer, if every group except full attention has blocks of
    one hash block.
    """
    longer = [spec for spec in specs if spec.block_tokens != hash_block_tokens]
    kinds = {spec.needs for spec in longer}
    return Needs.STATE in kinds and kinds <= {Needs.STATE, Needs.WHOLE}
