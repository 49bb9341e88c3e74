"""The kinds of content that a layer's pages can have.

Only one thing matters about an engine's tensor: which bytes are contiguous.  An attention
tensor is searched from the inside out for the run that holds one token of one head; where
the token axis cuts through the content (old paged layouts keep keys as ``(..., content /
x, token, x)``), for the run that holds one head instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from registration.allocation.layers import Heads
from registration.allocation.strided import Axis, LayerView, StridedTensor
from registration.references import (
    AttentionChunk,
    AttentionKind,
    RegistrationError,
    StateChunk,
)

_TOKEN_RUN = frozenset({Axis.CONTENT, Axis.KV})
_HEAD_RUN = _TOKEN_RUN | {Axis.TOKEN}


@dataclass(frozen=True)
class AttentionTensor(StridedTensor):
    """Keys and values, or an MLA latent.

    Without a head axis it is one head that every rank holds (MLA).  Without a token
    axis, or where one token's bytes do not lie together, a head's page is opaque.  A
    key-or-value axis outside the tokens makes two chunks, keys first.  ``first_head``
    is the model-wide index of the first head held here.

    Raises:
        RegistrationError: also when the bytes of one head in one block are not
            evenly strided; such a layer is an :class:`OpaqueTensor`.

    Example:
        >>> axes = (Axis.BLOCK, Axis.KV, Axis.TOKEN, Axis.HEAD, Axis.CONTENT)
        >>> nhd = AttentionTensor((9, 2, 16, 8, 128), axes, (0, 1, 2, 3, 4), torch.bfloat16)
        >>> [(chunk.offset, chunk.head_stride, chunk.token_stride)
        ...     for chunk in nhd.page_chunks({Axis.BLOCK: nhd.page_nbytes})]
        [(0, 256, 2048), (32768, 256, 2048)]
    """

    first_head: int = 0

    def __post_init__(self) -> None:
        StridedTensor.__post_init__(self)
        if self.first_head < 0:
            raise RegistrationError(f"first_head: expected 0 or more, got {self.first_head}")
        if not self._holds_content(self._run):
            raise RegistrationError(
                f"a head's bytes are scattered in memory order ({self.memory_axes}): "
                "describe the layer as opaque"
            )

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """Every kind but state."""
        return tuple(kind for kind in AttentionKind if kind is not AttentionKind.STATE)

    @property
    def shares_rows(self) -> bool:
        """Whether a page's bytes are contiguous."""
        return self.is_block_outermost

    @property
    def heads(self) -> Heads:
        """How the page divides into heads."""
        num_heads = self.size(Axis.HEAD)
        outermost = [self.axes[dim] for dim in self.memory_order[:2]]
        are_outermost = outermost == [Axis.BLOCK, Axis.HEAD] or (
            num_heads == 1 and self.is_block_outermost
        )
        return Heads(num_heads, self._num_rows, are_outermost, self.memory_axes)

    def page_chunks(self, steps: Mapping[Axis, int]) -> tuple[AttentionChunk, ...]:
        """One chunk, or one per key and value where those lie apart."""
        run_nbytes = prod(self.shape[dim] for dim in self._run) * self.dtype.itemsize
        num_rows = self._num_rows
        num_heads = self.size(Axis.HEAD)
        head_nbytes = run_nbytes * (num_rows or 1)
        token_stride = self.stride(Axis.TOKEN, steps) if (num_rows or 1) > 1 else run_nbytes
        return tuple(
            AttentionChunk(
                num_heads,
                head_nbytes,
                self.stride(Axis.HEAD, steps) if num_heads > 1 else head_nbytes,
                None if num_rows is None else token_stride,
                None if num_rows is None else run_nbytes,
                self.first_head,
                offset,
            )
            for offset in self._key_and_value_offsets(steps)
        )

    @property
    def _run(self) -> tuple[int, ...]:
        """The innermost dimensions: those of one token of one head, or else of one head."""
        token = self._innermost(_TOKEN_RUN)
        return token if self._holds_content(token) else self._innermost(_HEAD_RUN)

    def _innermost(self, axes: frozenset[Axis]) -> tuple[int, ...]:
        order = self.memory_order
        length = next(n for n, dim in enumerate(reversed(order)) if self.axes[dim] not in axes)
        return order[len(order) - length :]

    def _holds_content(self, run: tuple[int, ...]) -> bool:
        return not any(
            self.axes[dim] is Axis.CONTENT for dim in self.memory_order if dim not in run
        )

    @property
    def _num_rows(self) -> int | None:
        """Stored tokens per head, or None when a head is opaque."""
        if Axis.TOKEN not in self.axes or self.axes.index(Axis.TOKEN) in self._run:
            return None
        return self.size(Axis.TOKEN)

    def _key_and_value_offsets(self, steps: Mapping[Axis, int]) -> tuple[int, ...]:
        if self.size(Axis.KV) == 1 or self.axes.index(Axis.KV) in self._run:
            return (0,)
        return tuple(part * self.stride(Axis.KV, steps) for part in range(self.size(Axis.KV)))


