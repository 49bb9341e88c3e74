"""The supported families: defaults of their configuration classes, and the keys they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

Defaults = Mapping[str, int | bool | str | None]


class Windows(Enum):
    """The layers of a family that have a window, according to vLLM's model class.

    UNIFORM: all, or none: vLLM gives ``sliding_window`` to each layer unless the model names
        another.
    NAMED: those in ``layer_types``; without names as UNIFORM, or all but every n-th.
    SWITCHED: as UNIFORM, if ``use_sliding_window`` is true (Qwen).
    CHUNKED: Llama 4's chunks.
    NONE: none.
    """

    UNIFORM = "uniform"
    NAMED = "named"
    SWITCHED = "switched"
    CHUNKED = "chunked"
    NONE = "none"


_READS: Mapping[Windows, tuple[str, ...]] = MappingProxyType(
    {
        Windows.UNIFORM: ("sliding_window",),
        Windows.NAMED: ("sliding_window",),
        Windows.SWITCHED: ("sliding_window", "use_sliding_window", "max_window_layers"),
        Windows.CHUNKED: ("attention_chunk_size", "no_rope_layers", "no_rope_layer_interval"),
        Windows.NONE: (),
    }
)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The parts of a configuration with one ``model_type`` that are read.

    Attributes:
        defaults: of its class; a file may omit keys that equal them.
        full_every: every n-th layer is full, if no list says otherwise; 0 without such a pattern.
        reads: geometry keys that matter, besides those of ``windows`` and of every family.
        ignores: geometry keys that vLLM's model of this family does not read.
        extra_window: tokens that vLLM adds to the configured window.
        is_latent: attention is MLA: one latent per token, whatever the number of heads.
        heads_divide_hidden: the size of a head is ``hidden_size`` over heads; ``head_dim`` is
            ignored.
        is_fixed: ``full_every`` applies regardless of ``layer_types``; for a switch: it is off.
    """

    defaults: Defaults
    windows: Windows = Windows.UNIFORM
    full_every: int = 0
    reads: frozenset[str] = frozenset()
    ignores: frozenset[str] = frozenset()
    extra_window: int = 0
    is_latent: bool = False
    heads_divide_hidden: bool = False
    is_fixed: bool = False

    def is_read(self, key: str) -> bool:
        """Whether ``key`` has an effect, or is known to have none."""
        return key in self.reads or key in self.ignores or key in _READS[self.windows]

    @property
    def names_layers(self) -> bool:
        """Whether ``layer_types`` may contain several kinds."""
        return self.windows in (Windows.NAMED, Windows.CHUNKED) or "layer_types" in self.reads


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


_SWITCH_OFF: Mapping[str, int | bool] = {"use_sliding_window": False, "sliding_window": 4096}
"""Qwen's windows: from a certain layer on, and only if enabled."""

_SHARED = frozenset({"num_kv_shared_layers"})
_PATTERN = frozenset({"sliding_window_pattern"})
# Written by transformers, which does not read it back.
_WRITTEN = frozenset({"_sliding_window_pattern"})
_OF_LATENTS = frozenset({"kv_lora_rank", "qk_rope_head_dim"})
_BESIDE_LATENTS = frozenset({"qk_nope_head_dim", "v_head_dim", "qk_head_dim"})
_OF_INDEXERS = frozenset({"index_head_dim", "index_topk_freq", "index_skip_topk_offset",
                          "index_topk_pattern", "indexer_types"})  # fmt: skip
_BESIDE_INDEXERS = frozenset({"index_topk", "index_n_heads", "indexer_rope_interleave",
                              "index_share_for_mtp_iteration"})  # fmt: skip
_SWA = frozenset({"swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "v_head_dim",
                  "hybrid_layer_pattern", "sliding_window_size"})  # fmt: skip


def _uniform(defaults: Defaults, *, names: bool = False, divided: bool = False) -> ModelFamily:
    """One window for all layers; ``names``: unless ``layer_types`` contains other kinds."""
    windows = Windows.NAMED if names else Windows.UNIFORM
    return ModelFamily(defaults, windows, heads_divide_hidden=divided)


