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

Families with recurrent states say it otherwise: see :mod:`pdconn.forecast.hf.states`.  In Gemma 4
layers of full attention have heads of their own.  A family may have variants with other stored
state (sparse indexers, layers of other sizes): keys that tell of it are refused too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr  # noqa: A004 - shortens long values
from typing import Any

from pdconn.forecast.errors import UnreadableConfig
from pdconn.forecast.hf.families import FAMILIES
from pdconn.forecast.hf.keys import Keys, item_nbytes, named_layers, number, optional, text_keys
from pdconn.forecast.hf.states import STATE_FAMILIES, hybrid_layers
from pdconn.forecast.model import MAX_LAYERS, LayerSort, ModelShape, Sort, StateSort
from registration.references import AttentionKind
from transport.errors import did_you_mean

# Keys of state other than keys and values of attention, and other than states that are known.
_FOREIGN = (
    "ssm_cfg", "state_size", "mamba_state_dim", "lru_width", "compress_ratios", "index_topk",
    "cross_attention_layers", "block_configs", "attn_type_list",
)  # fmt: skip

# Keys of states, in families that have none.
_OF_STATES = (
    "ssm_state_size", "mamba_d_state", "mamba_expand", "mamba_num_heads", "linear_num_key_heads",
    "linear_attn_config", "hybrid_override_pattern", "layers_block_type", "attn_layer_period",
)  # fmt: skip

_KINDS = {
    "full_attention": AttentionKind.FULL,
    "global_attention": AttentionKind.FULL,
    "sliding_attention": AttentionKind.SLIDING_WINDOW,
    "chunked_attention": AttentionKind.CHUNKED_LOCAL,
}

_GEMMA_4 = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")


@dataclass(frozen=True, slots=True)
class _Heads:
    """KV heads, and numbers stored per token and head."""

    count: int
    row_items: int
    is_latent: bool = False


def model_shape(config: Mapping[str, Any], name: str | None = None) -> ModelShape:
    """The shape of the model that ``config`` (a parsed ``config.json``) describes.

    Args:
        name: the shape's name; by default the config's ``model_type``.

    Raises:
        UnreadableConfig: a key is missing, wrong or not supported.
    """
    keys = text_keys(config)
    given = keys.get("model_type")
    family = given if isinstance(given, str) else ""
    keys = {**FAMILIES.get(family, {}), **keys}
    _refuse_foreign(keys, family)
    layers = number(keys, "num_hidden_layers", MAX_LAYERS)
    _check_family(given)
    sorts: tuple[Sort, ...]
    if family in STATE_FAMILIES:
        sorts = _hybrid_sorts(keys, family)
    else:
        sorts = _attention_sorts(keys, layers, family in _GEMMA_4)
    return ModelShape(name or family or "model", sorts, item_nbytes(keys))


def _hybrid_sorts(keys: Keys, family: str) -> tuple[Sort, ...]:
    found = hybrid_layers(family, keys)
    made: list[Sort] = []
    if found.attention:
        made.append(_sort(keys, found.attention, AttentionKind.FULL, None, _heads(keys)))
    if found.states:
        made.append(StateSort(found.states, found.state))
    return tuple(made)


def _attention_sorts(keys: Keys, layers: int, is_gemma_4: bool) -> tuple[Sort, ...]:
    kinds, window = _kinds(keys, layers)
    if is_gemma_4:
        kinds[-1] = AttentionKind.FULL
    shared = optional(keys, "num_kv_shared_layers", 0)
    if shared >= layers:
        raise UnreadableConfig("num_kv_shared_layers", f"below {layers}", shared)
    kinds = kinds[: layers - shared]
    heads = dict.fromkeys(kinds, _heads(keys))
    if is_gemma_4:
        heads[AttentionKind.FULL] = _full_heads(keys, heads[kinds[0]])
    return tuple(
        _sort(
            keys,
            tuple(layer for layer, other in enumerate(kinds) if other is kind),
            kind,
            window if kind.is_windowed else None,
            heads[kind],
        )
        for kind in dict.fromkeys(kinds)
    )


def _sort(
    keys: Keys, layers: tuple[int, ...], kind: AttentionKind, window: int | None, heads: _Heads
) -> LayerSort:
    nbytes = heads.row_items * item_nbytes(keys)
    return LayerSort(layers, kind, window, heads.count, nbytes, is_latent=heads.is_latent)


def _check_family(family: object) -> None:
    if family is None or (isinstance(family, str) and family in FAMILIES):
        return
    near = did_you_mean(str(family), FAMILIES, cutoff=0.8)
    hint = near if near.startswith("did you mean") else "pdconn plan --list has them"
    expected = "a family whose KV cache the forecast understands"
    raise UnreadableConfig("model_type", expected, repr(family), hint)


