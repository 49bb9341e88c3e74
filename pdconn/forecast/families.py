"""The model families whose KV cache the forecast understands, and their configurations' defaults.

A ``config.json`` may leave out what equals the default of its family's class, as Gemma 3's
do.  A family that is not here may keep other state than keys and values, or in other
layers, so its forecast could be wrong in silence: it is refused.  A family without numbers
has configurations that give all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Defaults = Mapping[str, int | bool | None]


def _family(
    layers: int, hidden: int, heads: int, kv_heads: int | None, head_dim: int | None = None,
    **more: int | bool,
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
_LLAMA4 = _family(48, 5120, 40, 8, 128, attention_chunk_size=8192)
_GLM = _family(40, 4096, 32, 2, 128)
_GIVEN: Defaults = MappingProxyType({})

FAMILIES: Mapping[str, Defaults] = MappingProxyType(
    {
        "apertus": _LLAMA,
        "arcee": _family(32, 2560, 32, None),
        "cohere": _family(40, 8192, 64, None),
        "cohere2": _family(40, 8192, 64, None, sliding_window=4096, sliding_window_pattern=4),
        "deepseek_v2": _family(32, 4096, 32, None, kv_lora_rank=512, qk_rope_head_dim=64),
        "deepseek_v3": _family(61, 7168, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64),
        "ernie4_5": _family(18, 1024, 16, 2, 128),
        "ernie4_5_moe": _family(28, 2560, 20, 4),
        "exaone4": _family(32, 4096, 32, 32, sliding_window=4096, sliding_window_pattern=4),
        "gemma": _family(28, 3072, 16, 16, 256),
        "gemma2": _family(26, 2304, 8, 4, 256, sliding_window=4096, sliding_window_pattern=2),
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
        "gemma3n": _GEMMA3N,
        "gemma3n_text": _GEMMA3N,
        "glm": _GLM,
        "glm4": _GLM,
        "glm4_moe": _GIVEN,
        "gpt_oss": _family(36, 2880, 64, 8, 64, sliding_window=128, sliding_window_pattern=2),
        "granite": _LLAMA,
        "granitemoe": _LLAMA,
        "hunyuan_v1_dense": _LLAMA,
        "internlm2": _GIVEN,
        "internlm3": _GIVEN,
        "kimi_k2": _GIVEN,
        "llama": _LLAMA,
        "llama4": _LLAMA4,
        "llama4_text": _LLAMA4,
        "minimax_m2": _family(62, 3072, 48, 8, 128),
        "ministral": _family(32, 4096, 32, 8, sliding_window=4096),
        "ministral3": _family(34, 4096, 32, 8, 128),
        "mistral": _family(32, 4096, 32, 8, sliding_window=4096),
        "mixtral": _family(32, 4096, 32, 8),
        "nemotron": _family(32, 6144, 48, None),
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
        "qwen3_moe": _family(24, 2048, 32, 4, use_sliding_window=False, sliding_window=4096),
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
"""Defaults by ``model_type``; explicit nulls of a configuration are not replaced."""
