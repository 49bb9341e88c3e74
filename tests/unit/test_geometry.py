"""Which of vLLM's caches are described, and which are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from pdconn.vllm.geometry import kv_cache_references
from registration import AttentionKind, RegistrationError

ATTENTION: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.float32,
}
MLA = {**ATTENTION, "num_kv_heads": 1}


def described(spec: Any) -> Any:
    """The one group of an engine whose layers all share other layers' memory."""
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    config: Any = SimpleNamespace(kv_cache_tensors=[], transfer_groups=[group])
    made = kv_cache_references(
        config,
        {},
        layout="LBHNC",
        total_kv_heads=2,
        tp_rank=0,
        tp_size=1,
        opaque_tokens=False,
    )
    return made.groups[0]


@pytest.mark.parametrize(
    ("spec", "kind", "window"),
    [
        (FullAttentionSpec(**ATTENTION), AttentionKind.FULL, None),
        (MLAAttentionSpec(**MLA), AttentionKind.FULL, None),
        (SlidingWindowSpec(**ATTENTION, sliding_window=64), AttentionKind.SLIDING_WINDOW, 64),
        (SlidingWindowMLASpec(**MLA, sliding_window=8), AttentionKind.SLIDING_WINDOW, 8),
        (
            ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=32),
            AttentionKind.CHUNKED_LOCAL,
            32,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_caches_of_one_row_per_token_are_described(
    spec: Any, kind: AttentionKind, window: int | None
) -> None:
    group = described(spec)
    assert (group.kind, group.window, group.block_tokens) == (kind, window, 16)


@pytest.mark.parametrize(
    "spec",
    [
        CircularBufferSpec(**ATTENTION),
        MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_caches_are_refused_by_name(spec: Any) -> None:
    with pytest.raises(RegistrationError, match=f"expected one of .* got {type(spec).__name__}"):
        described(spec)
