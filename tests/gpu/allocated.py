"""KV memory as ``registration`` allocates it for an engine, on any device, with known content.

A lender's rank is written through the layers' own views, as by a model, and a reader's rank
is compared through them, so the tests do not depend on where bytes lie in memory.
"""

from __future__ import annotations

import numpy as np
import torch

from registration.allocation import (
    AttentionTensor,
    Axis,
    GroupPages,
    HeadMajor,
    KVCacheAllocation,
    LayerPages,
    allocate,
)
from registration.references import AttentionKind
from tests.gpu.cases import BLOCK_TOKENS, U8, as_bytes
from transport import Device

NUM_BLOCKS = 12
NUM_LAYERS = 3
HEADS = 4
CONTENT_NBYTES = 64
_AXES = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CONTENT)


def rank_memory(order: HeadMajor, tp: int, rank: int, device: Device) -> KVCacheAllocation:
    """A rank's zeroed memory."""
    heads = HEADS // tp
    shape = (NUM_BLOCKS, heads, BLOCK_TOKENS, CONTENT_NBYTES)
    content = AttentionTensor(shape, _AXES, (0, 1, 2, 3), torch.uint8, first_head=rank * heads)
    layers = tuple(
        LayerPages(f"layers.{number}", content, content.page_nbytes) for number in range(NUM_LAYERS)
    )
    where = torch.device("cpu" if device.kind == "cpu" else f"cuda:{device.index}")
    pages = [GroupPages(AttentionKind.FULL, None, BLOCK_TOKENS, layers)]
    return allocate(pages, NUM_BLOCKS, device=where, head_major=order)


def fill(made: KVCacheAllocation, tp: int, rank: int) -> None:
    """Write what a rank of a lender holds."""
    for number in range(NUM_LAYERS):
        view = made.views[f"layers.{number}"]
        assert isinstance(view, torch.Tensor)
        view.copy_(torch.from_numpy(content_of(number, tp, rank)))
    _wait(made)


def held(made: KVCacheAllocation, number: int) -> U8:
    """A layer's bytes, of shape (blocks, heads, tokens, bytes)."""
    _wait(made)
    view = made.views[f"layers.{number}"]
    assert isinstance(view, torch.Tensor)
    found: U8 = view.cpu().contiguous().numpy()
    return found


def content_of(number: int, tp: int, rank: int) -> U8:
    """What a rank of a lender holds in a layer; heads count over the model."""
    heads = np.arange(HEADS // tp) + rank * (HEADS // tp)
    parts = np.ix_(np.arange(NUM_BLOCKS), heads, np.arange(BLOCK_TOKENS), range(CONTENT_NBYTES))
    block, head, token, byte = (part.astype(np.int64) for part in parts)
    labels = (number << 48) + (head << 40) + (block << 20) + (token << 8) + byte
    return as_bytes(labels, -1, 0) + np.uint8(1)


def _wait(made: KVCacheAllocation) -> None:
    for owner in made.owners:
        if owner.device.type == "cuda":
            torch.cuda.synchronize(owner.device)
