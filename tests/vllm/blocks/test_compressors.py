"""Compressors are told by vLLM's own layers; what is in doubt is a plain window."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

from pdconn.store.format.row import as_kept
from pdconn.vllm.blocks.arrangement import Unit
from pdconn.vllm.blocks.compressors import compress_ratio
from pdconn.vllm.blocks.geometry import kv_cache_references

OVERLAPPING, APART = "model.layers.2.attn", "model.layers.3.attn"
STATE, SWA = "compressor.state_cache", "swa_cache"
INDEXER_STATE = f"{OVERLAPPING}.indexer.compressor.state_cache"


@pytest.fixture(scope="module")
def layers() -> dict[str, Any]:
    """vLLM's caches of two layers; stand-ins for the attention that they are a part of."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        for name, width, ratio in (
            (f"{OVERLAPPING}.{STATE}", 2048, 4),
            (INDEXER_STATE, 512, 4),
            (f"{APART}.{STATE}", 1024, 128),
        ):
            CompressorStateCache(width, torch.float32, ratio, name)
        cache: Any = SimpleNamespace(cache_dtype="fp8_ds_mla")
        DeepseekV4SWACache(512, 128, torch.uint8, f"{APART}.{SWA}", cache)
        made = dict(config.compilation_config.static_forward_context)
        for name, layer in made.items():
            layer.spec = layer.get_kv_cache_spec(config)
            assert layer.prefix == name
    made[OVERLAPPING] = SimpleNamespace(compress_ratio=4)
    made[APART] = SimpleNamespace(compress_ratio=128)
    return made


def ratio_of(layers: dict[str, Any], *names: str, **changes: Any) -> int:
    return compress_ratio(layers, names, replace(layers[names[0]].spec, **changes))


def test_vllms_compressors_have_the_ratio_of_their_attention(layers: dict[str, Any]) -> None:
    assert ratio_of(layers, f"{OVERLAPPING}.{STATE}") == 4
    assert ratio_of(layers, f"{OVERLAPPING}.{STATE}", INDEXER_STATE) == 4
    assert ratio_of(layers, f"{APART}.{STATE}") == 128


def test_a_window_of_the_same_attention_and_size_is_none(layers: dict[str, Any]) -> None:
    """Negative control: 128 tokens, as the compressor's beside it."""
    assert layers[f"{APART}.{SWA}"].spec.sliding_window == 128
    assert ratio_of(layers, f"{APART}.{SWA}") == 1


def test_what_is_in_doubt_is_a_plain_window(layers: dict[str, Any]) -> None:
    state = f"{OVERLAPPING}.{STATE}"
    assert ratio_of(layers, state, f"{APART}.{STATE}") == 1, "two ratios"
    assert ratio_of(layers, state, f"{APART}.{SWA}") == 1, "not all are compressors"
    assert ratio_of(layers, state, sliding_window=6) == 1, "no multiple of the ratio"
    assert ratio_of(layers, state, extra_retained_tokens=1) == 1, "tokens are computed again"
    alone = {state: layers[state]}
    assert ratio_of(alone, state) == 1, "no attention names a ratio"
    assert compress_ratio({}, [state], layers[state].spec) == 1, "on another pipeline stage"


@pytest.mark.parametrize(
    ("name", "blocks"),
    [(f"{OVERLAPPING}.{STATE}", 1), (f"{APART}.{STATE}", 0), (f"{APART}.{SWA}", 2)],
)
def test_rows_keep_the_blocks_of_the_facts(layers: dict[str, Any], name: str, blocks: int) -> None:
    """Of DeepSeek-V4's groups: tails of 1, 0 and 2 blocks at boundaries of 256 tokens."""
    group = SimpleNamespace(kv_cache_spec=layers[name].spec, layer_names=[name])
    config: Any = SimpleNamespace(kv_cache_tensors=[], transfer_groups=[group])
    (made,) = kv_cache_references(
        config, {}, layout="LBHNC", total_kv_heads=lambda layer: 1, tp_rank=0, tp_size=1,
        states=lambda spec: (),
        units=lambda layer, spec: Unit.TOKEN, modules=layers,
    ).groups  # fmt: skip
    window = as_kept(made, 256).window
    assert window is not None
    assert -(-(window - 1) // made.block_tokens) == blocks
