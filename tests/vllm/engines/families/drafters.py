"""A small target, and drafters that draft what it will say; made here.

A drafter with random weights drafts nothing that is accepted, and nobody would see whether its KV
came along.  These draft by the target's own layer: the target has one, on embeddings of equal
size::

    draft model   the target, with each KV head twice: other heads, the same answers
    EAGLE, MTP    the layer over the embeddings of the tokens after the first: answers differ
                  only by what the first token of the prompt adds
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.vllm.engines.families.models import _COMMON, Family

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

DRAFTED = 3
"""Tokens that are drafted at a time."""

_SIZE = 1.5
_KV_HEADS = 2
_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": _KV_HEADS,
}


def _llama() -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, **_SHAPE, head_dim=32))


def _mimo() -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_COMMON, **_SHAPE))


LLAMA = Family("llama", _llama, tensor_parallel=(1, 2))
MIMO = Family("mimo", _mimo)


def write_target(directory: Path) -> Path:
    """A Llama."""
    LLAMA.write(directory)
    _save(directory, _of_equal_size(_weights(directory)))
    return directory


def write_draft_model(target: Path, directory: Path) -> Path:
    """The target with twice the KV heads."""
    weights = _weights(target)
    for name in ("k_proj", "v_proj"):
        key = f"model.layers.0.self_attn.{name}.weight"
        heads = weights[key].unflatten(0, (_KV_HEADS, -1))
        weights[key] = heads.repeat_interleave(2, 0).flatten(0, 1).contiguous()
    _copy(target, directory, num_key_value_heads=2 * _KV_HEADS)
    return _save(directory, weights)


def write_eagle(target: Path, directory: Path) -> Path:
    """An EAGLE head, which has no norm before attention."""
    import torch

    weights = {
        name.removeprefix("model."): weight
        for name, weight in _weights(target).items()
        if ".layers." in name and "input_layernorm" not in name
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        weights[f"layers.0.self_attn.{name}.weight"] /= _SIZE
    eye = torch.eye(_COMMON["hidden_size"])
    weights["fc.weight"] = torch.cat((eye, torch.zeros_like(eye)), dim=1)
    _copy(target, directory)
    return _save(directory, weights)


def write_mtp(directory: Path) -> Path:
    """A MiMo with an MTP module."""
    import torch

    MIMO.write(directory)
    weights = _of_equal_size(_weights(directory))
    module = {
        name.replace("model.layers.", "model.mtp_layers."): weight.clone()
        for name, weight in weights.items()
        if ".layers." in name
    }
    size = _COMMON["hidden_size"]
    for name, value in (("token", _SIZE), ("hidden", 1.0), ("final", 1.0)):
        module[f"model.mtp_layers.0.{name}_layernorm.weight"] = torch.full((size,), value)
    eye = torch.eye(size)
    projection = torch.cat((torch.zeros_like(eye), eye), dim=1)
    module["model.mtp_layers.0.input_proj.weight"] = projection
    config = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    _change(directory, config)
    return _save(directory, weights | module)


def drafting(family: Family, **speculation: Any) -> Family:
    """The family with ``--speculative-config``."""
    config = json.dumps({"num_speculative_tokens": DRAFTED, **speculation})
    return replace(family, args=(*family.args, "--speculative-config", config))


def _of_equal_size(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    embedding = weights["model.embed_tokens.weight"]
    mean = embedding.pow(2).mean(-1, keepdim=True).sqrt()
    return weights | {"model.embed_tokens.weight": embedding / mean * _SIZE}


def _weights(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _save(directory: Path, weights: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _copy(target: Path, directory: Path, **changes: Any) -> None:
    directory.mkdir()
    for file in target.glob("*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    _change(directory, changes)


def _change(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8"
    )