def _every(nth: int, defaults: Defaults, **more: Any) -> ModelFamily:
    """All layers except each n-th have the window."""
    return ModelFamily(defaults, Windows.NAMED, nth, **more)


def _latent(defaults: Defaults) -> ModelFamily:
    """MLA; vLLM uses no windows with it."""
    return ModelFamily(
        defaults, Windows.NONE, reads=_OF_LATENTS, ignores=_BESIDE_LATENTS, is_latent=True
    )


def _indexed(defaults: Defaults) -> ModelFamily:
    """MLA whose layers keep an indexer's row beside the latent (DeepSeek sparse attention)."""
    return ModelFamily(
        defaults,
        Windows.NONE,
        reads=_OF_LATENTS | _OF_INDEXERS,
        ignores=_BESIDE_LATENTS | _BESIDE_INDEXERS,
        is_latent=True,
    )


def _switched(
    defaults: Defaults, *, divided: bool = False, is_fixed: bool = False, names: bool = False
) -> ModelFamily:
    """``names``: layers in ``layer_types`` have windows regardless of the switch."""
    reads = frozenset({"layer_types"} if names else ())
    return ModelFamily(
        defaults, Windows.SWITCHED, reads=reads, heads_divide_hidden=divided, is_fixed=is_fixed
    )


def _states(defaults: Defaults, *reads: str, **more: Any) -> ModelFamily:
    """Attention without windows beside states."""
    return ModelFamily(defaults, Windows.NONE, reads=frozenset({"layer_types", *reads}), **more)


_LLAMA = _uniform(_family(32, 4096, 32, None), names=True)
_QWEN_VL = _switched(_family(80, 8192, 64, 8, max_window_layers=80, **_SWITCH_OFF), divided=True)
_QWEN3_VL = _uniform(_family(32, 4096, 32, 32, 128))
_QWEN3_VL_MOE = _uniform(_family(24, 2048, 16, 16))
_GEMMA3 = _every(
    6, _family(26, 2304, 8, 4, 256, sliding_window=4096), reads=_PATTERN, ignores=_WRITTEN
)
_GEMMA3N = _every(
    5,
    _family(35, 2048, 8, 2, 256, sliding_window=512, num_kv_shared_layers=15),
    reads=_SHARED,
)
_GEMMA4_KEYS = _SHARED | {
    "global_head_dim", "num_global_key_value_heads", "per_layer_config",
}  # fmt: skip
_GEMMA4_DEFAULTS = _family(30, 2304, 8, 4, 256, sliding_window=512, global_head_dim=512)
_GEMMA4 = _every(6, _GEMMA4_DEFAULTS, reads=_GEMMA4_KEYS)
_GEMMA4_UNIFIED = _every(
    6, MappingProxyType({**_GEMMA4_DEFAULTS, "sliding_window": 1024}), reads=_GEMMA4_KEYS
)
_LLAMA4 = ModelFamily(_family(48, 5120, 40, 8, 128, attention_chunk_size=8192), Windows.CHUNKED)
_GLM = _uniform(_family(40, 4096, 32, 2, 128))
_EXAONE4 = _every(
    4, _family(32, 4096, 32, 32, sliding_window=4096), reads=_PATTERN, ignores=_WRITTEN
)
_COHERE2 = _every(
    4,
    _family(40, 8192, 64, None, sliding_window=4096),
    reads=_PATTERN,
    ignores=_WRITTEN,
    extra_window=1,
)
_MIMO_V2 = ModelFamily(
    MappingProxyType({}),
    Windows.NAMED,
    reads=_SWA,
    ignores=frozenset({"attention_chunk_size", "swa_num_attention_heads"}),
)
_STEP3P5 = ModelFamily(
    MappingProxyType({}),
    Windows.NAMED,
    2,
    reads=frozenset({"num_attention_groups", "attention_other_setting"}),
    ignores=frozenset({"num_sliding_attention_heads"}),
)

