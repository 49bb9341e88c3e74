"""The attention kind of each layer: full, a window or a chunk.

The first of these keys that a configuration has, and that its family reads, decides::

    attention_chunk_size      Llama 4: local where no_rope_layers is 1
    hybrid_layer_pattern      MiMo V2: 1 is a window
    layer_types               a kind per layer, by name
    use_sliding_window        Qwen: windows in all layers, if it is true; SmolLM 3: none
    sliding_window            all layers, or all but every n-th
    none of these             full attention everywhere
"""

from __future__ import annotations

from pdconn.tools.plan.hf.config_keys import Keys, named_layers, number, optional
from pdconn.tools.plan.hf.model_families import ModelFamily, Windows
from pdconn.tools.plan.plan_errors import UnreadableConfig, shown
from registration.references import AttentionKind

FULL, WINDOW, CHUNK = (
    AttentionKind.FULL, AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL,
)  # fmt: skip
_KINDS = {
    "full_attention": FULL,
    "global_attention": FULL,
    "sliding_attention": WINDOW,
    "chunked_attention": CHUNK,
}
_LATENT_KINDS = {"full_attention": FULL, "deepseek_sparse_attention": FULL}
_EVERY = ("sliding_window_pattern", "global_attn_every_n_layers")


def layer_kinds(
    keys: Keys, known: ModelFamily, layers: int
) -> tuple[list[AttentionKind], int | None]:
    """Each layer's kind, and the window or chunk of those that have one.

    Raises:
        UnreadableConfig: a key is missing, wrong or not supported.
    """
    if known.windows is Windows.CHUNKED:
        return _chunked(keys, layers)
    kinds = _kinds(keys, known, layers)
    if WINDOW not in kinds:
        return kinds, None
    size = "sliding_window"
    if "sliding_window_size" in known.reads and keys.get("sliding_window_size") is not None:
        size = "sliding_window_size"
    return kinds, number(keys, size) + known.extra_window


def _kinds(keys: Keys, known: ModelFamily, layers: int) -> list[AttentionKind]:
    # 1. MiMo V2: flags, of which 1 is a window.
    if "hybrid_layer_pattern" in known.reads:
        return _flagged(keys, "hybrid_layer_pattern", layers, WINDOW)
    # 2. Latents: names of their own.
    if known.is_latent and keys.get("layer_types") is not None:
        return list(named_layers(keys, "layer_types", layers, _LATENT_KINDS))
    # 3. Qwen: windows only if they are switched on.
    listed = _listed(keys, layers)
    if known.windows is Windows.SWITCHED:
        return _switched(keys, known, listed, layers)
    # 4. No list: a window in all layers, or in all but every n-th.
    if listed is None:
        return _derived(keys, known, layers)
    # 5. A list, if vLLM's model of the family follows it.
    if known.is_fixed and listed != _derived(keys, known, layers):
        raise UnreadableConfig("layer_types", "every other layer full, as vLLM has it", "others")
    if not known.names_layers and len(set(listed)) > 1:
        raise UnreadableConfig("layer_types", "one kind in all layers, as vLLM has it", "several")
    return listed


def _listed(keys: Keys, layers: int) -> list[AttentionKind] | None:
    if keys.get("layer_types") is None:
        return None
    kinds = named_layers(keys, "layer_types", layers, _KINDS)
    if CHUNK in kinds:
        raise UnreadableConfig("layer_types", "windows; chunks are Llama 4's", "chunked_attention")
    return kinds


def _derived(keys: Keys, known: ModelFamily, layers: int) -> list[AttentionKind]:
    """The kinds in a configuration that names no layers."""
    if not keys.get("sliding_window"):
        return [FULL] * layers
    if known.windows is Windows.NONE:  # some families have them in all layers, others in some
        expected = "layer_types beside it: the layers that have it differ by family"
        hint = "add the model's model_type, if pdconn plan --list names it"
        raise UnreadableConfig("sliding_window", expected, shown(keys["sliding_window"]), hint)
    nth = known.full_every
    for key in _EVERY:
        if key in known.reads and keys.get(key) is not None:
            if isinstance(keys[key], str):  # transformers 5.19 itself fails at EXAONE's "LLLG"
                hint = "name each layer's kind in layer_types"
                raise UnreadableConfig(key, "a whole number", shown(keys[key]), hint)
            nth = number(keys, key)
            break
    return [WINDOW if not nth or (layer + 1) % nth else FULL for layer in range(layers)]


def _switched(
    keys: Keys, known: ModelFamily, listed: list[AttentionKind] | None, layers: int
) -> list[AttentionKind]:
    if listed is not None and known.names_layers:
        return listed
    if not (keys.get("use_sliding_window") and keys.get("sliding_window")):
        return [FULL] * layers
    if known.is_fixed:
        raise UnreadableConfig("use_sliding_window", "false: windows of this family differ", True)
    first = optional(keys, "max_window_layers", 0)
    windowed = layers if first == 0 else layers - min(first, layers)
    if listed is not None:
        windowed = listed.count(WINDOW)
    if windowed not in (0, layers):
        seen = f"windows in {windowed} of {layers}"
        raise UnreadableConfig("use_sliding_window", "windows in all layers, as vLLM does", seen)
    return [WINDOW if windowed else FULL] * layers


def _chunked(keys: Keys, layers: int) -> tuple[list[AttentionKind], int | None]:
    """Llama 4: layers with rotary embeddings attend within a chunk."""
    interval = optional(keys, "no_rope_layer_interval", 4)
    every = [int((layer + 1) % interval != 0) for layer in range(layers)]
    given = keys if keys.get("no_rope_layers") else {"no_rope_layers": every}
    kinds = _flagged(given, "no_rope_layers", layers, CHUNK)
    if keys.get("attention_chunk_size") is None:
        kinds = [FULL] * layers
    listed = keys.get("layer_types")
    if listed is not None and named_layers(keys, "layer_types", layers, _KINDS) != kinds:
        expected = "chunks where no_rope_layers is 1, as vLLM has it"
        raise UnreadableConfig("layer_types", expected, shown(listed))
    return kinds, number(keys, "attention_chunk_size") if CHUNK in kinds else None


def _flagged(keys: Keys, key: str, layers: int, kind: AttentionKind) -> list[AttentionKind]:
    flags = keys.get(key)
    if not isinstance(flags, list) or len(flags) != layers:
        seen = "nothing" if flags is None else shown(flags)
        raise UnreadableConfig(key, f"a list of {layers} flags", seen)
    if not all(flag in (0, 1) for flag in flags):
        raise UnreadableConfig(key, "0 or 1 for each layer", shown(flags))
    return [kind if flag else FULL for flag in flags]
