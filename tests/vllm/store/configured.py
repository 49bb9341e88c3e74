"""vLLM's configuration, traits and rows of an engine, as far as a namespace depends on them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pdconn.protocol.compat import DRAFT, WEIGHTS
from pdconn.store.format.row import store_layout
from pdconn.vllm.identity.weights import engine_weights
from pdconn.vllm.store.row_keys import namespace_of
from registration.references import AttentionKind, GroupMemory, build_kv_cache_references
from tests.fakes.layouts import layout_memory

TRAITS = {"model": "tiny", "kv_dtype": "auto/float32", "block_content": "TRITON:"}


class Config(dict[str, Any]):
    """A ``transformers`` configuration, as far as it is looked at.

    There is no ``_commit_hash``: what ``transformers`` 4 set there, 5 never does.
    """

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


def config(model: Path | str, **changes: Any) -> Any:
    hf = Config({"hidden_size": 128, "rope_theta": 10_000.0, **changes.pop("hf", {})})
    model_config = SimpleNamespace(
        model=str(model), hf_config=hf, hf_text_config=hf, dtype="float32",
        quantization=None, revision=None, seed=0, max_model_len=2048, model_weights="",
        trust_remote_code=False, code_revision=None, quantization_config=None,
        multimodal_config=None,
    )  # fmt: skip
    vars(model_config).update(changes)
    load = SimpleNamespace(load_format="auto", model_loader_extra_config={}, download_dir=None)
    return SimpleNamespace(model_config=model_config, load_config=load, speculative_config=None)


def proven(config: Any, traits: dict[str, str]) -> dict[str, str]:
    """Traits with what proves the weights of an engine whose files were written before it began."""
    found = engine_weights(config, named=None, since=math.inf)
    names = {"model": WEIGHTS, "draft": DRAFT + WEIGHTS}
    return traits | {names[one]: weights.trait for one, weights in found.items()}


def named(config: Any, traits: dict[str, str], layout: Any, salt: str = "a") -> str:
    """The namespace of an engine."""
    return namespace_of(config, proven(config, traits), layout, salt=salt).name


def layout(token_nbytes: int = 64) -> Any:
    memory = layout_memory(
        "LBHNC", base=4096, num_blocks=4, layers=("a",), num_heads=2, block_tokens=16,
        token_nbytes=token_nbytes,
    )  # fmt: skip
    references = build_kv_cache_references([GroupMemory(AttentionKind.FULL, None, 16, memory)])
    return store_layout([references], 64)