_MAMBA = {"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 128}
_MAMBA2_KEYS = (
    "mamba_n_groups", "mamba_d_conv", "mamba_expand", "mamba_n_heads", "mamba_d_ssm",
    "mamba_d_head", "mamba_d_state",
)  # fmt: skip
_GATED_DELTA_NET = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_GDN_KEYS = (*_GATED_DELTA_NET, "full_attention_interval")
_QWEN3_5 = _states(_family(32, 4096, 16, 4, 256, **_GATED_DELTA_NET), *_GDN_KEYS)
_QWEN3_5_MOE = _states(_family(40, 2048, 16, 2, 256, **_GATED_DELTA_NET), *_GDN_KEYS)
_LFM2_KEYS = ("conv_L_cache", "conv_dim", "full_attn_idxs")
_GIVEN: Defaults = MappingProxyType({})

UNNAMED = ModelFamily(_GIVEN, Windows.NONE, reads=frozenset({"layer_types", "sliding_window"}))
"""A file without a ``model_type``: only keys that mean the same in all families."""

FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        "afmoe": _every(
            4,
            _family(32, 2048, 16, None, 128, sliding_window=1024),
            reads=frozenset({"global_attn_every_n_layers"}),
        ),
        "apertus": _LLAMA,
        "arcee": _uniform(_family(32, 2560, 32, None), names=True),
        "bamba": _states(
            _family(32, 4096, 32, 8, mamba_d_state=256, **_MAMBA),
            *_MAMBA2_KEYS,
            "attn_layer_indices",
        ),
        "cohere": _uniform(_family(40, 8192, 64, None)),
        "cohere2": _COHERE2,
        "deepseek_v2": _latent(_family(32, 4096, 32, None, kv_lora_rank=512, qk_rope_head_dim=64)),
        "deepseek_v3": _latent(_family(61, 7168, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64)),
        "deepseek_v32": _indexed(_GIVEN),
        "ernie4_5": _uniform(_family(18, 1024, 16, 2, 128), names=True),
        "ernie4_5_moe": _uniform(_family(28, 2560, 20, 4)),
        "exaone4": _EXAONE4,
        "exaone_moe": _EXAONE4,
        "falcon_h1": _states(
            _family(32, 4096, 32, 8, mamba_d_ssm=1024, mamba_d_state=256, **_MAMBA),
            *_MAMBA2_KEYS,
        ),
        "gemma": _uniform(_family(28, 3072, 16, 16, 256)),
        "gemma2": _every(2, _family(26, 2304, 8, 4, 256, sliding_window=4096)),
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
        "gemma3n": _GEMMA3N,
        "gemma3n_text": _GEMMA3N,
        "gemma4": _GEMMA4,
        "gemma4_text": _GEMMA4,
        "gemma4_unified": _GEMMA4_UNIFIED,
        "gemma4_unified_text": _GEMMA4_UNIFIED,
        "glm": _uniform(_family(40, 4096, 32, 2, 128), names=True),
        "glm4": _GLM,
        "glm4_moe": _uniform(_GIVEN),
        "glm4_moe_lite": _latent(_family(47, 2048, 20, 20, kv_lora_rank=512, qk_rope_head_dim=64)),
        "glm_moe_dsa": _indexed(_GIVEN),
        "gpt_oss": _every(2, _family(36, 2880, 64, 8, 64, sliding_window=128), is_fixed=True),
        "granite": _LLAMA,
        "granitemoe": _uniform(_family(32, 4096, 32, None), names=True, divided=True),
        "granitemoehybrid": _states(
            _family(32, 4096, 32, None, mamba_d_state=256, **_MAMBA),
            *_MAMBA2_KEYS,
            "layers_block_type",
            heads_divide_hidden=True,
        ),
        "hunyuan_v1_dense": _uniform(_family(32, 4096, 32, None), names=True),
        "internlm2": _uniform(_GIVEN, divided=True),
        "internlm3": _uniform(_GIVEN, names=True),
        "jamba": _states(
            _family(
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
            "attn_layer_period",
            "attn_layer_offset",
            "mamba_d_state",
            "mamba_d_conv",
            "mamba_expand",
            ignores=frozenset({"mamba_dt_rank"}),
            heads_divide_hidden=True,
        ),
        "kimi_k2": _latent(_GIVEN),
        "kimi_linear": _states(
            _GIVEN,  # vLLM reads it with its own class, not with that of transformers
            "linear_attn_config",
            *_OF_LATENTS,
            ignores=_BESIDE_LATENTS,
            is_latent=True,
        ),
        "lfm2": _states(_family(32, 2560, 32, 8, conv_L_cache=3), *_LFM2_KEYS),
        "lfm2_moe": _states(
            _family(32, 2048, 32, 8, conv_L_cache=3),
            "conv_L_cache",
            "full_attn_idxs",
            ignores=frozenset({"conv_dim"}),
        ),
        "llama": _LLAMA,
        "llama4": _LLAMA4,
        "llama4_text": _LLAMA4,
        "mimo": _switched(_GIVEN, divided=True),
        "mimo_v2": _MIMO_V2,
        "mimo_v2_flash": _MIMO_V2,
        "minimax_m2": _uniform(_family(62, 3072, 48, 8, 128)),
        "ministral": _uniform(_family(32, 4096, 32, 8, sliding_window=4096), names=True),
        "ministral3": _uniform(_family(34, 4096, 32, 8, 128), names=True),
        "mistral": _uniform(_family(32, 4096, 32, 8, sliding_window=4096), names=True),
        "mixtral": _uniform(_family(32, 4096, 32, 8)),
        "nemotron": _uniform(_family(32, 6144, 48, None)),
        "nemotron_h": _states(
            _family(
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
            "mamba_num_heads",
            "mamba_head_dim",
            "ssm_state_size",
            "conv_kernel",
            "hybrid_override_pattern",
            "layers_block_type",
            ignores=frozenset({"mamba_expand"}),
        ),
        "olmo2": _uniform(_family(32, 4096, 32, None), names=True),
        "olmo3": _every(4, _family(32, 4096, 32, None, sliding_window=4096)),
        "olmoe": _uniform(_family(16, 2048, 16, None), divided=True),
        "phi3": _uniform(_family(32, 3072, 32, None), names=True),
        "phimoe": _uniform(_family(32, 4096, 32, 8)),
        "qwen2": _switched(
            _family(32, 4096, 32, 32, max_window_layers=28, **_SWITCH_OFF), divided=True
        ),
        "qwen2_5_vl": _QWEN_VL,
        "qwen2_5_vl_text": _QWEN_VL,
        "qwen2_moe": _switched(
            _family(24, 2048, 16, 16, max_window_layers=28, **_SWITCH_OFF),
            divided=True,
            is_fixed=True,
        ),
        "qwen2_vl": _QWEN_VL,
        "qwen2_vl_text": _QWEN_VL,
        "qwen3": _switched(_family(32, 4096, 32, 32, 128, max_window_layers=28, **_SWITCH_OFF)),
        "qwen3_5": _QWEN3_5,
        "qwen3_5_moe": _QWEN3_5_MOE,
        "qwen3_5_moe_text": _QWEN3_5_MOE,
        "qwen3_5_text": _QWEN3_5,
        "qwen3_moe": _switched(_family(24, 2048, 32, 4, **_SWITCH_OFF), is_fixed=True),
        "qwen3_next": _states(_family(48, 2048, 16, 2, 256, **_GATED_DELTA_NET), *_GDN_KEYS),
        "qwen3_vl": _QWEN3_VL,
        "qwen3_vl_moe": _QWEN3_VL_MOE,
        "qwen3_vl_moe_text": _QWEN3_VL_MOE,
        "qwen3_vl_text": _QWEN3_VL,
        "seed_oss": _uniform(_family(64, 4096, 80, 8, 128), names=True),
        "smollm3": _switched(
            _family(36, 2048, 16, 4, use_sliding_window=False), is_fixed=True, names=True
        ),
        "stablelm": _uniform(_family(32, 2560, 32, 32), divided=True),
        "starcoder2": _uniform(_family(30, 3072, 24, 2), names=True),
        "step3p5": _STEP3P5,
        "step3p7": _STEP3P5,
    }
)
"""The families whose KV cache the forecast supports, by ``model_type``.

A ``config.json`` may omit keys that equal the default of its family's class, as Gemma 3's do; an
explicit null is not replaced.  A family that is not here may keep other state than keys and values,
or in other layers: it is refused, since its forecast could be silently wrong.  A family without
numbers has configurations with all of them.
"""
