"""What an engine's layers need of KV memory, before it is allocated.

A layer needs *pages*, one per block.  Their content is one of:

    AttentionTensor   keys and values, or an MLA latent: one tensor whose heads and
                      tokens have known places in memory
    OpaqueTensor      one tensor of which only the block axis is known
    StateTensors      several tensors packed into one page (recurrent states)

Each says how large its page is, which chunks of it hold data, and how to view
allocated bytes in the layer's own shape (``registration.allocation.contents``).  The allocator
needs nothing else, so a new kind of layer is a new class there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from registration.allocation.strided import Axis, LayerView
from registration.references import (
    AttentionChunk,
    AttentionKind,
    RegistrationError,
    StateChunk,
)
from transport.errors import FieldError


class LayerRefused(FieldError, RegistrationError):
    """One layer does not fit; the error's field begins with the layer's name."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How an attention page divides.

    ``num_rows`` are the stored tokens per head, None when a head's page is opaque.
    ``memory_axes`` names the axes from the outermost to the innermost, for messages;
    ``are_outermost`` says whether only blocks lie outside the heads.
    """

    num_heads: int
    num_rows: int | None
    are_outermost: bool
    memory_axes: str


class PageContent(Protocol):
    """What the allocator needs to know of a layer's pages.

    ``steps`` gives, in bytes, the strides that the allocation decides instead of the
    layer: always that of ``Axis.BLOCK``, and of ``Axis.HEAD`` where heads lie apart.
    """

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page without padding at its end."""

    @property
    def alignment(self) -> int:
        """Bytes that the start of every page must be a multiple of."""

    @property
    def num_blocks(self) -> int | None:
        """Blocks that the layer's own shape counts, or None when it counts none."""

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of KV cache group that may hold such a layer."""

    @property
    def is_block_outermost(self) -> bool:
        """Whether the bytes of one page are contiguous."""

    @property
    def shares_rows(self) -> bool:
        """Whether other layers' pages may lie between two pages of this one."""

    @property
    def heads(self) -> Heads | None:
        """How the page divides into heads, or None when it has none."""

    def packed_steps(self, page_nbytes: int) -> Mapping[Axis, int]:
        """The steps of a layer that has an allocation of its own."""

    def page_chunks(self, steps: Mapping[Axis, int]) -> tuple[AttentionChunk | StateChunk, ...]:
        """Where the page's data lies, counted in bytes from the start of the page."""

    def layer_view(
        self, flat: torch.Tensor, offset: int, num_blocks: int, steps: Mapping[Axis, int]
    ) -> LayerView:
        """The layer's view of ``flat`` (int8, one dimension) from byte ``offset`` on."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages: what is in them and how large the engine counts them.

    ``page_nbytes`` is the whole page, the last ``page_padding`` bytes of which hold
    nothing and are never transferred.

    Raises:
        LayerRefused: content and padding do not add up to ``page_nbytes``, pages
            would start where the dtype does not allow it, or there is padding
            although the bytes of a page do not lie together.
    """

    layer: str
    content: PageContent
    page_nbytes: int
    page_padding: int = 0

    def __post_init__(self) -> None:
        content = self.content
        if self.page_padding < 0 or content.page_nbytes + self.page_padding != self.page_nbytes:
            wanted = f"{content.page_nbytes} and {self.page_padding} of padding"
            raise LayerRefused(f"{self.layer}: page bytes", wanted, self.page_nbytes)
        if self.page_nbytes % content.alignment:
            wanted = f"a multiple of {content.alignment}"
            raise LayerRefused(f"{self.layer}: page bytes", wanted, self.page_nbytes)
        if self.page_padding and not content.is_block_outermost:
            raise LayerRefused(f"{self.layer}: padding of scattered pages", 0, self.page_padding)


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The layers that share one block table; fields as in ``KVCacheGroupReference``.

    Raises:
        LayerRefused: a state layer in an attention group, or the reverse.
    """

    kind: AttentionKind
    window: int | None
    block_tokens: int
    layers: tuple[LayerPages, ...]
    compress_ratio: int = 1

    def __post_init__(self) -> None:
        for layer in self.layers:
            if self.kind not in layer.content.kinds:
                wanted = " or ".join(layer.content.kinds)
                raise LayerRefused(f"{layer.layer}: kind of group", wanted, self.kind)
