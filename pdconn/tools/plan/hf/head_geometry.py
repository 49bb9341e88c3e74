"""Keys that change what a layer caches: read, without effect, or refused.

A key with unknown effect must not be ignored: MiniMax M3 without its indexer, or MiMo V2 with one
number of heads for all layers, gives a plan that looks right.  So each key belongs to one of these
classes::

    read            the base (layers, heads, head size), and what its family's reader looks at
    without effect  its value says "none", repeats what is read, or vLLM's model does not look at it
    refused         any other key whose name has a word of ``_WORDS``
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pdconn.tools.plan.hf.config_keys import NESTED, Keys
from pdconn.tools.plan.hf.model_families import ModelFamily
from pdconn.tools.plan.plan_errors import UnreadableConfig, shown

BASE = frozenset({
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "layer_types",
})  # fmt: skip
"""``layer_types`` with full attention alone is valid in every family."""

_WORDS = re.compile(
    r"heads?(_|$)|(^|_)kv(_|$)|key_value|multi_query|query_group|attention_groups|window|sliding"
    r"|(^|_)swa(_|$)|chunk|sparse_|(^|_)index(er)?_|compress|(^|_)ssm|mamba|(^|_)s?conv(_|\d|$)"
    r"|(^|_)states?(_|$)|lru|recurr|linear_(att|num|key|value|conv|head|layer)|layers?_types?"
    r"|layer_ids|layer_pattern|override_pattern|blocks?_types?|block_configs|hybrid|per_layer"
    r"|every_n|interval|full_att|global_|local_|cross_|yoco|(^|_)cla(_|$)|shared_layers|rope_layer"
    r"|(attn|attention)_(types?|every|layers?|idxs|setting|other|windows?|period|offset)"
    r"|no_rope|latent|rank(_|$)|loop|memory|(^|_)mem_|retention|delta|(^|_)gdn|(^|_)kda|lightning"
    r"|(^|_)mla(_|$)|(^|_)[dm]sa(_|$)|sink_number|_repeat"
)
_WITHOUT_EFFECT = re.compile(
    # Keys about other parts of a model than its decoder's layers, and about draft layers.
    r"(vision|image|img|video|audio|visual|mm|vit|mtp|moe|router|output|lm|encoder|eagle|dspark"
    r"|d?flash|expert|rope|task|aux|engram|classifier|adapter|lora|resampler)_.*"
    r"|.*(_token|_expert)s?_.*|\w*_vision_\w*|head_(dropout|dtype|bias)|\w*lm_head\w*|norm_head"
    # Keys with numbers that no shape depends on.
    r"|.*_(bias|theta|dropout|dropout_prob|norm|layernorms?|multipliers?|scale|scaling|act|eps|std"
    r"|init\w*|min|max|loss\w*|coef|gate|gate_type|softcapping|softcap|temperature|dtype"
    r"|parameters|mlp|backend|floor)"
    r"|chunk_size_feed_forward|compress_rope_theta|decoder_sparse_step|freeze_\w+|tie_\w+"
    r"|(hidden|vocab)_size_per_layer_input|mlp_layer_types|num_local_experts|q_lora_rank"
    r"|laurel_rank|mla_use_\w+|mla_scale_\w+|no_rope_layers|no_rope_layer_interval|use_rope_layers"
    r"|kv_cache_(scheme|quant_algo)|compression_config|(mamba_)?chunk_size|use_mamba\w+"
    r"|mamba_dt_rank|time_step_rank|mamba_norm_before_gate|conv_dim_out|use_kv_cache|use_mem_\w+"
    r"|cross_attention_hidden_size|mrope_interleaved|enable_\w+"
)

_REPEATS = {
    "global_head_dim": "head_dim", "swa_head_dim": "head_dim", "v_head_dim": "head_dim",
    "swa_v_head_dim": "head_dim", "attention_head_dim": "head_dim", "qk_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads", "num_kv_heads": "num_key_value_heads",
    "swa_num_key_value_heads": "num_key_value_heads", "n_kv_heads": "num_key_value_heads",
    "num_attention_groups": "num_key_value_heads", "sliding_window_size": "sliding_window",
    "multi_query_group_num": "num_key_value_heads",
    "swa_num_attention_heads": "num_attention_heads",
    "num_sliding_attention_heads": "num_attention_heads", "n_heads": "num_attention_heads",
    "n_head": "num_attention_heads", "num_heads": "num_attention_heads",
}  # fmt: skip
"""Keys without effect if they equal another."""

_OF_ONE = re.compile(r"ratio|factor|freq|interval|every_n")
"""Keys without effect if one of them is."""

_OF_WINDOWS = (
    "use_sliding_window", "max_window_layers", "sliding_window_pattern",
    "_sliding_window_pattern", "interleaved_sliding_window",
)  # fmt: skip
"""Keys without effect if there is no window."""


def check_geometry(keys: Keys, family: str, known: ModelFamily) -> None:
    """Refuse a configuration with a key whose effect on its family's KV cache is unknown.

    Raises:
        UnreadableConfig: names the first such key.
    """
    for key, value in keys.items():
        if key in BASE or key in NESTED or known.is_read(key):
            continue
        if not is_geometry(key) or _says_nothing(keys, key):
            continue
        expected = f"nothing that changes what a layer of {family or 'any family'} caches"
        raise UnreadableConfig(key[:60], expected, shown(value), _remedy(keys, family))


def is_geometry(key: str) -> bool:
    """Whether a key may change what a layer caches, by its name."""
    return bool(_WORDS.search(key)) and not _WITHOUT_EFFECT.fullmatch(key)


def _says_nothing(keys: Keys, key: str) -> bool:
    value = keys[key]
    if isinstance(value, list):
        return _is_list_of_nothing(key, value)
    if value in (None, False, 0, "") or value == {}:
        # vLLM uses a window regardless of a switch that the family does not have.
        return not (key == "use_sliding_window" and value is False and keys.get("sliding_window"))
    if isinstance(value, Mapping):
        return key.endswith("_config") and not _WORDS.search(key.removesuffix("_config"))
    is_one = value == 1 and _OF_ONE.search(key) is not None
    is_of_no_window = key in _OF_WINDOWS and not keys.get("sliding_window")
    return is_one or is_of_no_window or (key in _REPEATS and value == keys.get(_REPEATS[key]))


def _is_list_of_nothing(key: str, value: list[object]) -> bool:
    if key.endswith(("_ids", "_idxs", "_indices")):  # 0 is a layer there
        return not value
    is_ones = key == "attn_type_list"  # MiniMax: 1 is full attention
    return all(one in (1, True) if is_ones else not one for one in value)


def _remedy(keys: Keys, family: str) -> str:
    if not family:
        return "add the model's model_type, if pdconn plan --list names it"
    return "plan a built-in shape like it (pdconn plan --list)"
