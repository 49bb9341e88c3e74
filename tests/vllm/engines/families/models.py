"""Small models of the families that people deploy, made here with random weights.

As in :mod:`pdconn.tools.lab.model`, scales are such that answers depend on the whole prompt and
differ from prompt to prompt: attention is broad, mixers add as much to the residual stream as
the current token's embedding, and logits spread over several nats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdconn.tools.lab.model import ModelSpec, _write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Family:
    """A small model, and what an engine of it needs on a CPU.

    Attributes:
        dtype: of weights and KV, as vLLM names it.
        block_tokens: ``--block-size``; vLLM may raise it for a hybrid.
        edges: further tokens at whose multiples something ends: larger blocks, windows, chunks.
        prefix_caching: whether it can be switched on here.
        tensor_parallel: ranks that it can have here.
        args: further arguments of an engine.
        coarse: whether kernels round by batch, or compute a prompt otherwise than steps; then an
            answer is right that lies near one alone of the same prompt, whole or in a step, and
            prompts are computed one after another.
        drifts: whether the KV of a prompt and a token more is not bit for bit that of the prompt;
            then an answer is right that lies near one after a hand-over without faults.
        fill: fills a weight by its name, if that needs values of its own.
    """

    name: str
    make: Callable[[], PreTrainedModel]
    dtype: str = "float32"
    block_tokens: int = 32
    edges: tuple[int, ...] = ()
    prefix_caching: bool = True
    tensor_parallel: tuple[int, ...] = (1,)
    args: tuple[str, ...] = ()
    coarse: bool = False
    drifts: bool = False
    fill: Callable[[str, Any], bool] = lambda _name, _weight: False

    def lengths(self) -> list[int]:
        """Lengths of prompts around blocks, windows and chunks, and others.

        A token more is handed over, so those just below an edge begin two below it.
        """
        sizes = {self.block_tokens, *self.edges, *(2 * size for size in self.edges), 512}
        around = {size + step for size in sizes for step in (-2, -1, 0, 1)}
        return sorted({1, 2, 5, 300, 700, 1500, *around})

    def write(self, directory: Path) -> Path:
        """Write the model."""
        import torch

        torch.manual_seed(3)
        model = self.make().to(getattr(torch, self.dtype))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if not self.fill(name, weight):
                    _fill(name, weight)
        model.save_pretrained(directory)
        _write_tokenizer(
            directory, ModelSpec(self.name, hidden=128, intermediate=256, heads=4, kv_heads=2)
        )
        generation = {"eos_token_id": 2, "pad_token_id": 0}
        (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        (directory / "config.json").write_text(
            json.dumps(config | _extra(self.name)), encoding="utf-8"
        )
        return directory


def _extra(name: str) -> dict[str, Any]:
    """Keys that vLLM reads and ``transformers`` no longer writes."""
    if name != "lfm2":
        return {}
    return {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "block_ff_dim": 256}


def _fill(name: str, weight: Any) -> None:
    if weight.dim() > 1 and "conv" in name:
        weight.normal_(0, 0.5)
    elif weight.dim() > 1:
        inputs = weight.shape[-2] if "experts" in name else weight.shape[-1]
        weight.normal_(0, 1.5 if "embed" in name else inputs**-0.5)
    if "lm_head" in name:
        weight.normal_(0, 4 * weight.shape[-1] ** -0.5)
        weight[:4] = 0  # special tokens are no answers


def _granite_4_h() -> PreTrainedModel:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **(_COMMON | {"max_position_embeddings": 16384}),
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        embedding_multiplier=1.0,
        attention_multiplier=0.2,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        position_embedding_type="rope",
    )
    return GraniteMoeHybridForCausalLM(config)


def _falcon_h1() -> PreTrainedModel:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_rms_norm=True,
    )
    return FalconH1ForCausalLM(config)


def _qwen3_next() -> PreTrainedModel:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )
    return Qwen3NextForCausalLM(config)


def _lfm2() -> PreTrainedModel:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        conv_L_cache=3,
        conv_bias=False,
        block_auto_adjust_ff_dim=False,
    )
    return Lfm2ForCausalLM(config)


def _mla() -> PreTrainedModel:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        first_k_dense_replace=3,
    )
    return DeepseekV2ForCausalLM(config)


def _llama_4() -> PreTrainedModel:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **_COMMON,
        intermediate_size_mlp=256,
        num_hidden_layers=4,
        no_rope_layers=[1, 1, 1, 0],
        attention_chunk_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=1,
        interleave_moe_layer_step=100,
    )
    return Llama4ForCausalLM(config)


def _gemma_4() -> PreTrainedModel:
    """Full-attention layers have fewer and larger heads than the others."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **_COMMON,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        attention_k_eq_v=True,
        sliding_window=64,
        vocab_size_per_layer_input=2048,
        hidden_size_per_layer_input=0,
    )
    return Gemma4ForCausalLM(config)


def _broad(name: str, weight: Any) -> bool:
    """Gemma 4 normalizes queries; so that attention is broad all the same."""
    if "q_norm" not in name:
        return False
    weight.fill_(1.5 * weight.shape[-1] ** -0.5)
    return True


def _gpt_oss() -> PreTrainedModel:
    """Windows of 128 tokens with sinks, experts, biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **_COMMON | {"intermediate_size": 128},
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    )
    return GptOssForCausalLM(config)


def _sinks_and_biases(name: str, weight: Any) -> bool:
    if "sinks" not in name and "bias" not in name:
        return False
    weight.normal_(0, 1 if "sinks" in name else 0.02)
    return True


GRANITE_4_H = Family("granite4h", _granite_4_h, tensor_parallel=(1, 2))
FALCON_H1 = Family("falcon_h1", _falcon_h1, edges=(64,))
QWEN3_NEXT = Family("qwen3_next", _qwen3_next, dtype="bfloat16", edges=(160,), coarse=True)
LFM2 = Family("lfm2", _lfm2, coarse=True)
MLA = Family(
    "mla",
    _mla,
    block_tokens=16,
    edges=(64,),
    prefix_caching=False,
    coarse=True,
    drifts=True,
    args=("--attention-backend", "CPU_MLA"),  # AMX_MLA, where a CPU has AMX, is for bfloat16 alone
)
LLAMA_4 = Family("llama4", _llama_4, edges=(64,))
GEMMA_4 = Family("gemma4", _gemma_4, edges=(64,), tensor_parallel=(1, 2), fill=_broad)
GPT_OSS = Family("gpt_oss", _gpt_oss, edges=(128,), fill=_sinks_and_biases)
