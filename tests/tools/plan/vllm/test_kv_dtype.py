"""The type of keys and values under ``auto`` is the one that vLLM's own code resolves."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.tools.plan.hf import kv_dtype
from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.model_shape import KV_DTYPES
from pdconn.tools.plan.plan_errors import UnreadableConfig

# First, since its parts import each other; importorskip ignores the warnings of what they import.
pytest.importorskip("vllm.config")
arch = pytest.importorskip("vllm.transformers_utils.model_arch_config_convertor")
methods = pytest.importorskip("vllm.model_executor.layers.quantization")
compressed = pytest.importorskip(
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
)
resolve_kv_cache_dtype_string = pytest.importorskip(
    "vllm.utils.torch_utils"
).resolve_kv_cache_dtype_string

Json = dict[str, Any]
DENSE: Json = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
               "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
LATENT: Json = {"model_type": "deepseek_v3"}
FLOAT_8: Json = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor",
                 "symmetric": True}  # fmt: skip
MODELOPT: Json = {"name": "modelopt", "version": "0.23.0"}


def beside(algo: str, kv: Any, **more: Any) -> Json:
    inner = {"quant_algo": algo, "kv_cache_quant_algo": kv}
    return {"producer": MODELOPT, "quantization": inner, **more}


INSIDE: dict[str, Json] = {
    "nothing": {},
    "a null": {"quantization_config": None},
    "modelopt, a scheme": {"quantization_config": {"quant_method": "modelopt",
                                                   "kv_cache_scheme": FLOAT_8}},
    "modelopt_fp4, a scheme": {"quantization_config": {"quant_method": "modelopt_fp4",
                                                       "kv_cache_scheme": FLOAT_8}},
    "modelopt, dynamic": {"quantization_config": {"quant_method": "modelopt",
                                                  "kv_cache_scheme": FLOAT_8 | {"dynamic": True}}},
    "modelopt, integers": {"quantization_config": {"quant_method": "modelopt",
                                                   "kv_cache_scheme": FLOAT_8 | {"type": "int"}}},
    "modelopt, FP4": {"quantization_config": {"quant_method": "modelopt",
                                              "kv_cache_scheme": FLOAT_8 | {"num_bits": 4}}},
    "modelopt, an algo": {"quantization_config": {"quant_method": "modelopt",
                                                  "kv_cache_quant_algo": "FP8"}},
    "modelopt, NVFP4": {"quantization_config": {"quant_method": "modelopt_mixed",
                                                "kv_cache_quant_algo": "NVFP4"}},
    "modelopt, unknown": {"quantization_config": {"quant_method": "modelopt",
                                                  "kv_cache_quant_algo": "INT8"}},
    "modelopt, both": {"quantization_config": {"quant_method": "modelopt",
                                               "kv_cache_quant_algo": "x",
                                               "kv_cache_scheme": FLOAT_8}},
    "modelopt, nested": {"quantization_config": beside("FP8", "FP8", quant_method="modelopt")},
    "modelopt, legacy": {"quantization_config": {"quantization": {
        "modelopt_quant_config": 1, "quant_algo": "fp8", "kv_cache_quant_algo": "fp8"}}},
    "modelopt by its producer alone": {"quantization_config": {"producer": MODELOPT,
                                                               "kv_cache_scheme": FLOAT_8}},
    "compressed-tensors": {"quantization_config": {"quant_method": "compressed-tensors",
                                                   "kv_cache_scheme": FLOAT_8}},
    "compressed_tensors": {"quantization_config": {"quant_method": "Compressed_Tensors",
                                                   "kv_cache_scheme": FLOAT_8}},
    "compressed-tensors, a head": {"quantization_config": {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": FLOAT_8 | {"strategy": "attn_head"}}},
    "compressed-tensors, no scheme": {"quantization_config": {"quant_method": "compressed-tensors",
                                                              "kv_cache_scheme": None}},
    "compressed-tensors, an algo": {"quantization_config": {"quant_method": "compressed-tensors",
                                                            "kv_cache_quant_algo": "FP8"}},
    "compression_config": {"compression_config": {"quant_method": "compressed-tensors",
                                                  "kv_cache_scheme": FLOAT_8}},
    "fp8 and a scheme": {"quantization_config": {"quant_method": "fp8",
                                                 "kv_cache_scheme": FLOAT_8}},
    "quark": {"quantization_config": {"quant_method": "quark", "kv_cache_quant_algo": "FP8"}},
    "awq": {"quantization_config": {"quant_method": "awq"}},
}  # fmt: skip
BESIDE: dict[str, Json] = {
    "FP8": beside("FP8", "FP8"),
    "NVFP4 weights, FP8 cache": beside("NVFP4", "fp8"),
    "no cache": beside("FP8", None),
    "FP8 of channels": beside("FP8_PER_CHANNEL_PER_TOKEN", "FP8"),
    "unknown cache": beside("FP8", "INT4"),
    "no producer": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
}
CASES: list[tuple[str, Json, Json | None]] = [
    *((f"inside: {name}", one, None) for name, one in INSIDE.items()),
    *((f"beside: {name}", {}, one) for name, one in BESIDE.items()),
    ("both", INSIDE["awq"], BESIDE["FP8"]),
    ("a null inside", INSIDE["a null"], BESIDE["FP8"]),
]


def theirs(config: Json, quantization: Json | None, *, is_latent: bool) -> str:
    """As the engine starts: its configuration, then what a layer of attention looks at."""
    given = copy.deepcopy(config.get("quantization_config"))
    found = copy.deepcopy(quantization) if given is None else given
    text = SimpleNamespace(model_type=config["model_type"])
    hf = SimpleNamespace(
        quantization_config=found,
        model_type=config["model_type"],
        compression_config=copy.deepcopy(config.get("compression_config")),
    )
    chosen = arch.ModelArchConfigConvertorBase(hf, text).get_quantization_config()
    resolved = resolve_kv_cache_dtype_string("auto", SimpleNamespace(hf_config=hf))
    if resolved != "auto" or chosen is None or is_latent:
        return resolved
    if chosen["quant_method"] == "compressed-tensors":
        layers = SimpleNamespace(kv_cache_scheme=chosen.get("kv_cache_scheme"))
        compressed.CompressedTensorsKVCacheMethod.validate_kv_cache_scheme(layers.kv_cache_scheme)
        return "fp8" if layers.kv_cache_scheme is not None else resolved
    return resolved


@pytest.mark.parametrize("base", [DENSE, LATENT], ids=["heads", "latent"])
@pytest.mark.parametrize(("name", "inside", "quantization"), CASES, ids=[one[0] for one in CASES])
def test_the_type_is_vllms(name: str, inside: Json, quantization: Json | None, base: Json) -> None:
    config = base | inside
    right = theirs(config, quantization, is_latent=base is LATENT)
    if right == "nvfp4":
        with pytest.raises(UnreadableConfig, match="--dtype plans with a type that you choose"):
            model_shape(config, quantization=quantization)
        return
    shape = model_shape(config, quantization=quantization)
    assert shape.stored_as == ("bfloat16" if right == "auto" else right)
    assert shape.item_nbytes == KV_DTYPES[shape.stored_as]
    assert bool(shape.asked_by) == (right != "auto")
    full = model_shape(base).token_bytes.full
    assert shape.token_bytes.full == full * shape.item_nbytes / 2


def test_the_cases_tell_the_ways_apart() -> None:
    """Negative control: one reader of any key, whatever the method, would differ here."""
    found = {theirs(DENSE | inside, other, is_latent=False) for _, inside, other in CASES}
    assert found == {"auto", "fp8", "fp8_e4m3", "nvfp4"}
    scheme = INSIDE["compressed-tensors"]
    assert theirs(LATENT | scheme, None, is_latent=True) == "auto"
    assert theirs(DENSE | scheme, None, is_latent=False) == "fp8"
    assert theirs(DENSE | INSIDE["fp8 and a scheme"], None, is_latent=False) == "auto"


@pytest.mark.parametrize(
    ("inside", "quantization", "error"),
    [
        ({}, beside("MIXED_PRECISION", "FP8"), ValueError),
        ({}, beside("W4A8_AWQ", "FP8"), ValueError),
        *(
            ({"quantization_config": {"quant_method": "compressed-tensors",
                                      "kv_cache_scheme": FLOAT_8 | wrong}}, None, error)
            for wrong, error in (
                ({"num_bits": 4}, NotImplementedError),
                ({"type": "int"}, NotImplementedError),
                ({"symmetric": False}, NotImplementedError),
                ({"strategy": "channel"}, NotImplementedError),
                ({"strategy": None}, ValueError),
            )
        ),
    ],
)  # fmt: skip
def test_what_ends_vllm_is_refused(
    inside: Json, quantization: Json | None, error: type[Exception]
) -> None:
    config = DENSE | inside
    with pytest.raises(error):
        theirs(config, quantization, is_latent=False)
    with pytest.raises(UnreadableConfig, match="--dtype plans with a type that you choose"):
        model_shape(config, quantization=quantization)
    assert model_shape(config, quantization=quantization, dtype="fp8").item_nbytes == 1


def test_a_nested_level_counts_where_vllm_looks_there() -> None:
    """Of compressed-tensors the text's level too; of ModelOpt the outermost alone."""
    for method, right in (("compressed-tensors", "fp8"), ("modelopt", "bfloat16")):
        nested = {"quant_method": method, "kv_cache_scheme": FLOAT_8}
        config = {"model_type": "llava", "text_config": DENSE | {"quantization_config": nested}}
        assert model_shape(config).stored_as == right


def test_states_keep_their_type_beside_an_fp8_cache() -> None:
    config = {"model_type": "qwen3_next", "torch_dtype": "bfloat16"}
    quantized = model_shape(config, quantization=BESIDE["FP8"])
    assert quantized.token_bytes.states == model_shape(config).token_bytes.states
    assert quantized.token_bytes.full * 2 == model_shape(config).token_bytes.full


def test_no_other_method_of_vllms_has_a_scheme_of_the_cache() -> None:
    """What a layer looks for is an attribute; a new one would change the type."""
    having = set()
    for method in methods.QUANTIZATION_METHODS:
        try:
            config = methods.get_quantization_config(method)
        except ImportError:
            continue
        if "kv_cache_scheme" in config.__init__.__code__.co_varnames:
            having.add(method)
    assert having == {kv_dtype._CT}
