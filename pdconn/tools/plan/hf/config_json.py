"""A model's shape from its Hugging Face ``config.json``.

Only ``FAMILIES`` are read, with their defaults for missing keys.  A file without ``model_type`` is
read if its keys mean the same in all families.  Keys that change what is cached are read or
refused, never ignored: see :mod:`pdconn.tools.plan.hf.head_geometry`.

The parts are modules beside this one: the attention kind of each layer (``attention_kinds``), its
heads (``head_counts``), layers with states (``state_layers``), and the stored type of keys and
values (``kv_dtype``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdconn.tools.plan.hf.attention_kinds import layer_kinds
from pdconn.tools.plan.hf.config_keys import (
    Keys,
    dtype_name,
    item_nbytes,
    number,
    optional,
    text_keys,
)
from pdconn.tools.plan.hf.head_counts import (
    GEMMA_4,
    KvHeads,
    heads_by_kind,
    plain_heads,
    with_indexer,
)
from pdconn.tools.plan.hf.head_geometry import BASE, check_geometry
from pdconn.tools.plan.hf.kv_dtype import checkpoint_kv_dtype
from pdconn.tools.plan.hf.model_families import FAMILIES, UNNAMED, ModelFamily
from pdconn.tools.plan.hf.state_layers import STATE_FAMILIES, hybrid_layers
from pdconn.tools.plan.model_shape import (
    MAX_LAYERS,
    LayerSort,
    ModelShape,
    Sort,
    StateSort,
    in_kv_dtype,
)
from pdconn.tools.plan.plan_errors import UnreadableConfig, shown
from registration.references import AttentionKind

_ALONE = "serve it from one engine"
_WIDE = ("bfloat16", "float16")


def model_shape(
    config: Mapping[str, Any],
    name: str | None = None,
    quantization: Mapping[str, Any] | None = None,
    dtype: str = "auto",
) -> ModelShape:
    """The shape of the model that ``config`` (a parsed ``config.json``) describes.

    Args:
        name: the shape's name; by default the config's ``model_type``.
        quantization: a parsed ``hf_quant_config.json``, if there is one beside the config.
        dtype: a value of ``--kv-cache-dtype``; ``auto`` selects the checkpoint's.

    Raises:
        UnreadableConfig: a key is missing, invalid or not supported.
        ShapeError: there is no such ``dtype``.
    """
    family, known = _family_of(text_keys(config))
    keys = {**known.defaults, **text_keys(config, lambda key: key in BASE or known.is_read(key))}
    _refuse_foreign(keys, family)
    check_geometry(keys, family, known)
    layers = number(keys, "num_hidden_layers", MAX_LAYERS)
    sorts: tuple[Sort, ...]
    if family in STATE_FAMILIES:
        sorts = _hybrid_sorts(keys, family, known)
    else:
        sorts = _attention_sorts(keys, family, known, layers)
    has_indexer = "index_head_dim" in known.reads
    if has_indexer:
        sorts = with_indexer(sorts, keys, layers)
    # Rows of an indexer have one format, and with FP8 the latent's rows have their own scales.
    item = None if has_indexer else item_nbytes(keys)
    counts = {sort.heads for sort in sorts if isinstance(sort, LayerSort)}
    shape = ModelShape(
        name or family or "model",
        sorts,
        item,
        stored_as=dtype_name(keys),
        numbers_heads=len(counts) <= 1 or family in GEMMA_4,
    )
    if has_indexer and dtype in _WIDE:
        return replace(shape, kv_dtype=dtype, stored_as=dtype)
    if dtype != "auto":
        return in_kv_dtype(shape, dtype)
    asked = checkpoint_kv_dtype(config, quantization, is_latent=known.is_latent)
    if asked is None:
        return shape
    if has_indexer:
        expected = "16 bits: in FP8 the rows beside an indexer depend on the card"
        raise UnreadableConfig(asked.key, expected, asked.name, "--dtype bfloat16 plans those")
    made = in_kv_dtype(shape, asked.name)
    return replace(made, kv_dtype="auto", asked_by=asked.key)


def _family_of(keys: Keys) -> tuple[str, ModelFamily]:
    given = keys.get("model_type")
    if given is None:
        return "", UNNAMED
    if isinstance(given, str) and given in FAMILIES:
        return given, FAMILIES[given]
    expected = "a family whose KV cache the forecast understands"
    raise UnreadableConfig("model_type", expected, shown(given), _instead(given, keys))


def _instead(given: object, keys: Keys) -> str:
    """A remedy; it suggests another model only for a misspelled name, not for a similar one."""
    written = str(given).lower().replace("-", "_").replace(".", "_")
    if written in FAMILIES:
        return f"did you mean {written!r}?"
    if given == "deepseek_v4" and keys.get("num_hidden_layers") == 43:
        return "--model deepseek-v4 is the built-in shape of V4 Flash"
    return "pdconn plan --list has the families and the built-in shapes"


def _hybrid_sorts(keys: Keys, family: str, known: ModelFamily) -> tuple[Sort, ...]:
    found = hybrid_layers(family, keys)
    made: list[Sort] = []
    if found.attention:
        heads = plain_heads(keys, known)
        made.append(_sort(keys, found.attention, AttentionKind.FULL, None, heads))
    if found.states:
        made.append(StateSort(found.states, found.state))
    return tuple(made)


def _attention_sorts(keys: Keys, family: str, known: ModelFamily, layers: int) -> tuple[Sort, ...]:
    kinds, window = layer_kinds(keys, known, layers)
    if family in GEMMA_4:
        kinds[-1] = AttentionKind.FULL
    shared = 0
    if "num_kv_shared_layers" in known.reads:
        shared = optional(keys, "num_kv_shared_layers", 0)
    if shared >= layers:
        raise UnreadableConfig("num_kv_shared_layers", f"below {layers}", shared)
    kinds = kinds[: layers - shared]
    heads = heads_by_kind(keys, family, known, kinds)
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
    keys: Keys, layers: tuple[int, ...], kind: AttentionKind, window: int | None, heads: KvHeads
) -> LayerSort:
    nbytes = heads.row_items * item_nbytes(keys)
    return LayerSort(layers, kind, window, heads.count, nbytes, is_latent=heads.is_latent)


def _refuse_foreign(keys: Keys, family: str) -> None:
    """Refuse models other than decoders with causal attention."""
    if keys.get("is_encoder_decoder"):
        expected = "a decoder-only model: vLLM has no connector for others"
        raise UnreadableConfig("is_encoder_decoder", expected, True, _ALONE)
    if keys.get("is_decoder") is False and keys.get("is_causal") is False:
        raise UnreadableConfig("is_causal", "causal attention", False, _ALONE)
    both_ways = keys.get("use_bidirectional_attention")
    if both_ways and not (family in GEMMA_4 and both_ways == "vision"):
        expected = "causal attention: other KV depends on tokens that follow"
        raise UnreadableConfig("use_bidirectional_attention", expected, shown(both_ways), _ALONE)
