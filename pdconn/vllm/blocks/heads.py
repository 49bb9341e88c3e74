"""Which of the model's KV heads a rank holds, by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pdconn.vllm.blocks.drafts import draft_layers, drafter, own_name
from registration.references import RegistrationError

_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")


def heads_by_layer(
    config: Any, layers: Mapping[str, Any], specs: Mapping[str, Any]
) -> Callable[[str], int | None]:
    """A function from a layer to its KV heads in its whole model: the target, or the drafter.

    Args:
        config: the engine's configuration.
        layers: layers by name (vLLM's static forward context).
        specs: specification of each layer that has a cache which is transferred.
    """
    drafts = draft_layers(config, layers, specs)

    def total(layer: str) -> int | None:
        if layer in drafts:
            return total_kv_heads(drafter(config), own_name(config, layer))
        return total_kv_heads(config.model_config, layer)

    return total


def total_kv_heads(model: Any, layer: str) -> int | None:
    """KV heads of ``layer`` in the whole model; None when its config names several numbers."""
    if model.use_mla:
        return 1
    arch = model.model_arch_config
    # Where layers differ by a heterogeneous config (Gemma 4), vLLM has the number of each layer.
    if arch.per_layer_overrides is not None:
        index = next(int(part) for part in layer.split(".") if part.isdecimal())
        of_the_model = index < arch.total_num_hidden_layers
        return int(arch[index].total_num_kv_heads) if of_the_model else None
    total: int = model.get_total_num_kv_heads()
    names = [name for name in vars(model.hf_text_config) if name.endswith(_HEAD_COUNTS)]
    counts = {getattr(model.hf_text_config, name) for name in names} - {None}
    return total if counts <= {total} else None


def first_head(spec: Any, total_kv_heads: int | None, tp_rank: int, tp_size: int) -> int:
    """The model-wide index of this rank's first head; replicas have the same.

    Raises:
        RegistrationError: which heads the rank holds cannot be determined.
    """
    heads: int = spec.num_kv_heads  # a page has more slots where K and V are apart
    if tp_size == 1:
        return 0
    if total_kv_heads is None or heads != max(1, total_kv_heads // tp_size):
        raise RegistrationError(
            f"KV heads: {heads} on a rank of {tp_size}, of {total_kv_heads or 'varying numbers'} "
            f"in the model: which of its heads they are is not known, so that the layer needs "
            f"tensor_parallel_size 1"
        )
    shards = spec.max_tp_shards or total_kv_heads // heads
    return int(tp_rank * min(tp_size, shards) // tp_size * heads)
