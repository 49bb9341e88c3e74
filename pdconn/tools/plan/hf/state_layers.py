"""Families with recurrent states: the layers that keep them, and the size of one.

Formulas are in :mod:`pdconn.tools.plan.layer_states`; this module has each family's names for the
numbers.  A layer keeps rows of attention, a state, both (Falcon-H1) or nothing (Nemotron-H)::

    layer_types, layers_block_type   a kind per layer, by name
    hybrid_override_pattern          the same in letters: M(amba), * (attention), - and E (none)
    full_attention_interval          Qwen: every n-th layer is attention
    attn_layer_period and offset     Jamba
    attn_layer_indices, full_attn_idxs, linear_attn_config   lists of layers

The window is in the model's dtype, and so is the state after it, unless a family's configuration or
vLLM differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pdconn.tools.plan.hf.config_keys import (
    Keys,
    indices,
    item_nbytes,
    named_layers,
    number,
    optional,
)
from pdconn.tools.plan.layer_states import (
    ItemSizes,
    LayerState,
    gated_delta_net,
    mamba1,
    mamba2,
    short_convolution,
)
from pdconn.tools.plan.model_shape import MAX_LAYERS
from pdconn.tools.plan.plan_errors import UnreadableConfig, shown

_ATTENTION, _STATE, _NEITHER = "attention", "state", "neither"
_KINDS = MappingProxyType(
    {
        "full_attention": _ATTENTION,
        "attention": _ATTENTION,
        "linear_attention": _STATE,
        "mamba": _STATE,
        "conv": _STATE,
    }
)
_KINDS_WITH_NONE = MappingProxyType({**_KINDS, "moe": _NEITHER, "mlp": _NEITHER})
_LETTERS = MappingProxyType({"M": _STATE, "*": _ATTENTION, "-": _NEITHER, "E": _NEITHER})
_STATE_ITEM_NBYTES = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})


@dataclass(frozen=True, slots=True)
class HybridLayers:
    """Layers with rows of attention, layers with a state, and that state."""

    attention: tuple[int, ...]
    states: tuple[int, ...]
    state: LayerState


def hybrid_layers(family: str, keys: Keys) -> HybridLayers:
    """The layers of a model of one of ``STATE_FAMILIES``.

    Raises:
        UnreadableConfig: a key is missing, invalid or not supported.
    """
    found, state = STATE_FAMILIES[family]
    kinds = found(keys)
    if family == "falcon_h1":
        both = tuple(range(len(kinds)))
        return HybridLayers(both, both, state(keys))
    return HybridLayers(_of(kinds, _ATTENTION), _of(kinds, _STATE), state(keys))


def _of(kinds: Iterable[str], kind: str) -> tuple[int, ...]:
    return tuple(layer for layer, other in enumerate(kinds) if other == kind)


# --- layers


def _num_layers(keys: Keys) -> int:
    return number(keys, "num_hidden_layers", MAX_LAYERS)


def _with_attention(keys: Keys, attention: set[int]) -> list[str]:
    return [_ATTENTION if n in attention else _STATE for n in range(_num_layers(keys))]


def _granite(keys: Keys) -> list[str]:
    for key in ("layer_types", "layers_block_type"):
        if keys.get(key) is not None:
            return named_layers(keys, key, _num_layers(keys), _KINDS)
    return [_STATE] * _num_layers(keys)


def _nemotron(keys: Keys) -> list[str]:
    listed, pattern = keys.get("layers_block_type"), keys.get("hybrid_override_pattern")
    if listed is not None:
        size = len(listed) if isinstance(listed, list) else 1
        return named_layers(keys, "layers_block_type", size, _KINDS_WITH_NONE)
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_LAYERS:
        raise UnreadableConfig("hybrid_override_pattern", "a letter per layer", shown(pattern))
    if not set(pattern) <= set(_LETTERS):
        known = ", ".join(_LETTERS)
        raise UnreadableConfig("hybrid_override_pattern", f"only {known}", shown(pattern))
    return [_LETTERS[letter] for letter in pattern]


def _qwen(keys: Keys) -> list[str]:
    if keys.get("layer_types") is not None:
        return named_layers(keys, "layer_types", _num_layers(keys), _KINDS)
    nth = optional(keys, "full_attention_interval", 4)
    return _with_attention(keys, set(range(nth - 1, _num_layers(keys), nth)))


def _lfm2(keys: Keys) -> list[str]:
    if keys.get("layer_types") is not None:
        return named_layers(keys, "layer_types", _num_layers(keys), _KINDS)
    if keys.get("full_attn_idxs") is None:
        return [_ATTENTION] * _num_layers(keys)
    return _with_attention(keys, indices(keys, "full_attn_idxs", 0, _num_layers(keys)))


def _jamba(keys: Keys) -> list[str]:
    period, offset = number(keys, "attn_layer_period"), keys.get("attn_layer_offset")
    if type(offset) is not int or not 0 <= offset < period:
        raise UnreadableConfig("attn_layer_offset", f"a number from 0 to {period - 1}", offset)
    return _with_attention(keys, set(range(offset, _num_layers(keys), period)))


def _bamba(keys: Keys) -> list[str]:
    if keys.get("attn_layer_indices") is None:
        return [_STATE] * _num_layers(keys)
    return _with_attention(keys, indices(keys, "attn_layer_indices", 0, _num_layers(keys)))


def _kimi(keys: Keys) -> list[str]:
    """The kinds of Kimi's layers; vLLM's class requires both lists."""
    listed, layers = _linear_attention(keys), _num_layers(keys)
    linear = indices(listed, "kda_layers", 1, layers)
    indices(listed, "full_attn_layers", 1, layers)
    return _with_attention(keys, set(range(layers)) - linear)


def _linear_attention(keys: Keys) -> Keys:
    listed = keys.get("linear_attn_config")
    if not isinstance(listed, Mapping):
        raise UnreadableConfig("linear_attn_config", "an object", shown(listed))
    return listed


def _every_layer(keys: Keys) -> list[str]:
    return [_STATE] * _num_layers(keys)


# --- states


def _mamba2(keys: Keys) -> LayerState:
    heads = number(keys, "mamba_n_heads")
    if keys.get("mamba_d_ssm") is not None:
        channels = number(keys, "mamba_d_ssm")
    else:
        channels = number(keys, "mamba_expand") * number(keys, "hidden_size")
    head_dim, rest = divmod(channels, heads)
    if keys.get("mamba_d_head") not in (None, "auto", head_dim) or rest:
        raise UnreadableConfig("mamba_d_head", f"{channels} / {heads}", keys.get("mamba_d_head"))
    size = item_nbytes(keys)
    groups, state_dim = number(keys, "mamba_n_groups"), number(keys, "mamba_d_state")
    kernel = number(keys, "mamba_d_conv")
    return mamba2((heads, head_dim), groups, state_dim, kernel, ItemSizes(size, size))


def _nemotron_mamba2(keys: Keys) -> LayerState:
    return mamba2(
        (number(keys, "mamba_num_heads"), number(keys, "mamba_head_dim")),
        number(keys, "n_groups"),
        number(keys, "ssm_state_size"),
        number(keys, "conv_kernel"),
        _sizes(keys, "mamba_ssm_cache_dtype"),
    )


def _gated_delta_net(keys: Keys) -> LayerState:
    return gated_delta_net(
        (number(keys, "linear_num_key_heads"), number(keys, "linear_key_head_dim")),
        (number(keys, "linear_num_value_heads"), number(keys, "linear_value_head_dim")),
        number(keys, "linear_conv_kernel_dim"),
        _sizes(keys, "mamba_ssm_dtype"),
    )


def _qwen3_next(keys: Keys) -> LayerState:
    """Qwen3-Next's state; vLLM reads no dtype of states from its configuration."""
    return _gated_delta_net({**keys, "mamba_ssm_dtype": None})


