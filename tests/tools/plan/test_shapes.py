"""Model shapes: the built-in ones, and those read from a config.json."""

import pytest

from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.hf.model_families import FAMILIES
from pdconn.tools.plan.model_shape import ModelShape
from pdconn.tools.plan.plan_errors import ShapeError, UnreadableConfig
from pdconn.tools.plan.shapes import SHAPES, built_in
from registration.references import AttentionKind

GEMMA = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
LLAMA_4 = {
    "model_type": "llama4",
    "text_config": {
        "attention_chunk_size": 8192,
        "dtype": "bfloat16",
        "head_dim": 128,
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "no_rope_layers": [],
    },
}
# As published: what equals the default of Gemma3TextConfig is left out.
GEMMA_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
GEMMA_12B = {
    **GEMMA_4B,
    "text_config": {
        **GEMMA_4B["text_config"],
        "hidden_size": 3840,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
}
# Lightning attention in 7 of 8 layers: 0 in the list.
MINIMAX_TEXT = {
    "architectures": ["MiniMaxText01ForCausalLM"],
    "model_type": "minimax_text_01",
    "attn_type_list": ([0] * 7 + [1]) * 10,
    "head_dim": 128,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "torch_dtype": "float32",
}


def kinds(shape: ModelShape) -> dict[AttentionKind, tuple[int, ...]]:
    return {sort.kind: sort.layers for sort in shape.sorts}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gemma-3-27b", GEMMA),
        ("gpt-oss-20b", GPT_OSS),
        ("llama-3.1-70b", LLAMA),
        ("qwen3-8b", QWEN),
        ("deepseek-v3", DEEPSEEK),
    ],
)
def test_a_config_and_the_built_in_shape_agree(name, config):
    assert model_shape(config, name) == built_in(name)


@pytest.mark.parametrize(
    ("name", "layers", "token_nbytes"),
    [
        # Bytes of one token in all layers: layers x 2 x heads x head size x 2 bytes.
        ("gemma-3-27b", 62, 62 * 2 * 16 * 128 * 2),
        ("gpt-oss-20b", 24, 24 * 2 * 8 * 64 * 2),
        ("gpt-oss-120b", 36, 36 * 2 * 8 * 64 * 2),
        ("llama-3.1-8b", 32, 128 << 10),  # 128 KiB, as Llama's users know it
        ("llama-3.1-70b", 80, 320 << 10),
        ("llama-3.1-405b", 126, 504 << 10),
        ("qwen3-8b", 36, 144 << 10),
        ("qwen3-32b", 64, 256 << 10),
        ("qwen3-30b-a3b", 48, 96 << 10),
        ("qwen3-235b-a22b", 94, 188 << 10),
        ("deepseek-v3", 61, 61 * 1152),  # 70 KB, as its authors say
    ],
)
def test_bytes_of_a_token(name, layers, token_nbytes):
    shape = built_in(name)
    assert shape.num_layers == layers
    per_token = sum(len(s.layers) * s.heads * s.row_nbytes / s.row_tokens for s in shape.sorts)
    assert per_token == token_nbytes


