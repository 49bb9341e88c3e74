"""Configurations from which vLLM builds a model: the built-in shapes', and each family's.

What the cache depends on is as published; what only building needs (numbers of experts, names of
activations) is as small as vLLM takes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]
CONFIGS = Path(__file__).parents[1] / "configs"


def model(family: str, architecture: str, **keys: Any) -> Json:
    return {
        "model_type": family,
        "architectures": [architecture],
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
        **keys,
    }


def published(name: str, **keys: Any) -> Json:
    found: Json = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return {**found, **keys}


def _llama(hidden: int, heads: int, layers: int) -> Json:
    return model(
        "llama", "LlamaForCausalLM", hidden_size=hidden, num_attention_heads=heads,
        num_hidden_layers=layers, num_key_value_heads=8,
    )  # fmt: skip


def _qwen3(hidden: int, heads: int, layers: int) -> Json:
    return model(
        "qwen3", "Qwen3ForCausalLM", hidden_size=hidden, num_attention_heads=heads, head_dim=128,
        num_hidden_layers=layers, num_key_value_heads=8,
    )  # fmt: skip


EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 768, "norm_topk_prob": True}


def _qwen3_moe(hidden: int, heads: int, layers: int) -> Json:
    return model(
        "qwen3_moe", "Qwen3MoeForCausalLM", hidden_size=hidden, num_attention_heads=heads,
        head_dim=128, num_hidden_layers=layers, num_key_value_heads=4, num_experts=8,
        decoder_sparse_step=1, **EXPERTS,
    )  # fmt: skip


def _gpt_oss(layers: int) -> Json:
    return model(
        "gpt_oss", "GptOssForCausalLM", hidden_size=2880, num_attention_heads=64, head_dim=64,
        num_hidden_layers=layers, num_key_value_heads=8, sliding_window=128, num_local_experts=8,
        num_experts_per_tok=4,
    )  # fmt: skip


_LATENT: Json = {
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 3, "hidden_size": 7168, **EXPERTS,
}  # fmt: skip
_INDEXER = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
_DEEPSEEK_V3 = model("deepseek_v3", "DeepseekV3ForCausalLM", num_hidden_layers=61, **_LATENT)
_DEEPSEEK_V4 = model(
    "deepseek_v4", "DeepseekV4ForCausalLM", num_hidden_layers=43, hidden_size=4096, head_dim=512,
    qk_rope_head_dim=64, sliding_window=128, q_lora_rank=1024, o_lora_rank=1024, o_groups=8,
    index_topk=512, index_n_heads=64, index_head_dim=128, hc_mult=4, hc_eps=1e-6, rms_norm_eps=1e-6,
    hc_sinkhorn_iters=20, num_hash_layers=3, num_attention_heads=64, num_key_value_heads=1,
    n_routed_experts=8, n_shared_experts=1, swiglu_limit=10.0, hidden_act="silu",
    scoring_func="sqrtsoftplus", topk_method="noaux_tc", routed_scaling_factor=1.5,
    compress_rope_theta=160000, compress_ratios=[0, 0, *[4, 128] * 20, 4, 0], **EXPERTS,
    quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                         "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
)  # fmt: skip

SHAPES: dict[str, Json] = {
    "gemma-3-27b": model(
        "gemma3_text", "Gemma3ForCausalLM", hidden_size=5376, num_attention_heads=32, head_dim=128,
        num_hidden_layers=62, num_key_value_heads=16, sliding_window=1024,
    ),
    "gpt-oss-20b": _gpt_oss(24),
    "gpt-oss-120b": _gpt_oss(36),
    "llama-3.1-8b": _llama(4096, 32, 32),
    "llama-3.1-70b": _llama(8192, 64, 80),
    "llama-3.1-405b": _llama(16384, 128, 126),
    "qwen3-8b": _qwen3(4096, 32, 36),
    "qwen3-32b": _qwen3(5120, 64, 64),
    "qwen3-30b-a3b": _qwen3_moe(2048, 32, 48),
    "qwen3-235b-a22b": _qwen3_moe(4096, 64, 94),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v4": _DEEPSEEK_V4,
}  # fmt: skip
"""By the name of the built-in shape."""

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_GEMMA_4_TEXT = published("gemma-4-31b-nvfp4")["text_config"]
_GEMMA_3N_TEXT = published("gemma-3n-e4b")["text_config"]
_KV_8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_STEP: Json = {
    "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64, "head_dim": 128,
    "num_attention_groups": 8, "sliding_window": 512, "max_position_embeddings": 65536,
    "layer_types": ["sliding_attention" if n % 4 else "full_attention" for n in range(48)],
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96,
                                "num_attention_groups": 8, "head_dim": 128},
}  # fmt: skip

CASES: dict[str, Json] = {
    "minimax-m2": published(
        "minimax-m2.7", architectures=["MiniMaxM2ForCausalLM"],
        quantization_config=_FP8, num_local_experts=8,
    ),
    "mimo-v2-flash": published(
        "mimo-v2-flash", architectures=["MiMoV2FlashForCausalLM"], quantization_config=_FP8,
        n_routed_experts=8,
    ),
    "mimo-7b": published("mimo-7b", architectures=["MiMoForCausalLM"]),
    "glm-4.7-flash": published(
        "glm-4.7-flash", architectures=["Glm4MoeLiteForCausalLM"], **EXPERTS, n_group=1,
        topk_group=1, first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=1,
    ),
    "gemma-4": {**_GEMMA_4_TEXT, "architectures": ["Gemma4ForCausalLM"],
                "torch_dtype": "bfloat16", "hidden_size_per_layer_input": 0},
    "gemma-3n": {**_GEMMA_3N_TEXT, "architectures": ["Gemma3nForCausalLM"],
                 "torch_dtype": "bfloat16"},
    "deepseek-v3.2": model(
        "deepseek_v32", "DeepseekV32ForCausalLM", num_hidden_layers=61, **_LATENT, **_INDEXER
    ),
    "glm-5": model(
        "glm_moe_dsa", "GlmMoeDsaForCausalLM", num_hidden_layers=78,
        **{**_LATENT, **_INDEXER, "hidden_size": 6144, "num_attention_heads": 64,
           "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256},
    ),
    "glm-5.2": model(
        "glm_moe_dsa", "GlmMoeDsaForCausalLM", num_hidden_layers=12, **_LATENT, **_INDEXER,
        index_topk_freq=4, index_skip_topk_offset=3, index_share_for_mtp_iteration=True,
        indexer_types=["full"] * 3 + (["shared"] * 3 + ["full"]) * 2 + ["shared"],
    ),
    "kimi-k2": {**_DEEPSEEK_V3, "model_type": "kimi_k2"},
    "step-3.5": model("step3p5", "Step3p5ForCausalLM", **_STEP),
    "step-3.5, other heads": model("step3p5", "Step3p5ForCausalLM", **_STEP | {
        "attention_other_setting": {"attention_type": "sliding_attention", "head_dim": 64,
                                    "num_attention_heads": 96, "num_attention_groups": 16}}),
    "afmoe": model(
        "afmoe", "AfmoeForCausalLM", num_hidden_layers=12, num_key_value_heads=4, num_experts=8,
        score_func="sigmoid", route_norm=True, n_group=1, topk_group=1, load_balance_coeff=0.001,
    ),
    "cohere2": model("cohere2", "Cohere2ForCausalLM", num_hidden_layers=8),
    "exaone4": model("exaone4", "Exaone4ForCausalLM", num_hidden_layers=8),
    "exaone_moe": model("exaone_moe", "ExaoneMoEForCausalLM", num_hidden_layers=8),
    "gemma": model("gemma", "GemmaForCausalLM", num_hidden_layers=4),
    "gemma2": model("gemma2", "Gemma2ForCausalLM", num_hidden_layers=8),
    "glm4": model("glm4", "Glm4ForCausalLM", num_hidden_layers=4),
    "granite": model("granite", "GraniteForCausalLM", num_hidden_layers=4),
    "granitemoe": model("granitemoe", "GraniteMoeForCausalLM", num_hidden_layers=4),
    "cohere": model("cohere", "CohereForCausalLM", num_hidden_layers=4),
    "ernie4_5": model("ernie4_5", "Ernie4_5ForCausalLM", num_hidden_layers=4),
    "ernie4_5_moe": model("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", num_hidden_layers=4),
    "mistral": model("mistral", "MistralForCausalLM", num_hidden_layers=4),
    "ministral3": model("ministral3", "Ministral3ForCausalLM", num_hidden_layers=4),
    "mixtral": model("mixtral", "MixtralForCausalLM", num_hidden_layers=4),
    "olmoe": model("olmoe", "OlmoeForCausalLM", num_hidden_layers=4),
    "phi3": model("phi3", "Phi3ForCausalLM", num_hidden_layers=4, sliding_window=2047),
    "phimoe": model("phimoe", "PhiMoEForCausalLM", num_hidden_layers=4),
    "qwen2": model("qwen2", "Qwen2ForCausalLM", num_hidden_layers=4),
    "qwen2, windows": model("qwen2", "Qwen2ForCausalLM", num_hidden_layers=4,
                             use_sliding_window=True, max_window_layers=0),
    "qwen2_moe": model("qwen2_moe", "Qwen2MoeForCausalLM", num_hidden_layers=4),
    "stablelm": model("stablelm", "StableLmForCausalLM", num_hidden_layers=4),
    "llama, named layers": {**_llama(4096, 32, 4), "sliding_window": 512,
                            "layer_types": ["sliding_attention", "full_attention"] * 2},
    "llama, all full": {**_llama(4096, 32, 4), "sliding_window": 512,
                        "layer_types": ["full_attention"] * 4},
    "llama, a window": {**_llama(4096, 32, 4), "sliding_window": 512},
    "llama, FP8 of compressed-tensors": {
        **_llama(4096, 32, 4),
        "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": _KV_8,
                                "format": "dense", "config_groups": {}, "ignore": []}},
    "llama, FP8 of ModelOpt": {
        **_llama(4096, 32, 4),
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8",
                                "kv_cache_scheme": _KV_8, "ignore": []}},
    "deepseek-v3, FP8 of ModelOpt": {
        **_DEEPSEEK_V3, "num_hidden_layers": 4,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8",
                                "kv_cache_scheme": _KV_8, "ignore": []}},
    "deepseek-v3, FP8 of compressed-tensors": {
        **_DEEPSEEK_V3, "num_hidden_layers": 4,
        "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": _KV_8,
                                "format": "dense", "config_groups": {}, "ignore": []}},
}  # fmt: skip
"""Of families and of ways to say what is cached."""

MINIMAX_M3 = published(
    "minimax-m3", architectures=["MiniMaxM3SparseForCausalLM"], vocab_size=32000, rms_norm_eps=1e-6,
    rope_theta=1e6, hidden_act="swigluoai", swiglu_beta=1.0, num_local_experts=8,
)  # fmt: skip
"""Refused by its name; its indexer is why."""
