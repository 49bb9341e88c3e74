"""One tensor with named axes, in some memory order.

An axis order is written as in vLLM's ``get_kv_cache_stride_order``: entry ``i`` of
``stride_order`` is the dimension that comes ``i``-th in memory, outermost first.
Two layers of two engines, both viewed as (blocks, tokens, heads, content)::

    shape (9, 16, 8, 128)   stride_order (0, 1, 2, 3)   memory: block, token, head, content
    shape (9, 16, 8, 128)   stride_order (0, 2, 1, 3)   memory: block, head, token, content
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import torch

from registration.references import RegistrationError

LayerView = torch.Tensor | list[torch.Tensor]
"""A layer's own view of its memory; a list for a layer of several tensors."""


class Axis(StrEnum):
    """The meaning of a dimension of a layer's tensor."""

    BLOCK = "block"
    KV = "key or value"
    HEAD = "head"
    TOKEN = "token"
    CONTENT = "content"


@dataclass(frozen=True)
class StridedTensor:
    """Shape, axes and memory order of a layer's tensor: one entry per dimension in each.

    Raises:
        RegistrationError: lengths differ, a dimension is empty, ``stride_order`` is
            no permutation, there is not exactly one block axis, or another axis
            than content comes twice.
    """

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    stride_order: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        names = ", ".join(self.axes)
        if (
            len(self.axes) != len(self.shape)
            or sorted(self.stride_order) != list(range(len(self.shape)))
            or min(self.shape, default=0) <= 0
        ):
            raise RegistrationError(
                f"axes ({names}) in memory order {self.stride_order} do not fit "
                f"a tensor of shape {self.shape}"
            )
        if self.axes.count(Axis.BLOCK) != 1:
            raise RegistrationError(f"axes ({names}): expected exactly one '{Axis.BLOCK}'")
        for axis in (Axis.KV, Axis.HEAD, Axis.TOKEN):
            if self.axes.count(axis) > 1:
                raise RegistrationError(f"axes ({names}): expected at most one '{axis}'")

    @property
    def memory_order(self) -> tuple[int, ...]:
        """Dimensions from outermost to innermost.

        Dimensions of size 1 are left out, as they affect no address; the block axis never is.
        """
        return tuple(
            dim for dim in self.stride_order if self.shape[dim] > 1 or self.axes[dim] is Axis.BLOCK
        )

    @property
    def memory_axes(self) -> str:
        """The names of the axes in memory order, for messages."""
        return ", ".join(self.axes[dim] for dim in self.memory_order)

    @property
    def num_blocks(self) -> int:
        """Size of the block axis."""
        return self.size(Axis.BLOCK)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one block, without padding."""
        return prod(self.shape) // self.num_blocks * self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """The element size in bytes."""
        return self.dtype.itemsize

    @property
    def is_block_outermost(self) -> bool:
        """Whether the bytes of one block are contiguous."""
        return self.axes[self.memory_order[0]] is Axis.BLOCK

    def size(self, axis: Axis) -> int:
        """Size of ``axis``; 1 when the tensor lacks it."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1

    def strides(self, steps: Mapping[Axis, int]) -> tuple[int, ...]:
        """Bytes between neighbours along each dimension: packed, except where ``steps`` says."""
        packed = dict.fromkeys(range(len(self.shape)), 0)
        nbytes = self.dtype.itemsize
        for dim in reversed(self.stride_order):
            packed[dim] = nbytes
            nbytes *= self.shape[dim]
        return tuple(steps.get(axis, packed[dim]) for dim, axis in enumerate(self.axes))

    def stride(self, axis: Axis, steps: Mapping[Axis, int]) -> int:
        """Bytes between neighbours along ``axis``, which the tensor has."""
        return self.strides(steps)[self.axes.index(axis)]

    def packed_steps(self, page_nbytes: int) -> Mapping[Axis, int]:
        """Bytes between the blocks of a tensor that has an allocation of its own."""
        if self.is_block_outermost:
            return {Axis.BLOCK: page_nbytes}
        return {Axis.BLOCK: self.stride(Axis.BLOCK, {})}

    def layer_view(
        self, flat: torch.Tensor, offset: int, num_blocks: int, steps: Mapping[Axis, int]
    ) -> torch.Tensor:
        """A view of ``flat`` from byte ``offset`` on, in this shape, dtype and memory order.

        ``flat`` is int8 of one dimension; nothing is copied.  ``offset`` and all strides
        are multiples of the element size.
        """
        itemsize = self.dtype.itemsize
        typed = flat.view(self.dtype)
        return typed.as_strided(
            tuple(
                num_blocks if axis is Axis.BLOCK else size
                for axis, size in zip(self.axes, self.shape, strict=True)
            ),
            tuple(stride // itemsize for stride in self.strides(steps)),
            typed.storage_offset() + offset // itemsize,
        )
