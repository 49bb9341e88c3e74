"""The families whose configurations are read, and the defaults of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Defaults = Mapping[str, int | bool | str | None]


def _family(
    layers: int, hidden: int, heads: int, kv_heads: int | None, head_dim: int | None = None,
    **more: int | bool | str,
) -> Defaults:  # fmt: skip
    return MappingProxyType(
        {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            **more,
        }
    )


def _windows_after(first: int) -> Mapping[str, int | bool]:
    """Qwen: windows from layer ``first`` on, and only if they are switched on."""
    return {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": first}


_LLAMA = _family(32, 4096, 32, None)
_QWEN_VL = _family(80, 8192, 64, 8, **_windows_after(80))
_QWEN3_VL = _family(32, 4096, 32, 32, 128)
_QWEN3_VL_MOE = _family(24, 2048, 16, 16)
_GEMMA3 = _family(26, 2304, 8, 4, 256, sliding_window=4096, sliding_window_pattern=6)
_GEMMA3N = _family(
    35, 2048, 8, 2, 256, sliding_window=512, sliding_window_pattern=5, num_kv_shared_layers=15
)
_GEMMA4 = _family(
    30, 2304, 8, 4, 256, sliding_window=512, sliding_window_pattern=6, global_head_dim=512
)
_GEMMA4_UNIFIED: Defaults = MappingProxyType({**_GEMMA4, "sliding_window": 1024})
_LLAMA4 = _family(48, 5120, 40, 8, 128, attention_chunk_size=8192)
_GLM = _family(40, 4096, 32, 2, 128)
_MAMBA = {"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 128}
_GATED_DELTA_NET = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_QWEN3_5 = _family(32, 4096, 16, 4, 256, **_GATED_DELTA_NET)
_QWEN3_5_MOE = _family(40, 2048, 16, 2, 256, **_GATED_DELTA_NET)
_GIVEN: Defaults = MappingProxyType({})

FAMILIES: Mapping[str, Defaults] = MappingProxyType(
    {
        "apertus": _LLAMA,
        "arcee": _family(32, 2560, 32, None),
        "bamba": _family(32, 4096, 32, 8, mamba_d_state=256, **_MAMBA),
        "cohere": _family(40, 8192, 64, None),
        "cohere2": _family(40, 8192, 64, None, sliding_window=4096, sliding_window_pattern=4),
        "deepseek_v2": _family(32, 4096, 32, None, kv_lora_rank=512, qk_rope_head_dim=64),
        "deepseek_v3": _family(61, 7168, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64),
        "ernie4_5": _family(18, 1024, 16, 2, 128),
        "ernie4_5_moe": _family(28, 2560, 20, 4),
        "exaone4": _family(32, 4096, 32, 32, sliding_window=4096, sliding_window_pattern=4),
        "falcon_h1": _family(32, 4096, 32, 8, mamba_d_ssm=1024, mamba_d_state=256, **_MAMBA),
        "gemma": _family(28, 3072, 16, 16, 256),
        "gemma2": _family(26, 2304, 8, 4, 256, sliding_window=4096, sliding_window_pattern=2),
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
        "gemma3n": _GEMMA3N,
        "gemma3n_text": _GEMMA3N,
        "gemma4": _GEMMA4,
        "gemma4_text": _GEMMA4,
        "gemma4_unified": _GEMMA4_UNIFIED,
        "gemma4_unified_text": _GEMMA4_UNIFIED,
        "glm": _GLM,
        "glm4": _GLM,
        "glm4_moe": _GIVEN,
        "gpt_oss": _family(36, 2880, 64, 8, 64, sliding_window=128, sliding_window_pattern=2),
        "granite": _LLAMA,
        "granitemoe": _LLAMA,
        "granitemoehybrid": _family(32, 4096, 32, None, mamba_d_state=256, **_MAMBA),
        "hunyuan_v1_dense": _LLAMA,
        "internlm2": _GIVEN,
        "internlm3": _GIVEN,
        "jamba": _family(
            32,
            4096,
            32,
            8,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
        ),
        "kimi_k2": _GIVEN,
        "kimi_linear": _family(
            27,
            2304,
            32,
            32,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            linear_head_dim=128,
            linear_num_heads=32,
            linear_conv_kernel_dim=4,
        ),
        "lfm2": _family(32, 2560, 32, 8, conv_L_cache=3),
        "lfm2_moe": _family(32, 2048, 32, 8, conv_L_cache=3),
        "llama": _LLAMA,
        "llama4": _LLAMA4,
        "llama4_text": _LLAMA4,
        "minimax_m2": _family(62, 3072, 48, 8, 128),
        "ministral": _family(32, 4096, 32, 8, sliding_window=4096),
        "ministral3": _family(34, 4096, 32, 8, 128),
        "mistral": _family(32, 4096, 32, 8, sliding_window=4096),
        "mixtral": _family(32, 4096, 32, 8),
        "nemotron": _family(32, 6144, 48, None),
        "nemotron_h": _family(
            4,
            4096,
            32,
            8,
            128,
            mamba_num_heads=128,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=128,
            conv_kernel=4,
            mamba_ssm_cache_dtype="float32",
            hybrid_override_pattern="ME*-",
        ),
        "olmo2": _LLAMA,
        "olmo3": _family(32, 4096, 32, None, sliding_window=4096, sliding_window_pattern=4),
        "olmoe": _family(16, 2048, 16, None),
        "phi3": _family(32, 3072, 32, None),
        "phimoe": _family(32, 4096, 32, 8),
        "qwen2": _family(32, 4096, 32, 32, **_windows_after(28)),
        "qwen2_5_vl": _QWEN_VL,
        "qwen2_5_vl_text": _QWEN_VL,
        "qwen2_moe": _family(24, 2048, 16, 16, **_windows_after(28)),
        "qwen2_vl": _QWEN_VL,
        "qwen2_vl_text": _QWEN_VL,
        "qwen3": _family(32, 4096, 32, 32, 128, **_windows_after(28)),
        "qwen3_5": _QWEN3_5,
        "qwen3_5_moe": _QWEN3_5_MOE,
        "qwen3_5_moe_text": _QWEN3_5_MOE,
        "qwen3_5_text": _QWEN3_5,
        "qwen3_moe": _family(24, 2048, 32, 4, use_sliding_window=False, sliding_window=4096),
        "qwen3_next": _family(48, 2048, 16, 2, 256, **_GATED_DELTA_NET),
        "qwen3_vl": _QWEN3_VL,
        "qwen3_vl_moe": _QWEN3_VL_MOE,
        "qwen3_vl_moe_text": _QWEN3_VL_MOE,
        "qwen3_vl_text": _QWEN3_VL,
        "seed_oss": _family(64, 4096, 80, 8, 128),
        "smollm3": _family(36, 2048, 16, 4, use_sliding_window=False),
        "stablelm": _family(32, 2560, 32, 32),
        "starcoder2": _family(30, 3072, 24, 2),
    }
)
"""The families whose KV cache the forecast understands, by ``model_type``, and the defaults of
their configurations.

A ``config.json`` may leave out what equals the default of its family's class, as Gemma 3's
do; an explicit null is not replaced.  A family that is not here may keep other state than
keys and values, or in other layers: it is refused, since its forecast could be wrong in
silence.  A family without numbers has configurations that give all of them.
"""
