"""Which engines may compress their rows."""

from __future__ import annotations

import warnings

import pytest
import torch

from pdconn.store.store_errors import StoreSettingError
from tests.vllm.store.configured import TRAITS, config, layout, named

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        MambaSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    from pdconn.vllm.store.storing import check_bfloat16


def full(dtype: torch.dtype) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=dtype)


def window(dtype: torch.dtype) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=dtype, sliding_window=64
    )


def states() -> MambaSpec:
    return MambaSpec(block_size=16, shapes=((4, 16), (2, 8)), dtypes=(torch.float32, torch.float32))


def engine(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def uniform(**specs: FullAttentionSpec) -> KVCacheConfig:
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(16, dict(specs)))
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])


def test_bfloat16_is_compressed_beside_states_of_any_dtype() -> None:
    check_bfloat16(engine(full(torch.bfloat16), window(torch.bfloat16), states()))
    check_bfloat16(uniform(a=full(torch.bfloat16), b=full(torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
def test_other_dtypes_are_refused_with_the_layer_s_name(dtype: torch.dtype) -> None:
    expected = (
        rf"store\.compression: expected 'none' for KV of {dtype}, got 'exponents' \(layer.1\)"
    )
    with pytest.raises(StoreSettingError, match=expected):
        check_bfloat16(engine(full(torch.bfloat16), window(dtype)))
    with pytest.raises(StoreSettingError, match=r"\(b\)"):
        check_bfloat16(uniform(a=full(torch.bfloat16), b=full(dtype)))


def test_compressed_rows_have_a_namespace_of_their_own(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    of = config(tmp_path_factory.mktemp("model"))
    plain = layout()
    assert named(of, TRAITS, plain) != named(of, TRAITS, plain.packed())
    assert named(of, TRAITS, plain.packed()) == named(of, TRAITS, layout().packed())
