"""Layers of a drafter: which of an engine's layers they are, and their names.

A drafter with KV of its own (a draft model, EAGLE, MTP) has layers besides the target's, with
heads of their own.  vLLM marks them (``is_draft_layer`` of a layer, ``is_draft`` of a
specification), except in model runner V1 of 0.32, where they are identified by their names::

    draft_model.model.layers.0...      a draft model
    mtp.layers.0..., model.mtp...      MTP of Qwen, Nemotron-H, EXAONE, MiMo-V2
    model.layers.32...                 EAGLE and other MTP: numbers continue after the target's 32

Every drafter is divided among the target's ranks: a ``draft_tensor_parallel_size`` of 1 either
stops the engine or has no effect.  N-gram, suffix and Medusa keep no KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PREFIX = "draft_model"
_OWN_NAMES = frozenset({_PREFIX, "mtp"})


def drafter(config: Any) -> Any:
    """The configuration of the model that drafts, if it keeps KV; else None."""
    speculation = config.speculative_config
    if speculation is None or not speculation.uses_draft_kv_cache():
        return None
    return speculation.draft_model_config


def draft_layers(
    config: Any, layers: Mapping[str, Any], specs: Mapping[str, Any]
) -> frozenset[str]:
    """Names of those layers in ``specs`` that belong to the drafter.

    Args:
        config: the engine's configuration.
        layers: layers by name (vLLM's static forward context).
        specs: specification of each layer that has a cache.
    """
    if drafter(config) is None:
        return frozenset()
    marked = frozenset(
        name
        for name, spec in specs.items()
        if getattr(spec, "is_draft", False) or getattr(layers.get(name), "is_draft_layer", False)
    )
    if marked:
        return marked
    num_target = config.model_config.get_total_num_hidden_layers()
    return frozenset(name for name in specs if _is_named_so(name, num_target))


def own_name(config: Any, name: str) -> str:
    """The name of a drafter's layer, numbered from its own first layer on."""
    parts = name.split(".")
    if not _OWN_NAMES & set(parts):
        num_target = config.model_config.get_total_num_hidden_layers()
        at = next(at for at, part in enumerate(parts) if part.isdecimal())
        parts[at] = str(max(0, int(parts[at]) - num_target))
    return ".".join(parts)


def num_modules(config: Any) -> int:
    """MTP modules that draft, each of which reads a token further ahead; 1 for any other."""
    speculation = config.speculative_config
    if not speculation.use_multi_module_mtp():
        return 1
    modules = speculation.draft_model_config.hf_config.num_nextn_predict_layers
    return int(min(modules, speculation.num_speculative_tokens))


def _is_named_so(name: str, num_target: int) -> bool:
    parts = name.split(".")
    if _OWN_NAMES & set(parts):
        return True
    number = next((int(part) for part in parts if part.isdecimal()), 0)
    return number >= num_target