def _refuse_foreign(keys: Keys, family: str) -> None:
    known = family in STATE_FAMILIES
    for key in _FOREIGN if known else (*_FOREIGN, *_OF_STATES):
        if keys.get(key):
            raise UnreadableConfig(key, "attention layers only", repr(keys[key]))
    if keys.get("is_encoder_decoder"):
        raise UnreadableConfig("is_encoder_decoder", "a decoder-only model", True)
    both_ways = keys.get("use_bidirectional_attention")
    if both_ways and not (family in _GEMMA_4 and both_ways == "vision"):
        raise UnreadableConfig("use_bidirectional_attention", "causal attention", repr(both_ways))
    for key, like in (("global_head_dim", "head_dim"), ("swa_head_dim", "head_dim"),
                      ("num_global_key_value_heads", "num_key_value_heads")):  # fmt: skip
        if family not in _GEMMA_4 and keys.get(key) not in (None, keys.get(like)):
            raise UnreadableConfig(key, f"{like} ({keys.get(like)}) in all layers", keys[key])


def _kinds(keys: Keys, layers: int) -> tuple[list[AttentionKind], int | None]:
    """Each layer's kind, and the window of windowed layers."""
    chunk = keys.get("attention_chunk_size")
    if keys.get("layer_types") is not None:
        return _listed_kinds(keys, layers)
    if chunk is not None:
        return _chunked_kinds(keys, layers), number(keys, "attention_chunk_size")
    if keys.get("sliding_window") is None or keys.get("use_sliding_window") is False:
        return [AttentionKind.FULL] * layers, None
    window = number(keys, "sliding_window")
    nth = _pattern(keys)
    first = optional(keys, "max_window_layers", 0) if keys.get("use_sliding_window") else 0
    full = [(layer + 1) % nth == 0 if nth else layer < first for layer in range(layers)]
    return [AttentionKind.FULL if one else AttentionKind.SLIDING_WINDOW for one in full], window


def _listed_kinds(keys: Keys, layers: int) -> tuple[list[AttentionKind], int | None]:
    kinds = named_layers(keys, "layer_types", layers, _KINDS)
    windowed = {kind for kind in kinds if kind.is_windowed}
    if len(windowed) > 1:
        raise UnreadableConfig("layer_types", "windows or chunks", "both")
    if AttentionKind.CHUNKED_LOCAL in windowed:
        return kinds, number(keys, "attention_chunk_size")
    return kinds, number(keys, "sliding_window") if windowed else None


def _chunked_kinds(keys: Keys, layers: int) -> list[AttentionKind]:
    """Llama 4: layers with rotary embeddings attend within a chunk."""
    interval = optional(keys, "no_rope_layer_interval", 4)
    rotary = keys.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(rotary, list) or len(rotary) != layers:
        raise UnreadableConfig("no_rope_layers", f"a list of {layers} flags", repr(rotary))
    return [AttentionKind.CHUNKED_LOCAL if flag else AttentionKind.FULL for flag in rotary]


def _pattern(keys: Keys) -> int:
    """Every n-th layer is full; 0 without such a pattern."""
    for key in ("_sliding_window_pattern", "sliding_window_pattern"):
        if keys.get(key) is not None:
            return number(keys, key)
    return 0


def _heads(keys: Keys) -> _Heads:
    if keys.get("kv_lora_rank") is not None:
        row_items = number(keys, "kv_lora_rank") + number(keys, "qk_rope_head_dim")
        return _Heads(1, row_items, is_latent=True)
    grouped = keys.get("num_key_value_heads") is not None
    heads = number(keys, "num_key_value_heads" if grouped else "num_attention_heads")
    if keys.get("head_dim") is not None:
        return _Heads(heads, 2 * number(keys, "head_dim"))
    hidden, queries = number(keys, "hidden_size"), number(keys, "num_attention_heads")
    if hidden % queries:
        raise UnreadableConfig("hidden_size", f"a multiple of {queries} heads", hidden)
    return _Heads(heads, 2 * (hidden // queries))


def _full_heads(keys: Keys, others: _Heads) -> _Heads:
    """Gemma 4's heads of full attention: fewer, if keys are values, and wider."""
    listed = keys.get("per_layer_config")
    if listed is not None:
        if not isinstance(listed, Mapping) or len({repr(one) for one in listed.values()}) > 1:
            raise UnreadableConfig("per_layer_config", "the same for every layer", repr(listed))
        keys = {**keys, **next(iter(listed.values()), {})}
        return _Heads(number(keys, "num_key_value_heads"), 2 * number(keys, "head_dim"))
    count = others.count
    if keys.get("attention_k_eq_v") and keys.get("num_global_key_value_heads") is not None:
        count = number(keys, "num_global_key_value_heads")
    return _Heads(count, 2 * number(keys, "global_head_dim"))
