"""A small model like gpt-oss: windows of 128 tokens with sinks, experts, attention biases."""

from __future__ import annotations

import json
from pathlib import Path

from pdconn.lab.model import ModelSpec, _write_tokenizer

WINDOW = 128


def write_gpt_oss(directory: Path) -> Path:
    """Random weights; attention is broad and answers vary, as in ``pdconn.lab.model``."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=128, num_hidden_layers=4,
        num_local_experts=4, num_experts_per_tok=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, sliding_window=WINDOW, max_position_embeddings=8192,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        dtype="float32",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
        },
    )  # fmt: skip
    torch.manual_seed(3)
    model = GptOssForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "sinks" in name:
                weight.normal_(0, 1)
            elif "bias" in name:
                weight.normal_(0, 0.02)
            elif weight.dim() > 1:
                inputs = weight.shape[-2] if "experts" in name else weight.shape[-1]
                weight.normal_(0, 1.5 if "embed" in name else inputs**-0.5)
            if "lm_head" in name:
                weight.normal_(0, 4 * weight.shape[-1] ** -0.5)
                weight[:4] = 0  # special tokens are no answers
    model.save_pretrained(directory)
    _write_tokenizer(directory, ModelSpec("oss", hidden=128, intermediate=128, heads=4, kv_heads=2))
    generation = {"eos_token_id": 2, "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory
