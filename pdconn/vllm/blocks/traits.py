"""What the bytes of a block mean, by name: everything that geometry does not say.

Both sides' traits must be equal, or the same bytes would be read as other keys and
values.  A model is named by the last part of its path, since hosts keep models in
different places.
"""

from __future__ import annotations

import os
from itertools import groupby
from typing import Any

from vllm.config import VllmConfig

from pdconn.protocol.limits import MAX_TEXT

_SHAPE = (
    "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rope_theta", "rope_scaling",
)  # fmt: skip


def block_traits(config: VllmConfig, layers: dict[str, Any], enforce: bool) -> dict[str, str]:
    """Names to compare at the handshake; none when ``enforce`` is off.

    Args:
        config: the engine's configuration.
        layers: attention layers by name (vLLM's static forward context).
    """
    if not enforce:
        return {}
    model = config.model_config
    layer_configs = _layer_configs(model.hf_text_config)
    shape = {name: _of_layers([getattr(c, name, None) for c in layer_configs]) for name in _SHAPE}
    return {
        "model": os.path.basename(os.path.normpath(str(model.model))),
        **{f"model.{name}": value[:MAX_TEXT] for name, value in shape.items()},
        "kv_dtype": f"{config.cache_config.cache_dtype}/{model.dtype}",
        "block_content": _content(layers),
    }


def _layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer where layers differ; else the one of all.

    ``transformers`` raises when a whole model is asked for what differs between its layers.
    """
    differ = getattr(config, "is_heterogeneous", False)
    return list(config.per_layer_config) if differ else [config]


def _of_layers(values: list[Any]) -> str:
    """The value of all layers, or each with how many layers in a row have it: ``256 x5, 512``."""
    runs = [(str(value), len(list(run))) for value, run in groupby(values)]
    if len(runs) == 1:
        return runs[0][0]
    return ", ".join(value if count == 1 else f"{value} x{count}" for value, count in runs)


def _content(layers: dict[str, Any]) -> str:
    """How the backends arrange a head's block: backend names and CPU packings."""
    arrangements = set()
    for layer in layers.values():
        backend = getattr(layer, "attn_backend", None)
        if backend is not None:
            arrangements.add(f"{backend.get_name()}:{getattr(layer, 'isa', '')}")
    return ",".join(sorted(arrangements))
