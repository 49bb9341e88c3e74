"""A key more or less in a configuration: the plan is vLLM's, or there is none.

Each family's configuration is varied by keys that change what a layer caches in some family.  What
pdconn refuses is not a wrong plan, and what vLLM refuses has none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.hf.config_keys import text_keys
from pdconn.tools.plan.plan_errors import UnreadableConfig
from tests.tools.plan.vllm.test_vllm_specs import Rows, ours, specs_of, theirs
from tests.tools.plan.vllm.vllm_families import COMPARED

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

Json = dict[str, Any]
LAYERS = 8
FEWEST = 4
"""A variant that fewer families have in both says little."""


def _text(config: Json) -> Json:
    inner: Json = config.get("text_config", config)
    return inner


def _bases() -> dict[str, Json]:
    """One configuration of each family, as short as its lists of layers let it be."""
    found: dict[str, Json] = {}
    for config in COMPARED.values():
        family = text_keys(config)["model_type"]
        if family == "deepseek_v4" or family in found:
            continue
        one = copy.deepcopy(config)
        text = _text(one)
        per_layer = ("layer_types", "hybrid_layer_pattern", "hybrid_override_pattern",
                     "linear_attn_config", "full_attn_idxs", "attn_type_list")  # fmt: skip
        if not any(key in text for key in per_layer) and "gemma3n" not in family:
            text["num_hidden_layers"] = LAYERS
        found[family] = one
    return found


def _named(*kinds: str) -> Callable[[Json], Json]:
    def change(text: Json) -> Json:
        layers = text["num_hidden_layers"]
        named = (list(kinds) * layers)[:layers]
        return {"sliding_window": 512, "layer_types": named}

    return change


_WINDOW, _FULL = "sliding_attention", "full_attention"
VARIANTS: dict[str, Callable[[Json], Json]] = {
    "a window": lambda _: {"sliding_window": 512},
    "no window": lambda _: {"sliding_window": None},
    "all named full": _named(_FULL),
    "all named windows": _named(_WINDOW),
    "named in turns": _named(_WINDOW, _FULL),
    "a switch": lambda _: {"sliding_window": 512, "use_sliding_window": True,
                           "max_window_layers": 0},
    "a switch of no layers": lambda text: {"sliding_window": 512, "use_sliding_window": True,
                                           "max_window_layers": text["num_hidden_layers"]},
    "a switch that is off": lambda _: {"sliding_window": 512, "use_sliding_window": False},
    "a pattern": lambda _: {"sliding_window": 512, "sliding_window_pattern": 3},
    "a pattern that was written": lambda _: {"sliding_window": 512, "_sliding_window_pattern": 3},
    "another size of heads": lambda _: {"head_dim": 64},
}  # fmt: skip
OUTER: dict[str, Json] = {
    "outside: heads": {"num_key_value_heads": 1},
    "outside: size of heads": {"head_dim": 32},
    "outside: a window": {"sliding_window": 99},
    "outside: named layers": {"layer_types": [_WINDOW] * LAYERS},
}
"""Keys of the level around a language model."""
NO_HEADS = "no number of KV heads"


def _cases() -> dict[str, Json]:
    made: dict[str, Json] = {}
    for family, base in _bases().items():
        for name, change in VARIANTS.items():
            if "num_hidden_layers" in _text(base):
                made[f"{family}: {name}"] = copy.deepcopy(base)
                _text(made[f"{family}: {name}"]).update(change(_text(base)))
        made[f"{family}: {NO_HEADS}"] = copy.deepcopy(base)
        _text(made[f"{family}: {NO_HEADS}"]).pop("num_key_value_heads", None)
        if "text_config" in base:
            made |= {f"{family}: {name}": {**base, **keys} for name, keys in OUTER.items()}
    return made


CASES = _cases()


@pytest.fixture(scope="module")
def specs() -> Json:
    return specs_of(CASES)


def planned(name: str) -> Rows | None:
    try:
        return ours(model_shape(CASES[name], name))
    except UnreadableConfig:
        return None


@pytest.mark.parametrize("variant", [*VARIANTS, *OUTER, NO_HEADS])
def test_a_variant_is_planned_as_vllm_caches_it_or_refused(variant: str, specs: Json) -> None:
    wrong, compared = {}, 0
    for name in CASES:
        if name.partition(": ")[2] != variant or "error" in specs[name]:
            continue
        found, right = planned(name), theirs(specs[name])
        compared += found is not None
        if found not in (None, right):
            wrong[name] = f"{found}, vLLM {right}"
    assert wrong == {}
    assert compared >= FEWEST


def test_variants_change_what_is_cached(specs: Json) -> None:
    """Negative control: plans of other variants of the same families are not vLLM's."""
    for family in ("llama", "qwen2", "gemma3_text"):
        window, none = f"{family}: a switch", f"{family}: no window"
        if family != "qwen2":
            window = f"{family}: all named windows"
        assert planned(none) not in (None, theirs(specs[window]))
