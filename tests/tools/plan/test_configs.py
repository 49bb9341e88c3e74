"""Configurations that people deploy: read right, or refused in one short line that says what to do.

``configs`` has them as published, with what vLLM 0.32 caches for each, which was worked out by hand
from its source (``expected.json`` says where).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.cli.main import main
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.hf import head_geometry
from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.hf.model_families import FAMILIES, Windows
from pdconn.tools.plan.model_shape import ModelShape
from pdconn.tools.plan.plan_errors import ShapeError, UnreadableConfig
from tests.tools.plan.published import PUBLISHED

FOLDER = Path(__file__).parent / "configs"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
MUST_BE_READ = [name for name, one in EXPECTED.items() if one["verdict"] == "must be read"]
LONGEST = 230

Json = dict[str, Any]


def read(name: str) -> Json:
    path = FOLDER / name / "config.json"
    path = path if path.exists() else FOLDER / f"{name}.json"
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    return found


def beside(name: str) -> Json | None:
    path = FOLDER / name / "hf_quant_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def without_type(config: Json) -> Json:
    """The same without any ``model_type``."""
    return {
        key: without_type(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "model_type"
    }


def groups_of(shape: ModelShape) -> list[tuple[Any, ...]]:
    return [
        (len(one.layers), one.heads, one.row_nbytes, one.window, one.row_tokens)
        for one in shape.attention
    ]


def is_right(shape: ModelShape, expected: Json) -> bool:
    keys = ("layers", "kv_heads", "row_bytes_per_head", "window", "tokens_per_row")
    groups = [tuple(one[key] for key in keys) for one in expected["groups"]]
    states = [(one["layers"], one["bytes_per_layer"]) for one in expected["states"]]
    ours = [(len(one.layers), one.state.state_nbytes(1)) for one in shape.states]
    nbytes = shape.token_bytes
    sums = ("full_attention_bytes_per_token", "window_bytes_per_token", "state_bytes_per_request")
    return (
        sorted(groups_of(shape), key=str) == sorted(groups, key=str)
        and ours == states
        and (nbytes.full, nbytes.windows, nbytes.states) == tuple(expected[key] for key in sums)
        and shape.stored_as == expected["kv_dtype_by_default_in_vllm"]
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_configuration_is_read_right_or_refused(name: str) -> None:
    expected = EXPECTED[name]
    try:
        shape = model_shape(read(name), name, beside(name))
    except UnreadableConfig as error:
        refused = str(error)
    else:
        assert expected["verdict"] != "must be refused by name"
        assert is_right(shape, expected), groups_of(shape)
        return
    assert name not in MUST_BE_READ, refused
    assert len(refused) < LONGEST
    assert "did you mean" not in refused


def test_a_wrong_shape_is_noticed() -> None:
    """Negative control: FP8 passed over, and one number of heads for all layers."""
    name = "gemma-4-31b-nvfp4"
    assert is_right(model_shape(read(name), name), EXPECTED[name])
    assert not is_right(model_shape(read(name), name, dtype="bfloat16"), EXPECTED[name])
    flash = "mimo-v2-flash"
    assert not is_right(model_shape({**read(flash), "swa_num_key_value_heads": 4}), EXPECTED[flash])


_MORE: dict[str, Json] = {
    "falcon_h1": {"mamba_use_mlp": True, "mamba_chunk_size": 256, "attn_layer_indices": None,
                  "ssm_multipliers": [1.0] * 5, "time_step_floor": 1e-4, "projectors_bias": False},
    "jamba": {"mamba_dt_rank": 256, "mamba_inner_layernorms": True, "use_mamba_kernels": True,
              "expert_layer_period": 2, "num_logits_to_keep": 1},
    "bamba": {"attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "mamba_chunk_size": 256},
    "lfm2": {"conv_dim_out": 2560, "conv_dim": 2560, "num_heads": 32, "use_pos_enc": True,
             "conv_use_xavier_init": True, "block_dim": 2560, "block_use_swiglu": True},
    "granitemoehybrid": {"mamba_chunk_size": 256, "shared_intermediate_size": 1024,
                         "position_embedding_type": "nope", "mamba_proj_bias": False},
    "nemotron_h": {"mamba_hidden_act": "silu", "expand": 2, "chunk_size": 128,
                   "rescale_prenorm_residual": True, "sliding_window": None,
                   "attention_head_dim": 128},
    "llama4_text": {"attn_temperature_tuning": True, "attn_scale": 0.1,
                    "interleave_moe_layer_step": 1,
                    "cache_implementation": "hybrid", "moe_layers": [1, 3], "floor_scale": 8192},
    "gpt_oss": {"initial_context_length": 4096, "swiglu_limit": 7.0, "experts_per_token": 4},
    "cohere2": {"layer_switch": 4, "order_of_interleaved_layers": "local_attn_first",
                "rotary_pct": 1.0, "cache_implementation": "hybrid", "use_qk_norm": False},
    "deepseek_v3": {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "ep_size": 1,
                    "moe_layer_freq": 1, "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
                    "head_dim": 64, "qk_head_dim": 192},
    "kimi_k2": {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                "use_unified_vision_chunk": True},
    "kimi_linear": {**PUBLISHED["moonshotai/Kimi-Linear-48B-A3B-Instruct"], "mla_use_nope": True,
                    "moe_layer_freq": 1, "model_max_length": 1048576},
    "qwen3_next": {"full_attention_interval": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_moe": {"max_window_layers": 48, "use_sliding_window": False, "sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4,
                "layer_types": ["full_attention"] * 36, "sliding_window": None},
    "exaone4": {"sliding_window_pattern": "LLLG", "layer_types": ["full_attention"] * 32},
    "gemma3_text": {"query_pre_attn_scalar": 168, "rope_local_base_freq": 10000.0,
                    "cache_implementation": "hybrid", "attn_logit_softcapping": None},
}  # fmt: skip
"""Further keys that published files of a family have."""


@pytest.mark.parametrize("family", _MORE)
def test_what_published_files_have_besides_is_no_reason_to_refuse(family: str) -> None:
    model_shape({"model_type": family, **_MORE[family]})


@pytest.mark.parametrize("name", EXPECTED)
def test_without_a_model_type_it_is_read_right_or_refused(name: str) -> None:
    """Before: MiMo V2, MiniMax M3 and AFMoE got plans without their windows' heads or indexer."""
    try:
        shape = model_shape(without_type(read(name)), name, beside(name))
    except UnreadableConfig as error:
        refused = str(error)
    else:
        assert is_right(shape, EXPECTED[name])
        return
    assert len(refused) < LONGEST


