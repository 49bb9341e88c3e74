"""Configurations that people deploy: read right, or refused in one short line that says what to do.

``configs`` has them as published, with what vLLM 0.32 caches for each, which was worked out by hand
from its source (``expected.json`` says where).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdconn.cli.main import main
from pdconn.forecast.errors import UnreadableConfig
from pdconn.forecast.hf import geometry
from pdconn.forecast.hf.config import model_shape
from pdconn.forecast.hf.families import FAMILIES, Windows
from pdconn.forecast.model import ModelShape

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
    ours = [(len(one.layers), one.state.nbytes(1)) for one in shape.states]
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
    "local_layer_ids": [0], "hidden_states_kept": 4, "token_window": 5, "delta_net": True,
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
    ],
    ids=lambda one: next(iter(one)),
)  # fmt: skip
def test_what_says_nothing_is_no_reason_to_refuse(harmless: Json) -> None:
    assert model_shape({**DENSE, **harmless}, "a") == model_shape(DENSE, "a")


def test_keys_that_are_not_looked_for_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the check each of these is a plan that looks right."""
    monkeypatch.setattr("pdconn.forecast.hf.config.check_geometry", lambda *_: None)
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
            assert geometry.is_geometry(key), (family, key)
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
