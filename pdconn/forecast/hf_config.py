"""A model's shape from its Hugging Face ``config.json``.

Only ``FAMILIES`` are read, with their defaults for what the file leaves out; a file without
``model_type`` is taken at its word.  A layer's kind is decided by the first of these that is
present::

    layer_types                       a kind per layer, by name
    attention_chunk_size              Llama 4: local where no_rope_layers is 1
    sliding_window + a pattern        every n-th layer is full (Gemma, Cohere)
    sliding_window + max_window_layers   Qwen: full below, windows from there on
    sliding_window                    all layers (Mistral)
    none of these                     full attention everywhere

A family may have variants with other stored state (sparse indexers, layers of other sizes):
keys that tell of it are refused too.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr  # noqa: A004 - shortens long values
from types import MappingProxyType
from typing import Any

from pdconn.forecast.errors import UnreadableConfig
from pdconn.forecast.model import MAX_LAYERS, ModelShape, sorts_of
from registration.references import AttentionKind
from transport.errors import did_you_mean

_NESTED = ("text_config", "llm_config", "language_config")

# Keys of state other than keys and values of attention.
_FOREIGN = (
    "ssm_cfg", "ssm_state_size", "state_size", "mamba_d_state", "mamba_state_dim",
    "mamba_expand", "mamba_num_heads", "linear_num_key_heads", "linear_attn_config",
    "hybrid_override_pattern", "layers_block_type", "attn_layer_period", "lru_width",
    "compress_ratios", "index_topk", "cross_attention_layers", "block_configs", "attn_type_list",
    "use_bidirectional_attention",
)  # fmt: skip

_KINDS = {
    "full_attention": AttentionKind.FULL,
    "global_attention": AttentionKind.FULL,
    "sliding_attention": AttentionKind.SLIDING_WINDOW,
    "chunked_attention": AttentionKind.CHUNKED_LOCAL,
}

# vLLM caches 32-bit models in 16 bits; a config without a dtype counts as 32-bit.
_ITEM_NBYTES = {
    "float32": 2, "float16": 2, "bfloat16": 2, "half": 2, "float": 2, "float8_e4m3fn": 1,
}  # fmt: skip


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
"""The families whose KV cache the forecast understands, by ``model_type``, and the defaults of
their configurations.

A ``config.json`` may leave out what equals the default of its family's class, as Gemma 3's
do; an explicit null is not replaced.  A family that is not here may keep other state than
keys and values, or in other layers: it is refused, since its forecast could be wrong in
silence.  A family without numbers has configurations that give all of them.
"""


def model_shape(config: Mapping[str, Any], name: str | None = None) -> ModelShape:
    """The shape of the model that ``config`` (a parsed ``config.json``) describes.

    Args:
        name: the shape's name; by default the config's ``model_type``.

    Raises:
        UnreadableConfig: a key is missing, wrong or not supported.
    """
    keys = _text_keys(config)
    family = keys.get("model_type")
    keys = {**_defaults(family), **keys}
    _refuse_foreign(keys)
    layers = _number(keys, "num_hidden_layers", MAX_LAYERS)
    _check_family(family)
    kinds, window = _kinds(keys, layers)
    shared = _optional(keys, "num_kv_shared_layers", 0)
    if shared >= layers:
        raise UnreadableConfig("num_kv_shared_layers", f"below {layers}", shared)
    kinds = kinds[: layers - shared]
    heads, row_items = _heads(keys)
    made = sorts_of(kinds, window, heads, row_items * _item_nbytes(keys))
    return ModelShape(name or str(family or "model"), made)


def _defaults(family: object) -> Mapping[str, Any]:
    return FAMILIES.get(family, {}) if isinstance(family, str) else {}


def _check_family(family: object) -> None:
    if family is None or (isinstance(family, str) and family in FAMILIES):
        return
    near = did_you_mean(str(family), FAMILIES, cutoff=0.8)
    hint = near if near.startswith("did you mean") else "pdconn plan --list has them"
    expected = "a family whose KV cache the forecast understands"
    raise UnreadableConfig("model_type", expected, repr(family), hint)


def _text_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's keys, over those of the outer level (such as its dtype).

    A null of the inner level gives way to a value of the outer one, and is kept without one:
    it says "none", where a missing key says "the default".
    """
    if not isinstance(config, Mapping):
        raise UnreadableConfig("config", "a JSON object", type(config).__name__)
    for key in _NESTED:
        inner = config.get(key)
        if inner is not None:
            if not isinstance(inner, Mapping):
                raise UnreadableConfig(key, "an object", repr(inner))
            kept = {k: v for k, v in inner.items() if v is not None or k not in config}
            return {**config, **kept}
    return dict(config)


