"""The meaning of the bytes of a block, by name: everything that geometry does not describe.

Both sides' traits must agree, or the same bytes would be read as other keys and values.  A model is
named by the last part of its path, since hosts have models in different places; its weights are
identified by their proofs.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from vllm.config import VllmConfig

from pdconn.protocol.compat import DRAFT, WEIGHTS
from pdconn.protocol.limits import MAX_TEXT
from pdconn.vllm.blocks.arrangement import arrangement_of, state_arrangement
from pdconn.vllm.blocks.drafts import drafter, num_modules
from pdconn.vllm.blocks.kinds import is_state
from pdconn.vllm.identity.weights import Weights

_SHAPE = (
    "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rope_theta", "rope_scaling",
    "rope_parameters",
)  # fmt: skip
_DRAFT_SHAPE = (*_SHAPE, "eagle_aux_hidden_state_layer_ids")
_DIGEST_NBYTES = 8
_CACHED = re.compile(r"models--(?:[^/]+--)?([^/]+)/snapshots/[0-9a-f]{40}$")


def block_traits(
    config: VllmConfig,
    layers: dict[str, Any],
    specs: Mapping[str, Any],
    weights: Mapping[str, Weights],
) -> dict[str, str]:
    """Names to compare at the handshake.

    Args:
        config: the engine's configuration.
        layers: layers by name (vLLM's static forward context).
        specs: specification of each layer that has a cache which is transferred.
        weights: their proofs (:func:`pdconn.vllm.identity.weights.engine_weights`).
    """
    model = config.model_config
    traits = {
        "model": _name(model),
        WEIGHTS: weights["model"].trait,
        **{f"model.{name}": value for name, value in _shape(model, _SHAPE).items()},
        "kv_dtype": f"{config.cache_config.cache_dtype}/{model.dtype}",
        "block_content": _content(config, layers, specs),
        **_draft_traits(config, weights),
    }
    if states := {state_arrangement(spec) for spec in specs.values() if is_state(spec)}:
        traits["states"] = _bounded("; ".join(sorted(states)))
    return traits


def _draft_traits(config: VllmConfig, weights: Mapping[str, Weights]) -> dict[str, str]:
    """The traits of a drafter's layers; empty without a drafter."""
    # The number of drafted tokens may differ, since the prompt's KV is the same; except with MTP of
    # several modules, of which as many compute as tokens are drafted.
    model = drafter(config)
    if model is None:
        return {}
    speculation: Any = config.speculative_config
    cache_dtype = speculation.kv_cache_dtype or config.cache_config.cache_dtype
    traits = {
        "method": str(speculation.method),
        "model": _name(model),
        WEIGHTS: weights["draft"].trait,
        **{f"model.{name}": value for name, value in _shape(model, _DRAFT_SHAPE).items()},
        "kv_dtype": f"{cache_dtype}/{model.dtype}",
        "modules": str(num_modules(config)),
    }
    return {DRAFT + name: value for name, value in traits.items()}


def _name(model: Any) -> str:
    """The model's name; for a folder in huggingface_hub's cache, the repository's."""
    path = os.path.normpath(str(model.model))
    if cached := _CACHED.search(path):
        return cached[1]
    return os.path.basename(path)


def _shape(model: Any, names: Sequence[str]) -> dict[str, str]:
    configs = _layer_configs(model.hf_text_config)
    return {name: _bounded(_of_layers([getattr(c, name, None) for c in configs])) for name in names}


def _layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer where layers differ; otherwise the one of all."""
    # ``transformers`` raises if an attribute that differs between layers is read from the model's.
    differ = getattr(config, "is_heterogeneous", False)
    return list(config.per_layer_config) if differ else [config]


def _of_layers(values: list[Any]) -> str:
    """The value of all layers, or each value with the length of its run: ``256 x5, 512``."""
    runs = [(value, len(list(run))) for value, run in groupby(map(_text, values))]
    if len(runs) == 1:
        return runs[0][0]
    return ", ".join(value if count == 1 else f"{value} x{count}" for value, count in runs)


def _text(value: Any) -> str:
    """``value`` as text; equal mappings give equal texts, whatever the order of their keys."""
    if isinstance(value, Mapping):
        items = sorted((str(key), _text(each)) for key, each in value.items())
        return "{" + ", ".join(f"{key}: {each}" for key, each in items) + "}"
    return str(value)


def _content(config: VllmConfig, layers: dict[str, Any], specs: Mapping[str, Any]) -> str:
    """The arrangements of attention layers' pages."""
    attention = {name: spec for name, spec in specs.items() if not is_state(spec)}
    if not attention:
        return ""
    layout = config.cache_config.get_resolved_kv_cache_layout().name
    found = {arrangement_of(spec, layers.get(name), layout) for name, spec in attention.items()}
    return _bounded("; ".join(sorted(arrangement.name for arrangement in found)))


def _bounded(text: str) -> str:
    """``text``, shortened with a digest at the end if it is too long for a trait."""
    if len(text) <= MAX_TEXT:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_NBYTES).hexdigest()
    return f"{text[: MAX_TEXT - len(digest) - 4]}... {digest}"