@dataclass(frozen=True)
class OpaqueTensor(StridedTensor):
    """A layer of unknown kind: its axes are the block axis and content.

    It never lies among other layers.  Where dimensions are outside the blocks in
    memory, each index into those is a chunk of its own.
    """

    def __post_init__(self) -> None:
        StridedTensor.__post_init__(self)
        named = sorted(set(self.axes) - {Axis.BLOCK, Axis.CONTENT})
        if named:
            raise RegistrationError(f"an opaque tensor has no axis '{named[0]}'")

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """Any kind, as its content is unknown."""
        return tuple(AttentionKind)

    @property
    def shares_rows(self) -> bool:
        """Never, as its kernels' assumptions about memory are unknown."""
        return False

    @property
    def heads(self) -> Heads | None:
        """None: their place is unknown."""
        return None

    def page_chunks(self, steps: Mapping[Axis, int]) -> tuple[StateChunk, ...]:
        """One chunk per index into the dimensions outside the blocks."""
        order = self.memory_order
        outside = order[: order.index(self.axes.index(Axis.BLOCK))]
        strides = self.strides(steps)
        sizes = [self.shape[dim] for dim in outside]
        nbytes = self.page_nbytes // prod(sizes)
        return tuple(
            StateChunk(nbytes, sum(i * strides[dim] for i, dim in zip(at, outside, strict=True)))
            for at in product(*map(range, sizes))
        )


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One state of a recurrent layer: ``shape`` in one block, without a block dimension.

    What tensor parallelism divides consists of ``num_heads`` parts along its outermost
    dimension, the first of which is the model's part ``first_head``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_heads: int = 1
    first_head: int = 0

    def __post_init__(self) -> None:
        self.strided()
        if self.first_head < 0:
            raise RegistrationError(f"first_head: expected 0 or more, got {self.first_head}")
        outermost = self.shape[0] if self.shape else 1
        if self.num_heads <= 0 or outermost % self.num_heads:
            raise RegistrationError(
                f"num_heads: expected a divisor of {outermost}, got {self.num_heads}"
            )

    def strided(self) -> StridedTensor:
        """The state as a tensor of one block."""
        axes = (Axis.BLOCK, *(Axis.CONTENT for _ in self.shape))
        return StridedTensor((1, *self.shape), axes, tuple(range(len(axes))), self.dtype)


@dataclass(frozen=True, slots=True)
class StateTensors:
    """A recurrent layer: states packed into one page, each aligned to its element size."""

    parts: tuple[StateTensor, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise RegistrationError("a recurrent layer has at least one state")

    @property
    def page_nbytes(self) -> int:
        """Bytes up to the end of the last state, gaps for alignment included."""
        return max(start + state.page_nbytes for start, state in self._placed())

    @property
    def alignment(self) -> int:
        """The largest element size in bytes; element sizes are powers of two."""
        return max(part.dtype.itemsize for part in self.parts)

    @property
    def num_blocks(self) -> int | None:
        """None: shapes are of one block."""
        return None

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """State only."""
        return (AttentionKind.STATE,)

    @property
    def is_block_outermost(self) -> bool:
        """Always."""
        return True

    @property
    def shares_rows(self) -> bool:
        """Always: states can be viewed with any stride between blocks."""
        return True

    @property
    def heads(self) -> Heads | None:
        """None: a page of states has no rows of tokens, so no head outside of layers."""
        return None

    def packed_steps(self, page_nbytes: int) -> Mapping[Axis, int]:
        """Blocks are a page apart."""
        return {Axis.BLOCK: page_nbytes}

    def page_chunks(self, steps: Mapping[Axis, int]) -> tuple[StateChunk, ...]:
        """One chunk per state; no step reaches inside the page."""
        del steps
        return tuple(
            StateChunk(state.page_nbytes, start, part.num_heads, part.first_head)
            for part, (start, state) in zip(self.parts, self._placed(), strict=True)
        )

    def layer_view(
        self, flat: torch.Tensor, offset: int, num_blocks: int, steps: Mapping[Axis, int]
    ) -> LayerView:
        """One tensor of shape ``(num_blocks, *part.shape)`` per state."""
        views: list[torch.Tensor] = []
        for start, state in self._placed():
            views += [state.layer_view(flat, offset + start, num_blocks, steps)]
        return views

    def _placed(self) -> Iterator[tuple[int, StridedTensor]]:
        """Each state and the byte of the page where it starts."""
        end = 0
        for part in self.parts:
            state = part.strided()
            start = end + -end % state.alignment
            yield start, state
            end = start + state.page_nbytes