def _kda(keys: Keys) -> LayerState:
    """Kimi's state; vLLM keeps it in 32 bits."""
    listed = _linear_attention(keys)
    names = ("num_heads", "head_dim", "short_conv_kernel_size")
    heads, head_dim, kernel = (number(listed, name) for name in names)
    sizes = ItemSizes(item_nbytes(keys), 4)
    return gated_delta_net((heads, head_dim), (heads, head_dim), kernel, sizes)


def _mamba1(keys: Keys) -> LayerState:
    size = item_nbytes(keys)
    channels = number(keys, "mamba_expand") * number(keys, "hidden_size")
    state_dim, kernel = number(keys, "mamba_d_state"), number(keys, "mamba_d_conv")
    return mamba1(channels, state_dim, kernel, ItemSizes(size, size))


def _short_convolution(keys: Keys) -> LayerState:
    return _convolved(keys, "hidden_size" if keys.get("conv_dim") is None else "conv_dim")


def _convolved_hidden(keys: Keys) -> LayerState:
    """The state of LFM2 with experts; vLLM's model ignores ``conv_dim``."""
    return _convolved(keys, "hidden_size")


def _convolved(keys: Keys, channels_key: str) -> LayerState:
    size = item_nbytes(keys)
    channels = number(keys, channels_key)
    return short_convolution(channels, number(keys, "conv_L_cache"), ItemSizes(size, size))


def _sizes(keys: Keys, key: str) -> ItemSizes:
    """Item sizes from the model's dtype; the state's from ``key`` if given."""
    window, given = item_nbytes(keys), keys.get(key)
    if given in (None, "auto"):
        return ItemSizes(window, window)
    dtype = str(given).removeprefix("torch.")
    if dtype not in _STATE_ITEM_NBYTES:
        raise UnreadableConfig(key, " or ".join(_STATE_ITEM_NBYTES), given)
    return ItemSizes(window, _STATE_ITEM_NBYTES[dtype])


_Reader = tuple[Callable[[Keys], list[str]], Callable[[Keys], LayerState]]
_QWEN3_5: _Reader = (_qwen, _gated_delta_net)

STATE_FAMILIES: Mapping[str, _Reader] = MappingProxyType(
    {
        "bamba": (_bamba, _mamba2),
        "falcon_h1": (_every_layer, _mamba2),
        "granitemoehybrid": (_granite, _mamba2),
        "jamba": (_jamba, _mamba1),
        "kimi_linear": (_kimi, _kda),
        "lfm2": (_lfm2, _short_convolution),
        "lfm2_moe": (_lfm2, _convolved_hidden),
        "nemotron_h": (_nemotron, _nemotron_mamba2),
        "qwen3_5": _QWEN3_5,
        "qwen3_5_moe": _QWEN3_5,
        "qwen3_5_moe_text": _QWEN3_5,
        "qwen3_5_text": _QWEN3_5,
        "qwen3_next": (_qwen, _qwen3_next),
    }
)
"""The reader of the layers, and the reader of a state, of each family."""
