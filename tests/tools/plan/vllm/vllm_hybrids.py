"""Published hybrids as vLLM's own code sees them: states, pages, blocks, groups, layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

# Torch warns of deprecations in what these import: importorskip ignores warnings.
pytest.importorskip("vllm.v1.core.kv_cache_utils")

import torch
import vllm.config  # noqa: F401 - before its parts, which import each other
from transformers import AutoConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.platforms.interface import Platform
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Sorts
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


def _model(module: str, name: str) -> Any:
    return getattr(pytest.importorskip(module), name)


def _mamba(family: str, name: str) -> Any:
    return _model(f"vllm.model_executor.models.{family}", name)


_GRANITE = _mamba("granitemoehybrid", "GraniteMoeHybridForCausalLM")
_QWEN3_NEXT = _mamba("qwen3_next", "Qwen3NextForCausalLM")

# Bamba was taken out of vLLM 0.23, and its configuration has Granite's names.  Qwen3.5 needs
# torchvision to be imported, and computes its states as Qwen3-Next does.
MODELS: dict[str, tuple[Any, str]] = {
    "bamba": (_GRANITE, "MAMBA2"),
    "falcon_h1": (_mamba("falcon_h1", "FalconH1ForCausalLM"), "MAMBA2"),
    "granitemoehybrid": (_GRANITE, "MAMBA2"),
    "jamba": (_mamba("jamba", "JambaForCausalLM"), "MAMBA1"),
    "kimi_linear": (_model("vllm.models.kimi_k3", "KimiLinearForCausalLM"), "GDN_ATTN"),
    "lfm2": (_mamba("lfm2", "Lfm2ForCausalLM"), "SHORT_CONV"),
    "lfm2_moe": (_mamba("lfm2_moe", "Lfm2MoeForCausalLM"), "SHORT_CONV"),
    "nemotron_h": (_mamba("nemotron_h", "NemotronHForCausalLM"), "MAMBA2"),
    "qwen3_5": (_QWEN3_NEXT, "GDN_ATTN"),
    "qwen3_5_moe": (_QWEN3_NEXT, "GDN_ATTN"),
    "qwen3_next": (_QWEN3_NEXT, "GDN_ATTN"),
}
_OF_DTYPES = ("NemotronHForCausalLM", "Qwen3_5ForConditionalGeneration",
              "Qwen3_5MoeForConditionalGeneration")  # fmt: skip


class Backend:
    """Attention like FlashAttention's: kernel blocks of any multiple of 16 tokens."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]

    @staticmethod
    def customize_spec(spec: Any) -> Any:
        return spec


