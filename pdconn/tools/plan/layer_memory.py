"""One rank's fictional KV memory: block rows of groups, in a named layout.

A layout is a memory order from outer to inner: L(ayer), B(lock), H(ead), N (tokens),
C(ontent of a row, K and V together).  Groups overlay each other from byte 0 of one
allocation, as in vLLM, and its rows are as wide as those of the widest group::

    BLHNC   group 0   | L0 | L1 | L2 |    group 1   | L3 | L4 |    |
            shares of unequal pages       | L0 | L1 | i0 i1 |      |

vLLM asks every attention backend for the layouts that its kernels support, best first; most support
any.  Among the common ones it uses the connector's preference
(:data:`~pdconn.planning.layouts.PREFERRED`) if possible, and the first otherwise.  With an MLA
latent there is one head, and no preference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pdconn.planning.layouts import PREFERRED
from pdconn.tools.plan.grouping import LayerGroup, SharedTable
from pdconn.tools.plan.model_shape import StateSort
from registration.references import AttentionChunk, GroupMemory, LayerMemory, StateChunk
from transport import Memory

_DEFAULT = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")
"""vLLM's order without a preference; backends whose pages need blocks outermost name BLHNC."""

OFFERED: Mapping[str, tuple[str, ...] | None] = MappingProxyType(
    {
        "FLASH_ATTN": None,
        "TRITON_ATTN": None,
        "FLASHINFER": None,
        "FLASHINFER_SM100": ("LBHNC", "BLHNC"),
        "B12X": ("LBHNC", "BLHNC"),
        "FLEX_ATTENTION": ("LBNHC",),
        "HPC_ATTN": ("LBNHC",),
        "TURBOQUANT": ("LBNHC",),
        "CPU_ATTN": ("LBHNC",),
        "ROCM_ATTN": ("LHBNC", "LBHNC"),
        "ROCM_AITER_FA": ("LBHNC", "LHBNC"),
        "ROCM_AITER_UNIFIED_ATTN": ("LBHNC",),
    }
)
"""Layouts that a backend's kernels support, best first; None for any.

FlashInfer occurs twice, as its kernels for data-centre Blackwell support fewer.  Of ROCm's backends
pdconn uses the first: the others run without their native kernels.
"""


def chosen_layout(possible: Sequence[str], backend: str, *, is_latent: bool) -> str | None:
    """vLLM's choice among the possible layouts of pages; None if the backend supports none.

    Args:
        backend: a key of :data:`OFFERED`; empty for one that supports any layout.
        is_latent: whether all attention keeps latents, with one head.

    >>> chosen_layout(("LBHNC", "LBNHC", "BLHNC"), "", is_latent=False)
    'LBHNC'
    >>> chosen_layout(("LBHNC", "LBNHC", "BLHNC"), "FLEX_ATTENTION", is_latent=False)
    'LBNHC'
    """
    # The backend's order, unless the connector's preference is among its layouts.  ROCm's backends
    # and latents have none.
    offered = (OFFERED[backend] if backend else None) or _DEFAULT
    candidates = [layout for layout in offered if layout in possible]
    if not is_latent and not backend.startswith("ROCM") and PREFERRED in candidates:
        return PREFERRED
    return candidates[0] if candidates else None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's layers, and its share of the heads.

    ``stage`` are the layers of its pipeline stage; ``base`` is the first address of its fictional
    memory.
    """

    stage: range
    tp_rank: int
    tp: int
    base: int

    def heads(self, total: int) -> tuple[int, int]:
        """First head and number of heads held, out of ``total``; replicated above that."""
        if total >= self.tp:
            return self.tp_rank * total // self.tp, total // self.tp
        return total * self.tp_rank // self.tp, 1


def rank_memory(
    groups: Sequence[LayerGroup], layout: str, num_blocks: int, place: RankPlace
) -> tuple[GroupMemory, ...]:
    """A rank's groups in memory; a group without a layer on this stage is empty."""
    here = [on_stage(group, place.stage) for group in groups]
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


def on_stage(group: LayerGroup, stage: range) -> list[SharedTable]:
    """The non-empty shares of a group within the layers of one pipeline stage."""
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
        """Distance from this share to the next one in the group."""
        width = self.share.page_nbytes * len(self.share.layers)
        return width if self.layout[0] == "B" else width * self.num_blocks

    def layers(self, allocation: Memory, offset: int) -> list[LayerMemory]:
        """Every layer of the share, the first one ``offset`` bytes into the allocation."""
        chunks, strides = self._page()
        return [
            LayerMemory(
                self.share.sort.layer_name(layer),
                allocation,
                offset + index * strides["L"],
                strides["B"],
                self.num_blocks,
                chunks,
            )
            for index, layer in enumerate(self.share.layers)
        ]

    def _page(self) -> tuple[tuple[AttentionChunk | StateChunk, ...], dict[str, int]]:
        """The contents of a page, and the strides of the layout's letters."""
        sort = self.share.sort
        if isinstance(sort, StateSort):
            chunks = sort.state.state_chunks(self.place.tp_rank, self.place.tp)
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