def test_afmoe_is_read_with_its_type_and_refused_without() -> None:
    text = {
        "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 16, "head_dim": 128,
        "num_key_value_heads": 4, "sliding_window": 2048, "global_attn_every_n_layers": 4,
    }  # fmt: skip
    shape = model_shape({**text, "model_type": "afmoe"})
    assert groups_of(shape) == [(24, 4, 512, 2048, 1), (8, 4, 512, None, 1)]
    with pytest.raises(UnreadableConfig, match=r"global_attn_every_n_layers.*add the model's"):
        model_shape(text)
    named = ["sliding_attention", "full_attention"] * 16
    del text["global_attn_every_n_layers"]
    assert model_shape({**text, "layer_types": named}).token_bytes.windows == 16 * 4 * 512


_SPARSE = {"model_type": "glm_moe_dsa", "num_hidden_layers": 12, "kv_lora_rank": 512,
           "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 2048}  # fmt: skip


def test_an_indexer_has_rows_of_its_own_in_the_layers_that_choose() -> None:
    """132 bytes: 128 FP8 numbers and a float32 scale."""
    every = model_shape(_SPARSE)
    assert groups_of(every) == [(12, 1, 1152, None, 1), (12, 1, 132, None, 1)]
    assert model_shape({**_SPARSE, "layer_types": ["deepseek_sparse_attention"] * 12}) == every
    some = model_shape({**_SPARSE, "index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert some.attention[1].layers == (0, 1, 2, 6, 10)
    for wrong in ({"indexer_types": ["shared"] * 12}, {"index_topk_pattern": "FSSS" * 3}):
        with pytest.raises(UnreadableConfig, match=next(iter(wrong))):
            model_shape({**_SPARSE, **wrong})
    fp8 = {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}
    with pytest.raises(UnreadableConfig, match=r"kv_cache_quant_algo: .*--dtype bfloat16"):
        model_shape({**_SPARSE, **fp8})
    assert groups_of(model_shape({**_SPARSE, **fp8}, dtype="bfloat16")) == groups_of(every)


def test_step_3_names_its_heads_in_two_ways() -> None:
    """As published (transformers' names), and as vLLM's class has them."""
    kinds = ["full_attention", *["sliding_attention"] * 3] * 12
    text = {"model_type": "step3p7", "num_hidden_layers": 45, "head_dim": 128,
            "sliding_window": 512, "layer_types": kinds}  # fmt: skip
    for key in ("num_key_value_heads", "num_attention_groups"):
        shape = model_shape({**text, key: 8})
        assert groups_of(shape) == [(12, 8, 512, None, 1), (33, 8, 512, 512, 1)]


@pytest.mark.parametrize(
    "outer",
    [{"num_key_value_heads": 2}, {"head_dim": 64}, {"sliding_window": 99},
     {"layer_types": ["full_attention"] * 8}],
    ids=lambda one: next(iter(one)),
)  # fmt: skip
def test_the_level_around_a_language_model_decides_nothing_of_it(outer: Json) -> None:
    """Before: 2 KV heads of another level, or its window, were those of every layer."""
    text = {"num_hidden_layers": 8}
    config = {"model_type": "gemma3", "text_config": text}
    assert model_shape({**config, **outer}) == model_shape(config)
    assert model_shape({**config, "text_config": {**text, **outer}}) != model_shape(config)
    switched = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 77}
    qwen = {"model_type": "qwen2_5_vl", **switched, "text_config": text}
    assert model_shape(qwen).token_bytes.windows == 0


def test_a_missing_number_of_kv_heads_is_not_one_for_each_query() -> None:
    """GLM-4.5 without the key has 8 in vLLM, of its class, and had 96 here."""
    for family in ("glm4_moe", "internlm2", "internlm3", "mimo"):
        text = {**DENSE, "model_type": family, "head_dim": 128}
        assert model_shape(text).attention[0].heads == 8
        del text["num_key_value_heads"]
        with pytest.raises(UnreadableConfig, match=r"num_key_value_heads: .*got nothing"):
            model_shape(text)
        assert model_shape({**text, "num_key_value_heads": None}).attention[0].heads == 32


def test_smollm3_has_the_windows_that_it_names_whatever_its_switch_says() -> None:
    named = ["sliding_attention", "full_attention"] * 18
    text = {"model_type": "smollm3", "sliding_window": 512, "use_sliding_window": False}
    assert groups_of(model_shape(text)) == [(36, 4, 512, None, 1)]
    found = groups_of(model_shape({**text, "layer_types": named}))
    assert found == [(18, 4, 512, 512, 1), (18, 4, 512, None, 1)]


@pytest.mark.parametrize("family", ["granitemoehybrid", "mimo"])
def test_a_size_of_heads_that_vllms_class_passes_over_is_refused(family: str) -> None:
    text = {**DENSE, "model_type": family, "head_dim": 128, "layer_types": ["full_attention"] * 32}
    model_shape(text)
    with pytest.raises(UnreadableConfig, match="head_dim: expected hidden_size over heads, 128"):
        model_shape({**text, "head_dim": 64})


def test_layers_of_gemma_4_that_differ_are_refused() -> None:
    """``per_layer_config`` was taken from its first entry, for every layer of full attention."""
    text = {"model_type": "gemma4_text", "num_hidden_layers": 12}
    full = {"num_key_value_heads": 2, "head_dim": 128}
    every = {"05": full, "11": full}
    for one in (every, {5: full, 11: full}):
        assert groups_of(model_shape({**text, "per_layer_config": one}))[1] == (2, 2, 512, None, 1)
    for none in (None, {}):  # then its class adds none of its own
        assert groups_of(model_shape({**text, "per_layer_config": none}))[1][1:3] == (4, 1024)
    assert groups_of(model_shape(text))[1][1:3] == (4, 2048)
    for wrong in ({"5": full}, {"0": full}, {**every, "0": full}, {"x": full}, [full], 7,
                  {"5": 1, "11": 1}):  # fmt: skip
        with pytest.raises(UnreadableConfig, match="per_layer_config"):
            model_shape({**text, "per_layer_config": wrong})


def test_kimi_linear_is_read_by_the_lists_that_vllms_class_reads() -> None:
    """Transformers' class has other keys, which vLLM's passes over: all layers are MLA there."""
    kimi = PUBLISHED["moonshotai/Kimi-Linear-48B-A3B-Instruct"]
    listed = kimi["linear_attn_config"]
    some = model_shape({**kimi, "linear_attn_config": {**listed, "kda_layers": [1, 2, 3]}})
    assert (len(some.attention[0].layers), some.states[0].layers) == (24, (0, 1, 2))
    of_transformers = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    alone = {key: value for key, value in kimi.items() if key != "linear_attn_config"}
    for wrong in (alone, {**alone, **of_transformers}, {**kimi, "linear_attn_config": None}):
        with pytest.raises(UnreadableConfig, match="linear_"):
            model_shape(wrong)
    for key in ("kda_layers", "full_attn_layers"):
        fewer = {name: value for name, value in listed.items() if name != key}
        with pytest.raises(UnreadableConfig, match=key):
            model_shape({**kimi, "linear_attn_config": fewer})


def test_lfm2_with_experts_convolves_its_hidden_size() -> None:
    moe = PUBLISHED["LiquidAI/LFM2-8B-A1B"]
    assert model_shape({**moe, "conv_dim": 1024}) == model_shape(moe)
    dense = PUBLISHED["LiquidAI/LFM2-1.2B"]
    assert model_shape({**dense, "conv_dim": 1024}) != model_shape(dense)


def test_layers_of_unequal_heads_are_planned_as_pdconn_serves_them() -> None:
    """A rank's heads are known of Gemma 4 alone: the connector refuses the others above TP 1."""
    mimo = model_shape(read("mimo-v2-flash"))
    assert EngineShape(mimo).ranks == 1
    with pytest.raises(ShapeError, match=r"tp: expected 1: with 4 and 8 KV heads.*, got 2"):
        EngineShape(mimo, tp=2)
    assert EngineShape(model_shape(read("gemma-4-31b-nvfp4")), tp=2).ranks == 2


# --- keys of geometry: each is read, says nothing, or is refused

DENSE = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
FOREIGN: dict[str, Any] = {
    "swa_num_key_value_heads": 4, "v_head_dim": 64, "hybrid_layer_pattern": [0, 1] * 16,
    "global_attn_every_n_layers": 4, "sparse_attention_config": {"sparse_index_dim": 128},
    "kv_lora_rank": 512, "index_topk": 2048, "index_head_dim": 128, "compress_ratios": [0, 4],
    "attention_chunk_size": 8192, "num_kv_shared_layers": 4, "sliding_window_pattern": 4,
    "use_cla": True, "cla_share_factor": 2, "yoco_local_kv_layer": 3, "block_configs": [{"a": 1}],
    "swa_head_dim": 64, "global_head_dim": 512, "num_global_key_value_heads": 2,
    "num_key_value_heads_per_layer": [8] * 32, "kv_source_layer_ids": [1, 2], "multi_query": True,
    "multi_query_group_num": 2, "num_attention_groups": 4, "layers_block_type": ["mamba"] * 32,
    "mamba_d_state": 128, "ssm_cfg": {"layer": "Mamba2"}, "linear_attn_config": {"num_heads": 4},
    "conv_L_cache": 3, "lru_width": 2560, "attn_layer_period": 8, "loop_num": 2,
    "interleaved_sliding_window": [4096, 128], "sliding_windows": [128] * 32, "rswa_window": 128,
    "attn_type_list": [0, 1] * 16, "cross_attention_layers": [3, 8], "kv_cache_groups": 2,
    "head_size": 64, "local_layer_ids": [0],
    "compression_ratio": 4, "index_topk_freq": 2, "hidden_states_kept": 4, "token_window": 5,
    "delta_net": True,
}  # fmt: skip
"""Keys of vLLM's models, and made-up ones, with values that say something."""


@pytest.mark.parametrize("key", FOREIGN)
@pytest.mark.parametrize("with_type", [True, False], ids=["llama", "no type"])
def test_a_key_that_may_change_what_is_cached_is_refused(key: str, with_type: bool) -> None:
    config = {**(DENSE if with_type else without_type(DENSE)), "sliding_window": None}
    model_shape(config)
    if key == "sliding_window_pattern":
        config["sliding_window"] = 4096
    with pytest.raises(UnreadableConfig) as refused:
        model_shape({**config, key: FOREIGN[key]})
    assert refused.value.field in (key, "sliding_window")
    assert len(str(refused.value)) < LONGEST
    assert refused.value.hint or "expected a whole number" in str(refused.value)


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": None},
        {"sliding_window": 0}, {"attn_type_list": [1] * 32}, {"hybrid_layer_pattern": [0] * 32},
        {"v_head_dim": 128, "head_dim": 128}, {"num_kv_shared_layers": 0}, {"compress_ratios": []},
        {"attention_bias": True, "swa_rope_theta": 10000, "vision_config": {"window_size": 8}},
        {"chunk_size_feed_forward": 0, "output_hidden_states": False, "q_lora_rank": None},
        {"moe_every_n_layers": 2, "num_local_experts": 8, "image_token_index": 7},
        {"layer_types": ["full_attention"] * 32, "cross_attention_hidden_size": None},
        {"compression_ratio": 1.0, "use_head_wise_attn_gate": True, "index_topk_freq": 1},
    ],
    ids=lambda one: next(iter(one)),
)  # fmt: skip
def test_what_says_nothing_is_no_reason_to_refuse(harmless: Json) -> None:
    assert model_shape({**DENSE, **harmless}, "a") == model_shape(DENSE, "a")


