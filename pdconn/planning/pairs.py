"""Pairs of sub-blocks: which of ours is filled from which of theirs, by token position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdconn.planning.errors import BlockOutOfRange, MissingBlock
from pdconn.planning.template import I64, Template
from pdconn.protocol.ticket import BlockList


@dataclass(frozen=True, slots=True)
class Located:
    """Sub-blocks of one side, by number from the beginning of the prompt.

    ``per_block`` of them make up a block, and ``blocks`` says which block that is.
    """

    wanted: range
    per_block: int
    blocks: BlockList

    def arrays(self) -> tuple[I64, I64 | None]:
        """Block id (0 where the list has none) and index in the block of each, shape (n,).

        Blocks that are not divided have no index, and their ids are a piece of the list itself.
        """
        ids, here = self.blocks.array, self._piece()
        if here is not None:
            return ids[here], None
        numbers = np.arange(self.wanted.start, self.wanted.stop, dtype=np.int64)
        position = numbers // self.per_block - self.blocks.first
        inside = (position >= 0) & (position < len(ids))
        if inside.all():
            found = ids[position]
        else:
            found = np.zeros(len(numbers), dtype=np.int64)
            found[inside] = ids[position[inside]]
        return found, None if self.per_block == 1 else numbers % self.per_block

    def lists(self) -> tuple[Sequence[int], Sequence[int] | None]:
        """The same without arrays."""
        ids, here = self.blocks.ids, self._piece()
        if here is not None:
            return ids[here], None
        first, per_block, count = self.blocks.first, self.per_block, len(self.blocks.ids)
        positions = [number // per_block - first for number in self.wanted]
        found = [ids[at] if 0 <= at < count else 0 for at in positions]
        return found, None if per_block == 1 else [number % per_block for number in self.wanted]

    def _piece(self) -> slice | None:
        """Where in the list of blocks they are, if they are blocks and all of them are there."""
        start, stop = self.wanted.start - self.blocks.first, self.wanted.stop - self.blocks.first
        if self.per_block == 1 and 0 <= start <= stop <= len(self.blocks.ids):
            return slice(start, stop)
        return None


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sub-blocks to move: the first of ours is filled from the first of theirs, and so on.

    Attributes:
        first_token: of the prompt, in the first of them.
        holes: sub-blocks before the window; ``hits`` are held already.
    """

    ours: Located
    theirs: Located
    first_token: int
    holes: int
    hits: int

    def __len__(self) -> int:
        return len(self.ours.wanted)


def check_ids(template: Template, pairs: Pairs) -> None:
    """Name what is wrong with the blocks of ``pairs``, if something is.

    Raises:
        MissingBlock: the first token that has no block on one side.
        BlockOutOfRange: the highest id of one side.
    """
    group = f"group {template.our_group}"
    ours, theirs = pairs.ours.arrays()[0], pairs.theirs.arrays()[0]
    for ids, missing in ((ours, "have no block of ours"), (theirs, "are needed and not lent")):
        if not ids.all():
            at = pairs.first_token + int(np.argmin(ids != 0)) * template.sub_block_tokens
            raise MissingBlock(f"{group}: tokens from {at} on {missing}")
    for side, ids, num_blocks in (
        ("ours", ours, template.our_num_blocks),
        ("theirs", theirs, template.their_num_blocks),
    ):
        highest = int(ids.max())
        if highest >= num_blocks:
            raise BlockOutOfRange(f"{group}: block id, {side} {highest} of {num_blocks} blocks")