def test_deepseek_v4_rows_are_as_heavy_as_measured():
    """A row of the windows' tails at a boundary weighs 4.1 times one of full attention."""
    sorts = built_in("deepseek-v4").sorts
    full = sum(len(s.layers) * 256 // s.row_tokens * s.row_nbytes for s in sorts if not s.window)
    tails = {"swa": 2 * 64, "state": 4, "indexer_state": 4}
    windows = sum(
        len(s.layers) * tails[s.part] * s.row_nbytes
        for s in sorts
        if s.window and s.block_tokens != 8  # at a multiple of 128 that state is empty
    )
    assert windows / full == pytest.approx(4.1, abs=0.05)


def test_gemma_attends_to_everything_in_every_sixth_layer():
    full = kinds(model_shape(GEMMA))[AttentionKind.FULL]
    assert full == (5, 11, 17, 23, 29, 35, 41, 47, 53, 59)


def test_llama_4_is_local_where_it_rotates():
    shape = model_shape(LLAMA_4)
    assert kinds(shape)[AttentionKind.FULL] == tuple(range(3, 48, 4))
    assert {sort.window for sort in shape.sorts} == {8192, None}
    flags = [0, 1, 1, 1] * 12
    text = {**LLAMA_4["text_config"], "no_rope_layers": flags, "model_type": "llama4_text"}
    assert kinds(model_shape({"text_config": text}))[AttentionKind.FULL] == tuple(range(0, 48, 4))
    named = ["full_attention" if not flag else "chunked_attention" for flag in flags]
    by_name = model_shape({"text_config": {**text, "layer_types": named}})
    assert by_name == model_shape({"text_config": text})
    with pytest.raises(UnreadableConfig, match="layer_types: expected chunks where no_rope_layers"):
        model_shape({"text_config": {**text, "layer_types": named[::-1]}})


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"sliding_window": 4096}, ()),
        ({"sliding_window": 0}, tuple(range(80))),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 80}, tuple(range(80))),
        ({"sliding_window": 4096, "use_sliding_window": False, "model_type": "qwen3"},
         tuple(range(80))),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0,
          "model_type": "qwen3"}, ()),
        ({"sliding_window": 4096, "sliding_window_pattern": 4, "model_type": "exaone4"},
         tuple(range(3, 80, 4))),
        # Transformers writes the second beside layer_types, and does not read it back.
        ({"sliding_window": 4096, "sliding_window_pattern": 5, "model_type": "gemma3_text"},
         tuple(range(4, 80, 5))),
        ({"sliding_window": 4096, "_sliding_window_pattern": 5, "model_type": "gemma3_text"},
         tuple(range(5, 80, 6))),
        ({"sliding_window": 4096, "model_type": "gemma2"}, tuple(range(1, 80, 2))),
    ],
)  # fmt: skip
def test_ways_to_say_which_layers_have_windows(changes, full):
    found = kinds(model_shape({**LLAMA, **changes}))
    assert found.get(AttentionKind.FULL, ()) == full
    windowed = found.get(AttentionKind.SLIDING_WINDOW, ())
    assert sorted([*full, *windowed]) == list(range(80))


@pytest.mark.parametrize(
    ("changes", "row_nbytes", "heads"),
    [
        ({"head_dim": 256}, 1024, 8),
        ({"num_key_value_heads": None}, 512, 64),
        ({"torch_dtype": None}, 512, 8),
        ({"torch_dtype": "float32"}, 512, 8),  # vLLM caches it in 16 bits
        ({"torch_dtype": "torch.float8_e4m3fn"}, 256, 8),
        ({"torch_dtype": None, "dtype": "float16"}, 512, 8),
    ],
)
def test_bytes_and_heads_of_a_row(changes, row_nbytes, heads):
    (sort,) = model_shape({**LLAMA, **changes}).sorts
    assert (sort.row_nbytes, sort.heads) == (row_nbytes, heads)


def test_layers_that_share_another_ones_cache_keep_nothing():
    gemma = {"model_type": "gemma3n_text", "num_hidden_layers": 80}
    assert model_shape({**gemma, "num_kv_shared_layers": 30}).num_layers == 50


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", None),
        ("num_hidden_layers", "80"),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", [8] * 80),
        ("hidden_size", 8193),
        ("hidden_size", None),
        ("head_dim", -1),
        ("torch_dtype", "int3"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["linear_attention", "full_attention"] * 40),
        ("layer_types", [["full_attention"]] * 80),
        ("layer_types", "full_attention"),
        ("sliding_window", -1),
        ("sliding_window", 1.5),
        ("attention_chunk_size", "8192"),
        ("num_kv_shared_layers", 30),
        ("mamba_d_state", 128),
        ("ssm_cfg", {"layer": "Mamba2"}),
        ("hybrid_override_pattern", "M-M*"),
        ("linear_num_key_heads", 16),
        ("compress_ratios", [0, 4, 128]),
        ("index_topk", 2048),
        ("is_encoder_decoder", True),
        ("global_head_dim", 512),
        ("text_config", 3),
    ],
)
def test_what_cannot_be_understood_is_named(key, value):
    model_shape(LLAMA)
    with pytest.raises(UnreadableConfig, match=r"expected .*, got .+") as refused:
        model_shape({**LLAMA, key: value})
    assert refused.value.field == key
    assert len(str(refused.value)) < 230


def test_layers_cannot_all_share_another_ones_cache():
    gemma = {"model_type": "gemma3n_text", "num_hidden_layers": 35}
    for shared in (35, 36):
        with pytest.raises(UnreadableConfig, match="num_kv_shared_layers: expected below 35"):
            model_shape({**gemma, "num_kv_shared_layers": shared})


