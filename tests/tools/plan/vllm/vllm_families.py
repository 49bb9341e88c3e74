"""Further configurations from which vLLM builds a model: one for each family that pdconn lists.

With ``vllm_models`` they are all that is compared.  A family that vLLM cannot build stands in
``NOT_BUILT``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.tools.plan.published import GEMMA_4, PUBLISHED
from tests.tools.plan.vllm.vllm_models import CASES, EXPERTS, SHAPES, Json, model, published

_GQA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
_DENSE = {**_GQA, "intermediate_size": 14336, "hidden_act": "silu", "rms_norm_eps": 1e-5,
          "tie_word_embeddings": False}  # fmt: skip
_HALF = ["sliding_attention", "full_attention"] * 4


def _nested(outer: str, inner: str, architecture: str, text: Json, **more: Any) -> dict[str, Json]:
    """Two cases: the language model's level names its own family, or none."""
    config = model(outer, f"{architecture}ForConditionalGeneration", text_config=text, **more)
    return {outer: config, inner: {**config, "text_config": {**text, "model_type": inner}}}


def _seeing(config: Json, **text: Any) -> Json:
    """Gemma 4 is built with a small tower alone."""
    return {**config, "text_config": {**config["text_config"], **text},
            "vision_config": {"num_hidden_layers": 1}}  # fmt: skip


def _with(name: str, **more: Any) -> Json:
    return {**PUBLISHED[name], **more}


_LAYERS = {"num_hidden_layers": 8}
_GEMMA_4 = GEMMA_4["google/gemma-4-26B-A4B-it"]
_KIMI_LINEAR = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
_QWEN3_VL_MOE = {**_LAYERS, "num_experts": 8, **EXPERTS}
_QWEN_2_VL = {**_GQA, **_LAYERS, "intermediate_size": 18944, "use_sliding_window": False,
              "sliding_window": 32768, "max_window_layers": 28}  # fmt: skip
_KIMI = {"mla_use_nope": True, "first_k_dense_replace": 1, "num_experts": 8,
         "num_experts_per_token": 4, "num_shared_experts": 1,
         "moe_intermediate_size": 1024}  # fmt: skip

DECODERS: dict[str, Json] = {
    "apertus": model("apertus", "ApertusForCausalLM", **_LAYERS),
    "arcee": model("arcee", "ArceeForCausalLM", **_LAYERS),
    "deepseek_v2": model("deepseek_v2", "DeepseekV2ForCausalLM", n_group=1, topk_group=1,
                         **_LAYERS),
    "glm": model("glm", "GlmForCausalLM", pad_token_id=0, **_LAYERS),
    "glm4_moe": model(
        "glm4_moe", "Glm4MoeForCausalLM", hidden_size=5120, num_attention_heads=96,
        num_key_value_heads=8, head_dim=128, n_routed_experts=8, **EXPERTS, **_LAYERS,
    ),
    "hunyuan_v1_dense": model("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", head_dim=128,
                              **_LAYERS),
    "hunyuan_v1_dense, windows": model(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", head_dim=128, sliding_window=512,
        layer_types=_HALF, **_LAYERS,
    ),
    "internlm2": model("internlm2", "InternLM2ForCausalLM", rope_theta=1e6, bias=False,
                       max_position_embeddings=32768, **_DENSE, **_LAYERS),
    "internlm3": model("internlm3", "InternLM3ForCausalLM", head_dim=128, **_DENSE, **_LAYERS),
    "llama4_text, alone": model("llama4_text", "Llama4ForCausalLM", num_local_experts=4, **_LAYERS),
    "mimo_v2": published(
        "mimo-v2-flash", model_type="mimo_v2", architectures=["MiMoV2ForCausalLM"],
        quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"},
        n_routed_experts=8,
    ),
    "ministral": model("ministral", "MinistralForCausalLM", head_dim=128, **_LAYERS),
    "nemotron": model("nemotron", "NemotronForCausalLM", num_key_value_heads=8, **_LAYERS),
    "olmo2": model("olmo2", "Olmo2ForCausalLM", **_LAYERS),
    "olmo3": model("olmo3", "Olmo3ForCausalLM", **_LAYERS),
    "seed_oss": model("seed_oss", "SeedOssForCausalLM", **_LAYERS),
    "smollm3": model("smollm3", "SmolLM3ForCausalLM", pad_token_id=0, **_LAYERS),
    "smollm3, windows": model("smollm3", "SmolLM3ForCausalLM", pad_token_id=0, sliding_window=512,
                              layer_types=_HALF, **_LAYERS),
    "starcoder2": model("starcoder2", "Starcoder2ForCausalLM", **_LAYERS),
}  # fmt: skip

