"""KV memory of one rank of an engine shape, allocated as by an engine; needs torch.

A test compares it, address by address, with ``pdconn plan`` for the same shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.grouping import LayerGroup, SharedTable
from pdconn.tools.plan.layer_memory import RankPlace, on_stage
from pdconn.tools.plan.model_shape import StateSort
from registration.allocation import (
    AttentionTensor,
    GroupPages,
    KVCacheAllocation,
    LayerPages,
    StateTensor,
    StateTensors,
    allocate_in,
    attention_in,
)


def allocate_rank(
    engine: EngineShape, rank: int, num_blocks: int, empty: Callable[[int], torch.Tensor]
) -> KVCacheAllocation:
    """Memory for ``num_blocks`` blocks of ``rank``, from ``empty``; groups overlay, as in vLLM."""
    place = engine.places()[rank]
    groups = [_group_pages(group, engine.layout, num_blocks, place) for group in engine.groups]
    return allocate_in(engine.layout, groups, num_blocks, overlay=True, empty=empty)


def _group_pages(group: LayerGroup, layout: str, num_blocks: int, place: RankPlace) -> GroupPages:
    layers: list[LayerPages] = []
    for share in on_stage(group, place.stage):
        content = _content(share, group.block_tokens, layout, num_blocks, place)
        padding = share.page_nbytes - content.page_nbytes
        layers += [
            LayerPages(share.sort.layer_name(layer), content, share.page_nbytes, padding)
            for layer in share.layers
        ]
    return GroupPages(
        group.kind, group.window, group.block_tokens, tuple(layers), group.compress_ratio
    )


def _content(
    share: SharedTable, block_tokens: int, layout: str, num_blocks: int, place: RankPlace
) -> AttentionTensor | StateTensors:
    sort = share.sort
    if isinstance(sort, StateSort):
        chunks = sort.state.state_chunks(place.tp_rank, place.tp)
        return StateTensors(
            tuple(
                # Each part is a row: ranks of another TP size divide the row among themselves.
                StateTensor(
                    (chunk.num_heads, chunk.nbytes // chunk.num_heads),
                    torch.int8,
                    chunk.num_heads,
                    chunk.first_head,
                )
                for chunk in chunks
            )
        )
    first_head, heads = place.heads(sort.heads)
    shape = (num_blocks, heads, block_tokens // sort.row_tokens, sort.row_nbytes)
    return attention_in(layout, shape, torch.int8, first_head=first_head)
