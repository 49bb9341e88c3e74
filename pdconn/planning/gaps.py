"""What a pull or a load leaves of the blocks that it fills, so that the rest can be zeroed.

vLLM zeroes new blocks where stale bytes could be read: beside states, and in caches of several
precisions.  It leaves out the groups that a connector says it loads, whose blocks must then be
written whole.  A transfer moves sub-blocks, and ends with the one that holds the last token::

    our block of 64 tokens       |             4             |             5             |
    their blocks of 16           |  .   | 0    | 1    | 2    | 3    | 4    |             |
    pulled, window 60, up to 100          ############################
    gaps                          ^^^^^^                              ^^^^^^^^^^^^^^^^^^^^

The same where a backend splits the engine's blocks, and only some of the parts are needed.  Only
blocks from the first lacking token on are ours to write; those before are held, and may be others'
as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pdconn.planning.errors import BlockOutOfRange
from pdconn.planning.template import I64, Template
from pdconn.protocol.ticket import BlockList
from transport import HOST, Device
from transport.types import U64, merge_runs


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Byte runs of our memory: addresses and sizes, uint64 of shape (n,), ascending."""

    local: U64
    nbytes: U64
    device: Device

    def __len__(self) -> int:
        return len(self.local)

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())


_NONE = np.empty(0, dtype=np.uint64)
NO_GAPS = Gaps(_NONE, _NONE, HOST)


def sub_block_gaps(
    template: Template, blocks: BlockList, lacking: range, pulled: range
) -> tuple[I64, I64] | None:
    """Blocks of ours, and the sub-blocks in them, that are listed and not pulled.

    Args:
        template: of the group and a rank of theirs.
        blocks: the group's.
        lacking: tokens that we do not hold; there is one at least.
        pulled: sub-blocks that are moved.

    Raises:
        BlockOutOfRange: an id beyond our cache.
    """
    per_block = template.our_block_tokens // template.sub_block_tokens
    first = max(blocks.first * per_block, -(-lacking.start // template.sub_block_tokens))
    end = (blocks.first + len(blocks.ids)) * per_block
    before, behind = range(first, min(pulled.start, end)), range(max(first, pulled.stop), end)
    if not (before or behind):  # the usual case
        return None
    numbers = np.fromiter(chain(before, behind), np.int64, len(before) + len(behind))
    ids = blocks.array[numbers // per_block - blocks.first]
    listed = ids != 0
    ids, numbers = ids[listed], numbers[listed]
    if not len(ids):
        return None
    highest = int(ids.max())
    if highest >= template.our_num_blocks:
        where = f"group {template.our_group}: block id, ours"
        raise BlockOutOfRange(f"{where} {highest} of {template.our_num_blocks} blocks")
    return ids, numbers % per_block


def gaps_at(found: Sequence[tuple[Template, I64, I64]], device: Device) -> Gaps:
    """The runs of sub-blocks: templates, and ids and sub-blocks of each."""
    if not found:
        return NO_GAPS
    starts, sizes = [], []
    for template, ids, subs in found:
        side = template.ours
        table = ids[:, None] * side.stride + subs[:, None] * side.step + side.start
        starts.append(table.ravel())
        sizes.append(np.broadcast_to(template.nbytes, table.shape).ravel())
    local, nbytes = np.concatenate(starts), np.concatenate(sizes)
    order = np.argsort(local)
    local, nbytes = local[order], nbytes[order]
    if (merged := merge_runs(nbytes, local)) is not None:
        kept, nbytes = merged
        local = local[kept]
    return Gaps(local.astype(np.uint64), nbytes.astype(np.uint64), device)
