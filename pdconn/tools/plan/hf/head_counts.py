"""KV heads of a layer, by its attention kind, and the numbers stored per token and head.

Most families have one number and size of heads.  Others have two::

    Gemma 4    full attention: fewer, if keys are values, and wider
    MiMo V2    windows: ``swa_`` keys; values are narrower than keys
    Step 3.5   the kind that ``attention_other_setting`` names: what it says
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from pdconn.tools.plan.hf.config_keys import Keys, number, optional
from pdconn.tools.plan.hf.model_families import ModelFamily
from pdconn.tools.plan.model_shape import LayerSort, Sort
from pdconn.tools.plan.plan_errors import UnreadableConfig, shown
from registration.references import AttentionKind

GEMMA_4 = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
MIMO_V2 = ("mimo_v2", "mimo_v2_flash")
STEP_3 = ("step3p5", "step3p7")
FULL = AttentionKind.FULL


@dataclass(frozen=True, slots=True)
class KvHeads:
    """KV heads, and numbers stored per token and head."""

    count: int
    row_items: int
    is_latent: bool = False


def heads_by_kind(
    keys: Keys, family: str, known: ModelFamily, kinds: Sequence[AttentionKind]
) -> dict[AttentionKind, KvHeads]:
    """The heads of each attention kind.

    Args:
        kinds: of layer 0, 1, 2 and so on.

    Raises:
        UnreadableConfig: a key is missing, invalid or not supported.
    """
    if family in MIMO_V2:
        return {kind: _mimo_v2(keys, kind) for kind in set(kinds)}
    if family in STEP_3:
        return {kind: _step_3(keys, kind) for kind in set(kinds)}
    one = plain_heads(keys, known)
    found = dict.fromkeys(kinds, one)
    if family in GEMMA_4:
        found[FULL] = _gemma_4_full(keys, one, kinds)
    return found


def plain_heads(keys: Keys, known: ModelFamily) -> KvHeads:
    """The heads of a model whose layers are all alike."""
    if known.is_latent:
        row_items = number(keys, "kv_lora_rank") + number(keys, "qk_rope_head_dim")
        return KvHeads(1, row_items, is_latent=True)
    # A null means as many as query heads.  The meaning of a missing key differs by class.
    is_null = "num_key_value_heads" in keys and keys["num_key_value_heads"] is None
    heads = number(keys, "num_attention_heads" if is_null else "num_key_value_heads")
    given = keys.get("head_dim") is not None
    if given and not known.heads_divide_hidden:
        return KvHeads(heads, 2 * number(keys, "head_dim"))
    hidden, queries = number(keys, "hidden_size"), number(keys, "num_attention_heads")
    if hidden % queries:
        raise UnreadableConfig("hidden_size", f"a multiple of {queries} heads", hidden)
    size = hidden // queries
    if given and keys["head_dim"] != size:
        raise UnreadableConfig("head_dim", f"hidden_size over heads, {size}", keys["head_dim"])
    return KvHeads(heads, 2 * size)


def _mimo_v2(keys: Keys, kind: AttentionKind) -> KvHeads:
    prefix = "swa_" if kind.is_windowed else ""
    key_size = number(keys, f"{prefix}head_dim")
    # vLLM uses the size of keys if none is given for values.
    value = f"{prefix}v_head_dim"
    value_size = number(keys, value) if keys.get(value) is not None else key_size
    return KvHeads(number(keys, f"{prefix}num_key_value_heads"), key_size + value_size)


def _step_3(keys: Keys, kind: AttentionKind) -> KvHeads:
    other = keys.get("attention_other_setting")
    if other is not None and not isinstance(other, Mapping):
        raise UnreadableConfig("attention_other_setting", "an object", shown(other))
    is_other = other and other.get("attention_type") == _NAMES[kind]
    heads = other if other and is_other else keys
    # vLLM's class and that of transformers use different names for it.
    count = "num_attention_groups"
    if heads.get(count) is None:
        count = "num_key_value_heads"
    return KvHeads(number(heads, count), 2 * number(heads, "head_dim"))


_NAMES = {
    FULL: "full_attention",
    AttentionKind.SLIDING_WINDOW: "sliding_attention",
    AttentionKind.CHUNKED_LOCAL: "chunked_attention",
}


def _gemma_4_full(keys: Keys, others: KvHeads, kinds: Sequence[AttentionKind]) -> KvHeads:
    # If the key is present, even as null, the class of Gemma 4 adds nothing to it: a layer that it
    # does not name has the common heads.
    if "per_layer_config" in keys:
        keys = {**keys, **_of_full_layers(keys["per_layer_config"], kinds)}
        return KvHeads(number(keys, "num_key_value_heads"), 2 * number(keys, "head_dim"))
    count = others.count
    if keys.get("attention_k_eq_v") and keys.get("num_global_key_value_heads") is not None:
        count = number(keys, "num_global_key_value_heads")
    return KvHeads(count, 2 * number(keys, "global_head_dim"))


def _of_full_layers(given: object, kinds: Sequence[AttentionKind]) -> Keys:
    """The entry of ``per_layer_config`` for all full-attention layers, if it is for no others."""
    listed = given if isinstance(given, Mapping) else {} if given is None else {"": given}
    layers = dict(enumerate(kinds))
    # "05" and "5" are layer 5; layers that share another layer's cache do not count.
    named = {int(n) if str(n).isdecimal() else -1: one for n, one in listed.items()}
    of_full: list[Any] = [named.pop(n, {}) for n, one in layers.items() if one is FULL]
    same = all(isinstance(one, Mapping) and one == of_full[0] for one in of_full)
    if not same or any(n == -1 or n in layers for n in named):
        expected = "the same for every layer of full attention, and no other layers"
        raise UnreadableConfig("per_layer_config", expected, shown(given))
    return of_full[0] if of_full else {}


INDEXER_BLOCK = 64
"""Block size in tokens of DeepSeek's sparse attention kernels, for latents too."""
_QUANTIZED_TOGETHER = 128


def _with_own_indexer(keys: Keys, layers: int) -> tuple[int, ...]:
    """Layers that select tokens themselves; others use the selection of the last one that did."""
    pattern, types = keys.get("index_topk_pattern"), keys.get("indexer_types")
    if pattern is not None:
        raise UnreadableConfig("index_topk_pattern", "none: index_topk_freq alone", shown(pattern))
    every = number(keys, "index_topk_freq") if keys.get("index_topk_freq") is not None else 1
    first = optional(keys, "index_skip_topk_offset", 2) - 1
    chosen = [layer for layer in range(layers) if max(layer - first, 0) % every == 0]
    if types is not None:
        names = ["full" if layer in chosen else "shared" for layer in range(layers)]
        if not isinstance(types, list) or types[:layers] != names:
            expected = f"shared but where index_topk_freq {every} says otherwise, as vLLM has it"
            raise UnreadableConfig("indexer_types", expected, shown(types))
    return tuple(chosen)


def with_indexer(sorts: Iterable[Sort], keys: Keys, layers: int) -> tuple[Sort, ...]:
    """The same layers, with the indexer's data of each token beside the latent.

    FP8 numbers, and one float32 scale per 128 of them.
    """
    size = number(keys, "index_head_dim")
    nbytes = size + 4 * (size // _QUANTIZED_TOGETHER)
    latents = (structs.replace(sort, block_tokens=INDEXER_BLOCK) for sort in sorts)
    indexer = LayerSort(
        _with_own_indexer(keys, layers), FULL, None, 1, nbytes,
        block_tokens=INDEXER_BLOCK, part="indexer", is_latent=True,
    )  # fmt: skip
    return (*latents, indexer)
