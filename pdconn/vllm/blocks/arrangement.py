"""How attention backends and state layers arrange the bytes of a page, by name.

Two engines may exchange a page if they give its bytes the same meaning, whatever the names of their
backends: FlashAttention and FlashInfer both store a token's key and value side by side.  A backend
is listed here only if vLLM's code, as named below, writes and reads exactly that; any other backend
has an arrangement of its own name, which is compatible with itself alone.

``key, value``: the cell of a token and head is its key, followed by its value.

    ``AttentionSpec`` calls this dense content: neither ``state_content_bytes`` nor
    ``num_head_slots`` are set.  ``do_kv_cache_update`` of FlashAttention, FlashInfer, Triton and
    Flex splits C at ``head_size`` and gives both halves to ``reshape_and_cache_flash``; the two
    backends for unequal sizes of key and value pass C whole to
    ``triton_reshape_and_cache_flash_diffkv``.

``latent``: the cell of a token is MLA's latent, followed by the rotated part of the key.

    ``MLAAttentionImpl.do_kv_cache_update`` calls ``concat_and_cache_mla``, and none of the
    backends below overrides it but two for CPUs, which write the same.

Other cells have no meaning by themselves, and move in larger pieces:

    CPU_ATTN       packs the keys and the values of a head's block for its instruction set
    DeepSeek V3.2's indexer, DeepSeek V4    a block's scales follow all its values
    NVFP4 (``nvfp4_split_data_scale``)      so do those of all keys, and those of all values
    ROCm's shuffled pages                   a block of keys is rearranged as a whole

B12X has a plane of keys and one of values, with all heads of a token in each cell
(``_kv_cache_views``), which can be divided by heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

_KEY_VALUE = frozenset(
    ("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN",
     "TRITON_ATTN_DIFFKV")
)  # fmt: skip
_LATENT = frozenset(
    ("AMX_MLA", "CPU_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE",
     "FLASHINFER_MLA_SPARSE_SM90", "FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA",
     "FLASH_ATTN_MLA_SPARSE", "TOKENSPEED_MLA", "TRITON_MLA")
)  # fmt: skip
_MLA = (MLAAttentionSpec, SlidingWindowMLASpec)
_PLAIN = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
_FP8_DS_MLA_NBYTES = 656
"""A token's row of FlashMLA sparse: values, their scales, the rotated part (its docstring)."""


class Unit(Enum):
    """The part of a page that can be moved by itself."""

    TOKEN = auto()
    """The cell of a token and head."""
    HEAD = auto()
    """A head's cells of a block, which are contiguous."""
    PLANES = auto()
    """A token's cells of all heads: keys in the first of two slots, values in the second."""
    PAGE = auto()
    """The page."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The arrangement of a layer's pages: equal names mean equal bytes."""

    name: str
    unit: Unit


def arrangement_of(spec: Any, layer: Any, layout: str) -> Arrangement:
    """The arrangement of an attention layer's pages.

    Args:
        spec: the layer's specification, as its backend has adjusted it.
        layer: the layer (of vLLM's static forward context); None if there is none.
        layout: the resolved layout's name.
    """
    backend = _backend_of(layer)
    if current_platform.is_rocm():
        backend = f"ROCm {backend}"
    plain = (
        spec.state_content_bytes is None
        and spec.num_head_slots is None
        and spec.kv_quant_mode in _PLAIN
    )
    if plain and backend in _KEY_VALUE:
        return Arrangement("key, value", Unit.TOKEN)
    if plain and backend in _LATENT:
        return Arrangement("latent", Unit.TOKEN)
    return _of_its_own(spec, layer, layout, backend, plain)


def _of_its_own(spec: Any, layer: Any, layout: str, backend: str, plain: bool) -> Arrangement:
    if backend == "CPU_ATTN":
        return Arrangement(f"CPU_ATTN:{layer.isa}", Unit.HEAD)
    name = backend if plain else f"{backend}:{spec.kv_quant_mode.name}"
    if spec.num_head_slots is not None:
        if backend == "B12X":
            return Arrangement(name, Unit.PLANES)
        return Arrangement(f"{name}:{layout[-3:]}", Unit.PAGE)
    if current_platform.is_cpu():
        return Arrangement(name, Unit.HEAD)
    if isinstance(spec, _MLA) and spec.state_content_bytes != _FP8_DS_MLA_NBYTES:
        return Arrangement(name, Unit.HEAD)
    return Arrangement(name, Unit.TOKEN)


def state_arrangement(spec: MambaSpec) -> str:
    """The properties of states that the sizes of their pieces do not determine.

    For each state its dtype and the dimensions that ranks do not divide; for a convolution's
    window, which is the first state, these are its tokens, speculative ones included.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    kind, conv_layout = spec.mamba_type.name, get_conv_state_layout()
    states = []
    for number, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        name = str(dtype).removeprefix("torch.")
        if number == 0 and kind != "LINEAR":
            tokens = shape[-1] if conv_layout == "DS" else prod(shape[:-1])
            states.append(f"{conv_layout} window of {tokens} {name}")
        else:
            states.append(" x ".join(map(str, shape[1:])) + f" {name}")
    return f"{kind}: {', '.join(states)}"


def _backend_of(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    if backend is None and hasattr(layer, "get_attn_backend"):
        backend = layer.get_attn_backend()
    return "unknown" if backend is None else str(backend.get_name())