NESTED: dict[str, Json] = {
    **_nested("gemma3", "gemma3_text", "Gemma3", _LAYERS),
    "gemma3, a pattern of transformers": model(
        "gemma3", "Gemma3ForConditionalGeneration",
        text_config={**_LAYERS, "_sliding_window_pattern": 3},
    ),
    "gemma3n": model("gemma3n", "Gemma3nForConditionalGeneration",
                     text_config={"num_hidden_layers": 20}),
    **_nested("gemma4_unified", "gemma4_unified_text", "Gemma4Unified", _LAYERS,
              vision_config={}, audio_config={}),
    "gemma4": _seeing({**_GEMMA_4, "text_config": {
        key: value for key, value in _GEMMA_4["text_config"].items() if key != "model_type"}}),
    **{name: _seeing(config) for name, config in GEMMA_4.items()},
    "gemma4, by layer": _seeing(_GEMMA_4, per_layer_config={
        str(n): {"head_dim": 128, "num_key_value_heads": 4} for n in range(5, 30, 6)}),
    "gemma4, nothing by layer": _seeing(_GEMMA_4, per_layer_config=None),
    **_nested("llama4", "llama4_text", "Llama4", {**_LAYERS, "num_local_experts": 4}),
    **_nested("qwen2_vl", "qwen2_vl_text", "Qwen2VL", _LAYERS),
    **_nested("qwen2_5_vl", "qwen2_5_vl_text", "Qwen2_5_VL", _LAYERS),
    "qwen2_vl, one level": model("qwen2_vl", "Qwen2VLForConditionalGeneration", **_QWEN_2_VL),
    "qwen2_5_vl, two of keys": model(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", text_config=_LAYERS,
        **{**_QWEN_2_VL, "num_key_value_heads": 2, "use_sliding_window": True},
    ),
    **_nested("qwen3_vl", "qwen3_vl_text", "Qwen3VL", _LAYERS),
    "qwen3_vl, two of keys": model(
        "qwen3_vl", "Qwen3VLForConditionalGeneration", text_config=_LAYERS,
        head_dim=64, num_key_value_heads=2, sliding_window=99,
    ),
    **_nested("qwen3_vl_moe", "qwen3_vl_moe_text", "Qwen3VLMoe", _QWEN3_VL_MOE),
    **_nested("qwen3_5", "qwen3_5_text", "Qwen3_5", {**_LAYERS, "mamba_ssm_dtype": "float32"}),
    **_nested("qwen3_5_moe", "qwen3_5_moe_text", "Qwen3_5Moe", _LAYERS),
}  # fmt: skip
"""Language models inside another configuration.  The outer level decides nothing of them."""

_NEEDED: dict[str, Json] = {
    "LiquidAI/LFM2-1.2B": {"block_dim": 2048, "block_ff_dim": 12288},
    _KIMI_LINEAR: _KIMI,
}
"""What published files have besides, and only building needs."""

HYBRIDS: dict[str, Json] = {
    **{name: _with(name, **_NEEDED.get(name, {}))
       for name, config in PUBLISHED.items() if config["model_type"] != "bamba"},
    "lfm2_moe, channels": _with("LiquidAI/LFM2-8B-A1B", conv_dim=1024),
    "kimi_linear, fewer linear": _with(_KIMI_LINEAR, **_KIMI, linear_attn_config={
        **PUBLISHED[_KIMI_LINEAR]["linear_attn_config"], "kda_layers": [1, 2, 3]}),
}  # fmt: skip
"""Models whose layers keep states."""

COMPARED: dict[str, Json] = {**SHAPES, **CASES, **DECODERS, **NESTED, **HYBRIDS}
"""Every configuration that is compared, by its name."""


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """A family that vLLM 0.32 cannot build.

    Attributes:
        config: what is tried.
        error: the type of the exception, and words of it.
    """

    config: Json
    error: tuple[str, str]


NOT_BUILT: dict[str, NotBuilt] = {
    # vLLM took its class out in 0.23, and transformers' has linear attention of its own.
    "bamba": NotBuilt(
        PUBLISHED["ibm-ai-platform/Bamba-9B-v2"],
        ("ValueError", "does not dispatch through the Transformers attention interface"),
    ),
    # vLLM's tower asks for keys that transformers' class of its configuration renames.  The
    # language model inside is step3p5, which is compared.
    "step3p7": NotBuilt(
        model("step3p7", "Step3p7ForConditionalGeneration", text_config=_LAYERS),
        ("AttributeError", "'Step3p7VisionConfig' object has no attribute"),
    ),
}