def test_keys_that_are_not_looked_for_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the check each of these is a plan that looks right."""
    monkeypatch.setattr("pdconn.tools.plan.hf.config_json.check_geometry", lambda *_: None)
    passed_over = 0
    for key, value in FOREIGN.items():
        try:
            passed_over += model_shape({**DENSE, key: value}, "a") == model_shape(DENSE, "a")
        except UnreadableConfig:
            continue
    assert passed_over > len(FOREIGN) // 2


def test_a_list_where_one_number_is_expected_is_refused_in_a_line() -> None:
    for key in ("num_key_value_heads", "head_dim", "sliding_window", "num_attention_heads"):
        with pytest.raises(UnreadableConfig, match=key) as refused:
            model_shape({**DENSE, key: [8] * 32})
        assert len(str(refused.value)) < LONGEST


def test_no_refusal_is_long_whatever_the_file_says() -> None:
    long = "x" * 5000
    for wrong in (
        {"model_type": long}, {"layer_types": [long] * 32}, {"torch_dtype": long},
        {"sparse_attention_config": {long: [0] * 999}}, {"kv_" + long: 1}, {"head_dim": long},
        {"quantization_config": long}, {"text_config": long}, {"use_bidirectional_attention": long},
        {"quantization_config": {"quant_method": "modelopt", "producer": {"name": "modelopt"},
                                 "quantization": {"quant_algo": long}}},
        {"attention_chunk_size": 10**500},
    ):  # fmt: skip
        with pytest.raises(UnreadableConfig) as refused:
            model_shape({**DENSE, **wrong})
        assert len(str(refused.value)) < LONGEST, wrong


def test_a_refusal_says_what_to_do() -> None:
    for wrong, remedy in (
        (read("exaone-4.0-32b-no-layer-types"), "name each layer's kind in layer_types"),
        ({**DENSE, "is_encoder_decoder": True}, "serve it from one engine"),
        ({**DENSE, "use_bidirectional_attention": True}, "serve it from one engine"),
        ({**DENSE, "index_topk": 2048}, "plan a built-in shape like it (pdconn plan --list)"),
        (without_type({**DENSE, "index_topk": 2048}), "add the model's model_type"),
    ):
        with pytest.raises(UnreadableConfig) as refused:
            model_shape(wrong)
        assert remedy in str(refused.value)


@pytest.mark.parametrize("given", ["minimax_m3", "qwen3_moes", "falcon", "gemma5", "mimo_v3"])
def test_another_family_is_never_offered(given: str) -> None:
    """``minimax_m3`` was answered "did you mean 'minimax_m2'?": a plan without its indexer."""
    with pytest.raises(UnreadableConfig, match="pdconn plan --list") as refused:
        model_shape({**DENSE, "model_type": given})
    assert "did you mean" not in str(refused.value)


def test_the_same_name_written_otherwise_is() -> None:
    with pytest.raises(UnreadableConfig, match="did you mean 'qwen3_moe'"):
        model_shape({**DENSE, "model_type": "Qwen3-MoE"})


def test_deepseek_v4_is_sent_to_its_built_in_shape() -> None:
    flash = {"model_type": "deepseek_v4", "num_hidden_layers": 43}
    with pytest.raises(UnreadableConfig, match="--model deepseek-v4"):
        model_shape(flash)
    with pytest.raises(UnreadableConfig, match="pdconn plan --list"):
        model_shape({**flash, "num_hidden_layers": 61})


def test_what_a_family_reads_is_a_key_of_geometry() -> None:
    """Else another family would pass over it."""
    free = {"mamba_ssm_cache_dtype", "n_groups", "no_rope_layers", "no_rope_layer_interval"}
    for family, known in FAMILIES.items():
        for key in known.reads - free:
            assert head_geometry.is_geometry(key), (family, key)
    assert {known.windows for known in FAMILIES.values()} == set(Windows)


def test_the_command_reads_the_file_beside_and_names_a_file_after_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = FOLDER / "llama-3.1-70b-fp8"
    assert main(["plan", "--model", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama-3.1-70b-fp8: ")
    asks = "auto: 8 bits a number (fp8_e4m3, as hf_quant_config.json: kv_cache_quant_algo asks)"
    assert f"163,840 bytes a token; {asks}" in out
    assert main(["plan", "--model", str(folder / "config.json"), "--dtype", "bfloat16"]) == 0
    assert "327,680 bytes a token; bfloat16: 16 bits a number\n" in capsys.readouterr().out
    alone = tmp_path / "my-mimo.json"
    alone.write_text(json.dumps(read("mimo-7b")), encoding="utf-8")
    assert main(["plan", "--model", str(alone), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "my-mimo"
    assert found["kv"]["resolved_dtype"] == "bfloat16"
