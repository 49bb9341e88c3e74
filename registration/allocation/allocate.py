"""Cross-layer KV memory for engines that do not allocate it themselves.

A decode rank reads blocks of many layers.  If each layer has its own tensor, that is
one run per layer and block; if the layers of a block lie side by side, it is one run
per block.  So memory is allocated by block and handed to the layers as views:

    describe   GroupPages of LayerPages          what each layer needs (layers, contents)
    decide     plan_allocations                  where each layer's pages go (placement)
    do         allocate                          tensors, views, references (here)

The views have the layers' own shapes and memory orders with larger strides, so a kernel
that honours strides needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from registration.allocation.layers import GroupPages, LayerRefused
from registration.allocation.placement import (
    AllocationPlan,
    HeadMajor,
    HeadMajorRefused,
    PlacedLayer,
    RowOrder,
    plan_allocations,
)
from registration.allocation.strided import Axis, LayerView
from registration.references import (
    GroupMemory,
    KVCacheReferences,
    LayerMemory,
    RegistrationError,
    build_kv_cache_references,
)
from transport import Device, Memory

__all__ = [
    "Allocation",
    "HeadMajor",
    "HeadMajorRefused",
    "KVCacheAllocation",
    "LayerRefused",
    "RowOrder",
    "allocate",
]

HUGE_PAGE_NBYTES = 2 << 20
"""Large allocations start at a multiple of this, so that whole huge pages can back them."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """One allocation: ``tensor`` is int8, contiguous, and fills ``memory`` exactly.

    Its shape is ``(num_blocks, layers, page bytes)``, or ``(num_blocks, row bytes)`` where
    pages differ in size, or, head-major, ``(num_blocks, heads, layers, page bytes /
    heads)``; of one dimension for a lone layer whose blocks are not outermost.
    """

    tensor: torch.Tensor
    memory: Memory
    order: RowOrder


@dataclass(frozen=True, slots=True, eq=False)
class KVCacheAllocation:
    """KV memory of one worker: its allocations, the layers' views, and its description.

    ``views`` has, by layer name, the layer's tensor (a list of them for recurrent
    layers).  ``groups`` is what ``references`` were built from.
    """

    allocations: tuple[Allocation, ...]
    views: Mapping[str, LayerView]
    groups: tuple[GroupMemory, ...]
    references: KVCacheReferences

    @property
    def owners(self) -> tuple[torch.Tensor, ...]:
        """The tensors that keep the memory alive."""
        return tuple(allocation.tensor for allocation in self.allocations)


def allocate(
    groups: Sequence[GroupPages],
    num_blocks: int,
    *,
    device: torch.device = _CPU,
    head_major: HeadMajor = HeadMajor.NEVER,
    overlay: bool = False,
    layers_apart: bool = False,
    empty: Callable[[int], torch.Tensor] | None = None,
) -> KVCacheAllocation:
    """Allocate KV memory for ``num_blocks`` blocks of every layer, zeroed unless by ``empty``.

    Args:
        groups: the engine's KV cache groups in its own order.
        num_blocks: blocks of every layer; block ids are below it.
        device: a CPU or CUDA device.
        head_major: whether heads are to lie outside layers in memory.
        overlay: let all groups use the same bytes.  Only sound if a block id belongs
            to one group at a time, as in vLLM.
        layers_apart: give every layer memory of its own; never head-major.
        empty: takes a number of bytes and makes an int8 tensor of so many, for engines with an
            allocator of their own; called once for each allocation, in their order.

    Raises:
        LayerRefused: a layer appears twice or counts other blocks; as ``HeadMajorRefused``, a
            layer cannot be head-major although it is required.
        RegistrationError: the device is neither CPU nor CUDA, ``empty`` made another tensor,
            or the groups are inconsistent (see ``build_kv_cache_references``).

    Example:
        >>> from registration import AttentionKind
        >>> from registration.allocation import LayerPages, StateTensor, StateTensors
        >>> state = StateTensors((StateTensor((4, 8), torch.float16),))
        >>> layers = tuple(LayerPages(f"layers.{i}", state, 64) for i in range(3))
        >>> made = allocate([GroupPages(AttentionKind.STATE, None, 16, layers)], num_blocks=5)
        >>> made.allocations[0].tensor.shape, made.views["layers.1"][0].stride()
        (torch.Size([5, 3, 64]), (96, 8, 1))
    """
    if device.type not in ("cpu", "cuda"):
        raise RegistrationError(f"device: expected cpu or cuda, got {device}")
    plans = plan_allocations(
        groups, num_blocks, head_major, overlay=overlay, layers_apart=layers_apart
    )
    make = partial(zeros, device=device) if empty is None else empty
    made = [(plan, _allocate(plan, make)) for plan in plans]
    placed = {
        layer.pages.layer: (layer, allocation) for plan, allocation in made for layer in plan.layers
    }
    described = tuple(
        _describe_group(group, [placed[pages.layer] for pages in group.layers], num_blocks)
        for group in groups
    )
    views = {
        pages.layer: _view(*placed[pages.layer], num_blocks)
        for group in groups
        for pages in group.layers
    }
    allocations = tuple(allocation for _, allocation in made)
    references = build_kv_cache_references(described)
    return KVCacheAllocation(allocations, views, described, references)


def zeros(nbytes: int, device: torch.device = _CPU) -> torch.Tensor:
    """An int8 tensor of ``nbytes`` zeros; a large one starts at a huge page."""
    # torch aligns to 64 (CPU) or 512 bytes (CUDA): allocate more and skip to the alignment.
    spare = HUGE_PAGE_NBYTES if nbytes >= HUGE_PAGE_NBYTES else 0
    raw = torch.zeros(nbytes + spare, dtype=torch.int8, device=device)
    skip = -raw.data_ptr() % HUGE_PAGE_NBYTES if spare else 0
    return raw[skip : skip + nbytes]


def _allocate(plan: AllocationPlan, make: Callable[[int], torch.Tensor]) -> Allocation:
    nbytes = prod(plan.shape)
    raw = make(nbytes)
    if raw.dtype != torch.int8 or raw.shape != (nbytes,) or not raw.is_contiguous():
        raise RegistrationError(
            f"empty: expected {nbytes} contiguous int8, got {raw.dtype} {tuple(raw.shape)}"
        )
    where = Device("cuda", raw.device.index) if raw.device.type == "cuda" else Device("cpu")
    return Allocation(raw.view(plan.shape), Memory(raw.data_ptr(), nbytes, where), plan.order)


def _view(layer: PlacedLayer, owner: Allocation, num_blocks: int) -> LayerView:
    flat = owner.tensor.view(-1)
    return layer.pages.content.layer_view(flat, layer.offset, num_blocks, layer.steps)


def _describe_group(
    group: GroupPages, layers: Sequence[tuple[PlacedLayer, Allocation]], num_blocks: int
) -> GroupMemory:
    memories = tuple(_describe(layer, owner, num_blocks) for layer, owner in layers)
    return GroupMemory(group.kind, group.window, group.block_tokens, memories, group.compress_ratio)


def _describe(layer: PlacedLayer, owner: Allocation, num_blocks: int) -> LayerMemory:
    return LayerMemory(
        layer.pages.layer,
        owner.memory,
        layer.offset,
        layer.steps[Axis.BLOCK],
        num_blocks,
        layer.pages.content.page_chunks(layer.steps),
    )
