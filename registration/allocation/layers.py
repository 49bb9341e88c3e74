"""What an engine's layers want of KV memory, before any is allocated.

A layer asks for *pages*, one per block.  What it keeps in them is one of:

    AttentionTensor   keys and values, or an MLA latent: one tensor whose heads and
                      tokens can be found in memory
    OpaqueTensor      one tensor of which only the block axis is known
    StateTensors      several tensors packed into one page (recurrent states)

Each says how large its page is, which chunks of it hold data, and how to view
allocated bytes in the layer's own shape (``registration.allocation.contents``).  The allocator
asks nothing else, so a new kind of layer is a new class there.
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


class LayerRefused(RegistrationError):
    """One layer does not fit what was asked; says which, what was expected and what came."""

    def __init__(self, layer: str, what: str, expected: object, got: object) -> None:
        super().__init__(f"{layer}: {what}: expected {expected}, got {got}")
        self.layer = layer
        self.what = what
        self.expected = expected
        self.got = got


@dataclass(frozen=True, slots=True)
class Heads:
    """How an attention page divides.

    ``num_rows`` are the stored tokens per head, None when a head's page is opaque.
    ``memory_axes`` says in words what lies inside what; ``are_outermost`` whether
    nothing but blocks lies outside the heads.
    """

    num_heads: int
    num_rows: int | None
    are_outermost: bool
    memory_axes: str


class PageContent(Protocol):
    """What the allocator needs to know of a layer's pages.

    ``steps`` gives, in bytes, the strides that the allocation decides instead of
    the layer: always ``Axis.BLOCK``, and ``Axis.HEAD`` where heads lie apart.
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
        """Whether the bytes of one page lie together."""

    @property
    def shares_rows(self) -> bool:
        """Whether other layers' pages may lie between two pages of this one."""

    @property
    def heads(self) -> Heads | None:
        """How the page divides into heads, or None when it has none."""

    def packed_steps(self, page_nbytes: int) -> Mapping[Axis, int]:
        """The steps of a layer that has an allocation of its own."""

    def chunks(self, steps: Mapping[Axis, int]) -> tuple[AttentionChunk | StateChunk, ...]:
        """Where the page's data lies, counted in bytes from the start of the page."""

    def view(
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
            raise LayerRefused(self.layer, "page bytes", wanted, self.page_nbytes)
        if self.page_nbytes % content.alignment:
            wanted = f"a multiple of {content.alignment}"
            raise LayerRefused(self.layer, "page bytes", wanted, self.page_nbytes)
        if self.page_padding and not content.is_block_outermost:
            raise LayerRefused(self.layer, "padding of scattered pages", 0, self.page_padding)


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

    def __post_init__(self) -> None:
        for layer in self.layers:
            if self.kind not in layer.content.kinds:
                wanted = " or ".join(layer.content.kinds)
                raise LayerRefused(layer.layer, "kind of group", wanted, self.kind)
