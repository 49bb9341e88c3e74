"""Which of vLLM's caches are described, and which are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm.config  # noqa: F401 - before its parts, which import each other
from transformers import Gemma4TextConfig
from vllm.transformers_utils.model_arch_config_convertor import Gemma4ModelArchConfigConvertor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from pdconn.vllm.blocks.arrangement import Unit
from pdconn.vllm.blocks.geometry import kv_cache_references
from pdconn.vllm.blocks.heads import first_head, total_kv_heads
from pdconn.vllm.blocks.traits import block_traits
from registration import AttentionKind, RegistrationError
from tests.vllm.identity.known import SAME

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
        total_kv_heads=lambda layer: 2,
        states=lambda spec: (),
        tp_rank=0,
        units=lambda layer, spec: Unit.TOKEN,
        tp_size=1,
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
    assert [first_head(spec, total, rank, tp) for rank in range(tp)] == firsts


@pytest.mark.parametrize(("heads", "total"), [(4, None), (2, 8), (8, 8)])
def test_heads_that_cannot_be_determined_are_refused(heads: int, total: int | None) -> None:
    """A layer with other heads than the model's other layers, over two ranks."""
    spec = FullAttentionSpec(**{**ATTENTION, "num_kv_heads": heads})
    with pytest.raises(RegistrationError, match=f"KV heads: {heads} on a rank of 2"):
        first_head(spec, total, 1, 2)


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
        use_mla=False,
        get_total_num_kv_heads=lambda: 8,
        hf_text_config=SimpleNamespace(**config),
        model_arch_config=SimpleNamespace(per_layer_overrides=None),
    )
    assert total_kv_heads(model, "model.layers.3.self_attn.attn") == total


def gemma_4(**changes: Any) -> Any:
    """What vLLM makes of a small Gemma 4: its full-attention layer has fewer and larger heads."""
    config = Gemma4TextConfig(
        **{
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "head_dim": 32,
            "global_head_dim": 64,
            **changes,
        }
    )
    arch = Gemma4ModelArchConfigConvertor(config, config).convert()
    return SimpleNamespace(
        model="models/gemma",
        dtype="float32",
        use_mla=False,
        hf_text_config=config,
        model_arch_config=arch,
        get_total_num_kv_heads=lambda: arch.total_num_kv_heads,
    )


def layer_heads(model: Any, count: int) -> list[int | None]:
    return [total_kv_heads(model, f"model.layers.{i}.self_attn.attn") for i in range(count)]


def test_layers_that_differ_in_their_heads_have_each_their_own_number() -> None:
    """Gemma 4 did not start: its config raises when it is asked for one number, on TP 1 too."""
    model = gemma_4()
    with pytest.raises(RuntimeError, match="is a per-layer attribute"):
        _ = model.hf_text_config.num_key_value_heads
    assert layer_heads(model, 6) == [8, 8, 8, 8, 8, 2]


def test_a_drafters_layers_are_not_taken_for_the_models() -> None:
    assert layer_heads(gemma_4(), 8)[5:] == [2, None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_layers_that_differ_in_their_heads_are_split_over_ranks(rank: int) -> None:
    """Each by its own number: TP above 1 was refused, as if no layer's were known."""
    firsts = []
    for heads, total in zip((4, 4, 4, 4, 4, 1), layer_heads(gemma_4(), 6), strict=True):
        spec = FullAttentionSpec(**{**ATTENTION, "num_kv_heads": heads})
        firsts.append(first_head(spec, total, rank, 2))
    assert firsts == [4 * rank] * 5 + [rank]


def traits_of(model: Any) -> dict[str, str]:
    config: Any = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
    )
    return block_traits(config, {}, {}, SAME)


def test_what_differs_between_layers_is_compared_layer_by_layer() -> None:
    """Asking the whole config for it raised, after the heads were known."""
    traits = traits_of(gemma_4())
    assert traits["model.num_key_value_heads"] == "8 x5, 2"
    assert traits["model.head_dim"] == "32 x5, 64"
    assert traits["model.num_attention_heads"] == "8"
    for changed in ({"num_global_key_value_heads": 4}, {"global_head_dim": 128}):
        assert traits_of(gemma_4(**changed)) != traits


def test_a_model_of_equal_layers_has_the_traits_that_it_had() -> None:
    """Engines of an earlier release compare them."""
    model = gemma_4(num_global_key_value_heads=8, global_head_dim=32)
    assert model.model_arch_config.per_layer_overrides is None
    traits = traits_of(model)
    assert (traits["model.num_key_value_heads"], traits["model.head_dim"]) == ("8", "32")


def test_other_caches_are_refused_by_name() -> None:
    with pytest.raises(RegistrationError, match=r"expected one of .* got CircularBufferSpec"):
        described(CircularBufferSpec(**ATTENTION))
