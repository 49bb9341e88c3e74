"""Small layers and groups of them to allocate, and the shapes that were made."""

from __future__ import annotations

import torch

from registration import AttentionKind
from registration.allocation.allocate import KVCacheAllocation
from registration.allocation.contents import AttentionTensor, OpaqueTensor
from registration.allocation.layers import GroupPages, LayerPages
from registration.allocation.strided import Axis

B, KV, H, N, C = Axis.BLOCK, Axis.KV, Axis.HEAD, Axis.TOKEN, Axis.CONTENT
BLOCKS = 5


def attention(
    heads: int = 2, tokens: int = 4, dim: int = 3, dtype: torch.dtype = torch.float16
) -> AttentionTensor:
    """Blocks, heads, tokens, content; packed in that order."""
    return AttentionTensor((BLOCKS, heads, tokens, dim), (B, H, N, C), (0, 1, 2, 3), dtype)


def latent(tokens: int = 4, dim: int = 3) -> AttentionTensor:
    """An MLA latent: no head axis."""
    return AttentionTensor((BLOCKS, tokens, dim), (B, N, C), (0, 1, 2), torch.float16)


def pages(name: str, content: AttentionTensor | OpaqueTensor, padding: int = 0) -> LayerPages:
    return LayerPages(name, content, content.page_nbytes + padding, padding)


def full(*layers: LayerPages) -> GroupPages:
    return GroupPages(AttentionKind.FULL, None, 4, layers)


def window(*layers: LayerPages) -> GroupPages:
    return GroupPages(AttentionKind.SLIDING_WINDOW, 8, 4, layers)


def shapes(made: KVCacheAllocation) -> list[tuple[int, ...]]:
    return [tuple(allocation.tensor.shape) for allocation in made.allocations]
