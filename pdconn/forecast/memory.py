"""One rank's fictional KV memory: block rows of groups, in a named layout.

A layout is a memory order from outer to inner: L(ayer), B(lock), H(ead), N (tokens),
C(ontent of a row, K and V together).  Groups overlay each other from byte 0 of one
allocation, as in vLLM, and its rows are as wide as those of the widest group::

    BLHNC   group 0   | L0 | L1 | L2 |    group 1   | L3 | L4 |    |
            shares of unequal pages       | L0 | L1 | i0 i1 |      |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdconn.forecast.grouping import LayerGroup, SharedTable
from pdconn.forecast.model import StateSort
from registration.references import AttentionChunk, GroupMemory, LayerMemory, StateChunk
from transport import Memory

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's layers, and its share of the heads.

    ``stage`` are the layers of its pipeline stage; ``base`` the first address of its
    fictional memory.
    """

    stage: range
    tp_rank: int
    tp: int
    base: int

    def heads(self, total: int) -> tuple[int, int]:
        """First head and number of heads held, of ``total``; replicated beyond them."""
        if total >= self.tp:
            return self.tp_rank * total // self.tp, total // self.tp
        return total * self.tp_rank // self.tp, 1


def rank_memory(
    groups: Sequence[LayerGroup], layout: str, num_blocks: int, place: RankPlace
) -> tuple[GroupMemory, ...]:
    """A rank's groups in memory; a group without a layer on this stage is empty."""
    here = [_on_stage(group, place.stage) for group in groups]
    row = max(sum(s.page_nbytes * len(s.layers) for s in shares) for shares in here)
    allocation = Memory(place.base, row * num_blocks)
    made = []
    for group, shares in zip(groups, here, strict=True):
        layers: list[LayerMemory] = []
        offset = 0
        for share in shares:
            region = _Region(share, group.block_tokens, layout, num_blocks, row, place)
            layers += region.layers(allocation, offset)
            offset += region.nbytes
        made.append(
            GroupMemory(
                group.kind, group.window, group.block_tokens, tuple(layers), group.compress_ratio
            )
        )
    return tuple(made)


def _on_stage(group: LayerGroup, stage: range) -> list[SharedTable]:
    shares = [
        SharedTable(share.sort, tuple(n for n in share.layers if n in stage), share.page_nbytes)
        for share in group.shares
    ]
    return [share for share in shares if share.layers]


@dataclass(frozen=True, slots=True)
class _Region:
    """The pages of one share: side by side in a block row, or each a region of its own."""

    share: SharedTable
    block_tokens: int
    layout: str
    num_blocks: int
    row_nbytes: int
    place: RankPlace

    @property
    def nbytes(self) -> int:
        """Distance from this share to the next one of the group."""
        width = self.share.page_nbytes * len(self.share.layers)
        return width if self.layout[0] == "B" else width * self.num_blocks

    def layers(self, allocation: Memory, offset: int) -> list[LayerMemory]:
        """Every layer of the share, the first one ``offset`` bytes into the allocation."""
        chunks, strides = self._page()
        return [
            LayerMemory(
                self.share.sort.name(layer),
                allocation,
                offset + index * strides["L"],
                strides["B"],
                self.num_blocks,
                chunks,
            )
            for index, layer in enumerate(self.share.layers)
        ]

    def _page(self) -> tuple[tuple[AttentionChunk | StateChunk, ...], dict[str, int]]:
        """What a page holds, and the strides of the layout's letters."""
        sort = self.share.sort
        if isinstance(sort, StateSort):
            chunks = sort.state.chunks(self.place.tp_rank, self.place.tp)
            return chunks, self._strides(1, 1, self.share.page_nbytes)
        first_head, heads = self.place.heads(sort.heads)
        rows = self.block_tokens // sort.row_tokens
        strides = self._strides(heads, rows, sort.row_nbytes)
        nbytes = rows * sort.row_nbytes
        chunk = AttentionChunk(
            heads, nbytes, strides["H"], strides["N"], sort.row_nbytes, first_head
        )
        return (chunk,), strides

    def _strides(self, heads: int, rows: int, nbytes: int) -> dict[str, int]:
        layers = len(self.share.layers)
        sizes = {"L": layers, "B": self.num_blocks, "H": heads, "N": rows, "C": nbytes}
        strides: dict[str, int] = {}
        dense = 1
        for letter in reversed(self.layout):
            strides[letter] = dense
            dense *= sizes[letter]
        if self.layout[0] == "B":
            strides["B"] = self.row_nbytes
        return strides
