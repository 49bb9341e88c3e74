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

from pdconn.vllm.geometry import _first_head, kv_cache_references, total_kv_heads
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
    ("heads", "total", "tp", "firsts"),
    [
        (4, 8, 2, [0, 4]),
        (1, 2, 4, [0, 0, 1, 1]),
        (1, 1, 4, [0, 0, 0, 0]),
        (8, 8, 1, [0]),
        (3, None, 1, [0]),
    ],
)
def test_ranks_hold_heads_in_order_and_replicas_share(
    heads: int, total: int | None, tp: int, firsts: list[int]
) -> None:
    spec = FullAttentionSpec(**{**ATTENTION, "num_kv_heads": heads})
    assert [_first_head(spec, total, rank, tp) for rank in range(tp)] == firsts


@pytest.mark.parametrize(("heads", "total"), [(4, None), (2, 8), (8, 8)])
def test_heads_that_cannot_be_determined_are_refused(heads: int, total: int | None) -> None:
    """A layer with other heads than the model's other layers, over two ranks."""
    spec = FullAttentionSpec(**{**ATTENTION, "num_kv_heads": heads})
    with pytest.raises(RegistrationError, match=f"KV heads: {heads} on a rank of 2"):
        _first_head(spec, total, 1, 2)


@pytest.mark.parametrize(
    ("config", "total"),
    [
        ({"num_key_value_heads": 8}, 8),
        ({"num_key_value_heads": 8, "swa_num_key_value_heads": 4}, None),
        ({"num_key_value_heads": 8, "swa_num_key_value_heads": None}, 8),
        ({}, 8),
    ],
)
def test_a_config_that_names_several_head_counts(config: dict[str, Any], total: int | None) -> None:
    model = SimpleNamespace(
        use_mla=False, get_total_num_kv_heads=lambda: 8, hf_text_config=SimpleNamespace(**config)
    )
    assert total_kv_heads(model) == total


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