@pytest.mark.parametrize(
    ("config", "layers", "full", "heads", "row_nbytes"),
    [
        (GEMMA_4B, 34, 5, 4, 2 * 256 * 2),
        (GEMMA_12B, 48, 8, 8, 2 * 256 * 2),  # 3840 / 16 heads is 240, which it is not
    ],
)
def test_a_config_without_the_defaults_of_its_family_is_read(
    config, layers, full, heads, row_nbytes
):
    """Without the fix gemma-3-4b is refused, and gemma-3-12b has heads of 240 numbers."""
    shape = model_shape(config)
    assert shape.num_layers == layers
    assert len(kinds(shape)[AttentionKind.FULL]) == full
    assert {(one.heads, one.row_nbytes) for one in shape.sorts} == {(heads, row_nbytes)}
    assert {one.window for one in shape.sorts} == {1024, None}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MINIMAX_TEXT, "minimax_text_01"),
        ({**MINIMAX_TEXT, "attn_type_list": None}, "minimax_text_01"),
        (BERT, "bert"),
        ({**LLAMA, "model_type": "mamba2"}, "mamba2"),
        ({**LLAMA, "model_type": ["llama"]}, "model_type"),
    ],
)
def test_a_family_that_is_not_known_is_refused(config, named):
    """Without the fix MiniMax-Text is 80 layers of full attention, and BERT has a KV cache."""
    with pytest.raises(UnreadableConfig, match=named) as refused:
        model_shape(config)
    assert refused.value.field == "model_type"
    assert len(str(refused.value)) < 230


def test_a_config_without_a_family_is_read_where_all_families_agree():
    explicit = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert model_shape(explicit, "a").sorts == model_shape(LLAMA, "a").sorts
    with pytest.raises(UnreadableConfig, match=r"sliding_window: .*layer_types.*add the model's"):
        model_shape({**explicit, "sliding_window": 4096})


def test_an_explicit_null_is_not_a_default():
    """Mistral Small 3.1: no window, where the default of its family is 4096."""
    text = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    for config in (text, {"model_type": "mistral3", "text_config": text}):
        assert set(kinds(model_shape(config))) == {AttentionKind.FULL}
    del text["sliding_window"]
    assert set(kinds(model_shape(text))) == {AttentionKind.SLIDING_WINDOW}


@pytest.mark.parametrize(
    "family", [n for n, one in FAMILIES.items() if "num_hidden_layers" in one.defaults]
)
def test_defaults_are_those_of_the_family_s_own_class(family):
    """The oracle: the class that ``transformers`` reads a ``config.json`` of the family with."""
    config = pytest.importorskip("transformers").AutoConfig.for_model(family).to_dict()
    assert config["model_type"] == family
    assert model_shape(config, "a") == model_shape({"model_type": family}, "a")


def test_windows_need_their_size():
    types = ["sliding_attention", "full_attention"] * 40
    with pytest.raises(UnreadableConfig, match=r"sliding_window: expected .*, got nothing"):
        model_shape({**LLAMA, "layer_types": types})
    with pytest.raises(UnreadableConfig, match="no_rope_layers"):
        model_shape({"model_type": "llama4_text", "no_rope_layers": [1, 0]})
    both = ["sliding_attention", "chunked_attention"] * 40
    with pytest.raises(UnreadableConfig, match="chunks are Llama 4's"):
        model_shape({**LLAMA, "layer_types": both, "sliding_window": 4})


def test_a_config_is_an_object():
    with pytest.raises(UnreadableConfig, match="config: expected a JSON object, got list"):
        model_shape([])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_names_are_found_however_they_are_written(shape):
    written = f"Some-Owner/{shape.name.upper().replace('-', ' ')}"
    assert built_in(written) is shape


def test_a_model_of_another_size_or_version_is_not_offered():
    """Its plan would be wrong: "did you mean 'qwen3-8b'" was said of Qwen3-14B."""
    with pytest.raises(ShapeError, match=r"got gpt-oss; built-in: gpt-oss-20b, gpt-oss-120b$"):
        built_in("gpt-oss")
    with pytest.raises(ShapeError, match=r"did you mean 'gemma-3-27b'\?$"):
        built_in("gema 3 27b")
    for other in ("qwen3-14b", "deepseek-v3.2", "llama-3.3-70b", "gemma-4-27b", "minimax-m3", ""):
        with pytest.raises(ShapeError, match=r"pdconn plan --list has them") as refused:
            built_in(other)
        assert len(str(refused.value)) < 230