@dataclass
class Theirs:
    """One model on ``tp`` ranks, in vLLM's terms."""

    published: dict[str, Any]
    tp: int
    block: int = 16
    config: Any = field(init=False)
    text: Any = field(init=False)

    def __post_init__(self) -> None:
        given = {key: value for key, value in self.published.items() if key != "model_type"}
        family = self.published["model_type"]
        # vLLM reads Kimi Linear with a class of its own.
        self.config = (
            KimiLinearConfig(**given)
            if family == "kimi_linear"
            else AutoConfig.for_model(family, **given)
        )
        self.text = self.config.get_text_config()

    @property
    def is_mla(self) -> bool:
        return self.published["model_type"] == "kimi_linear"

    @property
    def heads(self) -> int:
        return 1 if self.is_mla else max(1, self.text.num_key_value_heads // self.tp)

    @property
    def head_dim(self) -> int:
        if self.is_mla:
            return int(self.text.kv_lora_rank + self.text.qk_rope_head_dim)
        given = getattr(self.text, "head_dim", None)
        return int(given or self.text.hidden_size // self.text.num_attention_heads)

    def engine(self) -> Any:
        """As much of a ``VllmConfig`` as sizes of states and blocks depend on."""
        cache = SimpleNamespace(
            cache_dtype="auto", block_size=self.block, mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto", mamba_cache_mode="align", mamba_page_size_padded=None,
            mamba_block_size=None, use_replayssm=False, use_kda_recoverssm=False,
        )  # fmt: skip
        model = SimpleNamespace(
            dtype=torch.bfloat16, use_mla=self.is_mla, architecture="", hf_config=self.config,
            hf_text_config=self.text, get_num_kv_heads=lambda parallel: self.heads,
            get_head_size=lambda: self.head_dim,
        )  # fmt: skip
        made = SimpleNamespace(
            cache_config=cache,
            model_config=model,
            parallel_config=SimpleNamespace(tensor_parallel_size=self.tp),
            speculative_config=None,
            num_speculative_tokens=0,
        )
        architecture = self.published["architectures"][0]
        if architecture in _OF_DTYPES:
            MODELS_CONFIG_MAP[architecture].verify_and_update_config(made)
        return made

    def state(self, engine: Any) -> MambaSpec:
        """What one layer's state is; its block size follows when blocks are aligned."""
        model, sort = MODELS[self.published["model_type"]]
        return MambaSpec(
            block_size=engine.cache_config.mamba_block_size or -1,
            shapes=model.get_mamba_state_shape_from_config(engine),
            dtypes=model.get_mamba_state_dtype_from_config(engine),
            mamba_type=Sorts[sort],
            mamba_cache_mode="align",
            page_size_padded=engine.cache_config.mamba_page_size_padded,
        )

    def aligned(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The engine after its attention blocks and the pages of states were made to fit."""
        engine = self.engine()
        model, _ = MODELS[self.published["model_type"]]
        monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *_, **__: (model, ""))
        monkeypatch.setattr("vllm.config.vllm.set_current_vllm_config", lambda _: _Nothing())
        monkeypatch.setattr(Platform, "_find_non_ssm_backends", lambda *_: [Backend])
        Platform._align_hybrid_block_size(engine, Backend)  # type: ignore[arg-type]
        return engine

    def kinds(self) -> list[set[str]]:
        """Of each layer whether it keeps rows of attention, and a state."""
        if self.is_mla:
            layers = range(self.text.num_hidden_layers)
            return [{"state"} if self.text.is_kda_layer(n) else {"attn"} for n in layers]
        names = {"linear_attention": {"state"}, "conv": {"state"}, "full_attention": {"attn"},
                 "hybrid": {"state", "attn"}}  # fmt: skip
        listed = getattr(self.text, "layers_block_type", None) or self.text.layer_types
        named = {**names, "mamba": {"state"}, "attention": {"attn"}}
        return [named.get(name, set()) for name in listed]

    def specs(self, engine: Any) -> dict[str, Any]:
        """A spec for every layer that keeps something, by the names that ours have."""
        made = {}
        for layer, kinds in enumerate(self.kinds()):
            for kind in sorted(kinds):
                spec = self.state(engine) if kind == "state" else self.attention(engine)
                made[f"layers.{layer}.{kind}"] = spec
        return made

    def attention(self, engine: Any) -> Any:
        kind = MLAAttentionSpec if self.is_mla else FullAttentionSpec
        size = engine.cache_config.block_size
        return kind(
            block_size=size, num_kv_heads=self.heads, head_size=self.head_dim,
            dtype=torch.bfloat16,
        )  # fmt: skip


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def gemma_4_specs(published: dict[str, Any], tp: int, block: int = 16) -> dict[str, Any]:
    """Gemma 4's layers, each with the heads that its configuration gives it."""
    text = AutoConfig.for_model("gemma4", text_config=dict(published["text_config"]))
    text = text.get_text_config()
    made: dict[str, Any] = {}
    for layer in range(text.num_hidden_layers - text.num_kv_shared_layers):
        mine = text.per_layer_config[layer]
        common = {
            "block_size": block,
            "num_kv_heads": max(1, mine.num_key_value_heads // tp),
            "head_size": mine.head_dim,
            "dtype": torch.bfloat16,
        }
        if text.layer_types[layer] == "full_attention":
            made[f"layers.{layer}.attn"] = FullAttentionSpec(**common)
        else:
            window = text.sliding_window
            made[f"layers.{layer}.attn"] = SlidingWindowSpec(**common, sliding_window=window)
    return made


def groups_of(
    specs: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, list[str]]]:
    """The block size and the layers of each group that vLLM makes, sorted."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout]),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="any")),
        speculative_config=None,
    )
    for name in ("get_hisparse_kv_cache_groups", "_annotate_eagle_groups",
                 "_warn_if_unannotated_eagle_mamba"):  # fmt: skip
        monkeypatch.setattr(kv_cache_utils, name, lambda *_, **__: None)
    made = kv_cache_utils.get_kv_cache_groups(config, specs)
    return sorted((group.kv_cache_spec.block_size, sorted(group.layer_names)) for group in made)


def takes_layout(specs: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether vLLM resolves the layout for these layers, and can lay them out in it."""
    from vllm.v1.attention.backends import utils

    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=None))
    every = [[one.name for one in KVCacheLayout]]
    try:
        utils.resolve_kv_cache_layout(config, every, specs.values())
        groups_of(specs, layout, monkeypatch)
    except (ValueError, NotImplementedError):
        return False
    return True