def _refuse_foreign(keys: Mapping[str, Any]) -> None:
    for key in _FOREIGN:
        if keys.get(key):
            raise UnreadableConfig(key, "attention layers only", repr(keys[key]))
    if keys.get("is_encoder_decoder"):
        raise UnreadableConfig("is_encoder_decoder", "a decoder-only model", True)
    for key, like in (("global_head_dim", "head_dim"), ("swa_head_dim", "head_dim"),
                      ("num_global_key_value_heads", "num_key_value_heads")):  # fmt: skip
        if keys.get(key) not in (None, keys.get(like)):
            raise UnreadableConfig(key, f"{like} ({keys.get(like)}) in all layers", keys[key])


def _kinds(keys: Mapping[str, Any], layers: int) -> tuple[list[AttentionKind], int | None]:
    """Each layer's kind, and the window of windowed layers."""
    listed = keys.get("layer_types")
    chunk = keys.get("attention_chunk_size")
    if listed is not None:
        return _listed_kinds(keys, listed, layers)
    if chunk is not None:
        return _chunked_kinds(keys, layers), _number(keys, "attention_chunk_size")
    if keys.get("sliding_window") is None or keys.get("use_sliding_window") is False:
        return [AttentionKind.FULL] * layers, None
    window = _number(keys, "sliding_window")
    nth = _pattern(keys)
    first = _optional(keys, "max_window_layers", 0) if keys.get("use_sliding_window") else 0
    full = [(layer + 1) % nth == 0 if nth else layer < first for layer in range(layers)]
    return [AttentionKind.FULL if one else AttentionKind.SLIDING_WINDOW for one in full], window


def _listed_kinds(
    keys: Mapping[str, Any], listed: Any, layers: int
) -> tuple[list[AttentionKind], int | None]:
    if not isinstance(listed, list) or len(listed) < layers:
        raise UnreadableConfig("layer_types", f"a list of {layers} kinds", repr(listed))
    foreign = [kind for kind in listed if not (isinstance(kind, str) and kind in _KINDS)]
    if foreign:
        raise UnreadableConfig("layer_types", " or ".join(_KINDS), repr(foreign[0]))
    kinds = [_KINDS[kind] for kind in listed[:layers]]
    windowed = {kind for kind in kinds if kind.is_windowed}
    if len(windowed) > 1:
        raise UnreadableConfig("layer_types", "windows or chunks", "both")
    if AttentionKind.CHUNKED_LOCAL in windowed:
        return kinds, _number(keys, "attention_chunk_size")
    return kinds, _number(keys, "sliding_window") if windowed else None


def _chunked_kinds(keys: Mapping[str, Any], layers: int) -> list[AttentionKind]:
    """Llama 4: layers with rotary embeddings attend within a chunk."""
    interval = _optional(keys, "no_rope_layer_interval", 4)
    rotary = keys.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(rotary, list) or len(rotary) != layers:
        raise UnreadableConfig("no_rope_layers", f"a list of {layers} flags", repr(rotary))
    return [AttentionKind.CHUNKED_LOCAL if flag else AttentionKind.FULL for flag in rotary]


def _pattern(keys: Mapping[str, Any]) -> int:
    """Every n-th layer is full; 0 without such a pattern."""
    for key in ("_sliding_window_pattern", "sliding_window_pattern"):
        if keys.get(key) is not None:
            return _number(keys, key)
    return 0


def _heads(keys: Mapping[str, Any]) -> tuple[int, int]:
    """KV heads, and numbers stored per token and head."""
    if keys.get("kv_lora_rank") is not None:
        return 1, _number(keys, "kv_lora_rank") + _number(keys, "qk_rope_head_dim")
    grouped = keys.get("num_key_value_heads") is not None
    heads = _number(keys, "num_key_value_heads" if grouped else "num_attention_heads")
    if keys.get("head_dim") is not None:
        return heads, 2 * _number(keys, "head_dim")
    hidden, queries = _number(keys, "hidden_size"), _number(keys, "num_attention_heads")
    if hidden % queries:
        raise UnreadableConfig("hidden_size", f"a multiple of {queries} heads", hidden)
    return heads, 2 * (hidden // queries)


def _item_nbytes(keys: Mapping[str, Any]) -> int:
    for key in ("torch_dtype", "dtype"):
        if keys.get(key) is not None:
            dtype = str(keys[key]).removeprefix("torch.")
            if dtype not in _ITEM_NBYTES:
                raise UnreadableConfig(key, " or ".join(_ITEM_NBYTES), keys[key])
            return _ITEM_NBYTES[dtype]
    return 2


def _number(keys: Mapping[str, Any], key: str, most: int = 1 << 24) -> int:
    value = keys.get(key)
    if type(value) is not int or not 0 < value <= most:
        seen = "nothing" if value is None else repr(value)
        raise UnreadableConfig(key, f"a whole number from 1 to {most}", seen)
    return value


def _optional(keys: Mapping[str, Any], key: str, default: int) -> int:
    return default if not keys.get(key) else _number(keys, key, MAX_LAYERS)
