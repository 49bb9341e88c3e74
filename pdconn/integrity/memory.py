"""Reading pieces of KV memory: strips of rows, of some heads of one chunk.

Rows of a head may lie together or apart, and heads inside of rows or around them::

    block, head, token   | h0: r0 r1 r2 r3 | h1: r0 r1 r2 r3 |     a strip of 2 rows is one run
    block, token, head   | r0: h0 h1 | r1: h0 h1 | r2: ...          it is two runs

Both are one strided view over the whole cache, indexed by block and strip.  Bytes are
returned in order of rows, so that a hash of a strip does not depend on the layout.  Runs in
host memory are returned as views, without a copy, which is twice as fast.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from registration.references import KVCacheDataReference, KVCacheReferences
from transport import Memory

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cells:
    """The place of the rows of some heads of one chunk: ``rows`` per block, all blocks.

    Strides and ``offset`` (of block 0, first head, row 0, from the memory's base) are in
    bytes; ``first_head`` is model-wide.  An opaque block is one row per head.
    """

    memory: Memory
    first_head: int
    offset: int
    num_blocks: int
    block_stride: int
    num_heads: int
    head_stride: int
    rows: int
    row_stride: int
    row_nbytes: int

    def __post_init__(self) -> None:
        steps = (
            (self.num_blocks, self.block_stride),
            (self.num_heads, self.head_stride),
            (self.rows, self.row_stride),
        )
        end = self.offset + self.row_nbytes + sum((count - 1) * stride for count, stride in steps)
        if self.offset < 0 or end > self.memory.nbytes:
            raise ValueError(f"cells end at byte {end} of {self.memory.nbytes}")

    @classmethod
    def for_heads(
        cls,
        references: KVCacheReferences,
        ref: KVCacheDataReference,
        first_head: int,
        num_heads: int,
    ) -> Cells:
        """The cells of model-wide heads ``[first_head, first_head + num_heads)``.

        Raises:
            ValueError: heads that the chunk does not hold.
        """
        skipped = first_head - ref.first_head
        if skipped < 0 or num_heads <= 0 or skipped + num_heads > ref.num_heads:
            held = f"{ref.first_head} to {ref.first_head + ref.num_heads - 1}"
            asked = f"{first_head} to {first_head + num_heads - 1}"
            raise ValueError(f"{ref.layer}: heads, expected some of {held}, got {asked}")
        tensor = references.tensors[ref.tensor]
        row_nbytes = ref.head_nbytes if ref.token_nbytes is None else ref.token_nbytes
        return cls(
            tensor.memory,
            first_head,
            ref.offset + skipped * ref.head_stride,
            tensor.num_blocks,
            tensor.block_stride,
            num_heads,
            ref.head_stride,
            ref.num_rows or 1,
            row_nbytes if ref.token_stride is None else ref.token_stride,
            row_nbytes,
        )

    def shape_and_strides(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of ``(blocks, strips, heads, rows, bytes)``, ``step`` rows a strip."""
        outer = (self.num_blocks, self.rows // step, self.num_heads)
        strides = (self.block_stride, step * self.row_stride, self.head_stride)
        if self.row_stride == self.row_nbytes:
            return (*outer, 1, step * self.row_nbytes), (*strides, 0, 1)
        return (*outer, step, self.row_nbytes), (*strides, self.row_stride, 1)


class ReadMemory(Protocol):
    """Shows bytes of registered memory as numpy arrays on the host."""

    def gather(self, cells: Cells, step: int, ids: I64, strips: I64) -> Iterable[U8]:
        """Strip ``strips[i]`` of block ``ids[i]``, each of ``step`` rows.

        Args:
            cells: heads of a chunk; ``step`` divides its ``rows``.
            ids, strips: shape (n,).

        Returns:
            An array of shape (heads, step * row_nbytes) for each, heads contiguous,
            rows in order: views of the memory itself, or copies.

        Raises:
            IndexError: a block or strip that the cache does not have.
        """
        ...


def gathered(memory: U8, cells: Cells, step: int, ids: I64, strips: I64) -> Iterable[U8]:
    """As :meth:`ReadMemory.gather`, where ``memory`` holds all bytes of ``cells.memory``.

    Raises:
        ValueError: ``memory`` is not as large as the allocation.
    """
    if memory.nbytes != cells.memory.nbytes:
        raise ValueError(f"memory: expected {cells.memory.nbytes} bytes, got {memory.nbytes}")
    shape, strides = cells.shape_and_strides(step)
    view = as_strided(memory[cells.offset :], shape, strides, writeable=False)
    _check_not_negative(ids, strips)
    if shape[3] == 1:
        runs = view[:, :, :, 0]
        return [runs[at] for at in zip(ids.tolist(), strips.tolist(), strict=True)]
    # An indexed view keeps the order of its strides, which is not always that of its axes.
    copied = np.ascontiguousarray(view[ids, strips])
    return copied.reshape(len(ids), shape[2], shape[3] * shape[4])


class HostMemory:
    """Reads memory of this process by address."""

    def gather(self, cells: Cells, step: int, ids: I64, strips: I64) -> Iterable[U8]:
        """The strips, as :class:`ReadMemory` says."""
        raw = (ctypes.c_uint8 * cells.memory.nbytes).from_address(cells.memory.base)
        return gathered(np.ctypeslib.as_array(raw), cells, step, ids, strips)


class CudaMemory:
    """Reads memory of a GPU: strips are collected there, then copied to the host.

    The copy waits for the current stream only.  The caller ensures that the kernels that
    wrote the KV have finished.
    """

    def gather(self, cells: Cells, step: int, ids: I64, strips: I64) -> Iterable[U8]:
        """The strips, as :class:`ReadMemory` says."""
        import torch

        device = torch.device("cuda", cells.memory.device.index)
        memory = torch.as_tensor(OnDevice(cells.memory), device=device)
        return collected(memory, cells, step, ids, strips)


def collected(memory: Any, cells: Cells, step: int, ids: I64, strips: I64) -> Iterable[U8]:
    """As :func:`gathered`, where ``memory`` is a torch tensor of bytes on any device."""
    import torch

    shape, strides = cells.shape_and_strides(step)
    _check_not_negative(ids, strips)
    if len(ids) and (ids.max() >= shape[0] or strips.max() >= shape[1]):
        raise IndexError(f"block {ids.max()} of {shape[0]}, strip {strips.max()} of {shape[1]}")
    view = torch.as_strided(memory, shape, strides, cells.offset)
    at = [torch.from_numpy(index).to(memory.device) for index in (ids, strips)]
    found: U8 = view[at[0], at[1]].cpu().contiguous().numpy()
    return found.reshape(len(ids), shape[2], shape[3] * shape[4])


class AnyMemory:
    """Host or GPU memory, by the device that each allocation names."""

    def __init__(self) -> None:
        self._by_kind: dict[str, ReadMemory] = {"cpu": HostMemory(), "cuda": CudaMemory()}

    def gather(self, cells: Cells, step: int, ids: I64, strips: I64) -> Iterable[U8]:
        """The strips, as :class:`ReadMemory` says."""
        return self._by_kind[cells.memory.device.kind].gather(cells, step, ids, strips)


@dataclass(frozen=True)
class OnDevice:
    """Foreign device memory, in the form that torch imports."""

    memory: Memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.memory.nbytes,),
            "typestr": "|u1",
            "data": (self.memory.base, False),
            "version": 3,
        }


def _check_not_negative(ids: I64, strips: I64) -> None:
    """Refuse negative indices, which numpy counts from the end."""
    if len(ids) and (ids.min() < 0 or strips.min() < 0):
        raise IndexError(f"lowest block {ids.min()}, lowest strip {strips.min()}")
