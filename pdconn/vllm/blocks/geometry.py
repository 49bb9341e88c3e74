"""vLLM's KV cache records as byte references.

Placement comes from ``KVCacheTensor`` (offset, layer stride, block stride), the
order of heads, tokens and content inside a page from the layout's name, whose
letters run from the outermost dimension to the innermost: L(ayer) B(lock) H(ead)
N(tokens) C(ontent, K and V fused).  Registered tensor views are used once more, to
check that this module and the engine agree on every stride.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor, MambaSpec

from pdconn.vllm.blocks.compressors import compress_ratio
from pdconn.vllm.blocks.heads import first_head
from pdconn.vllm.blocks.kinds import kind_of, layer_spec
from registration.references import (
    AttentionChunk,
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    LayerMemory,
    RegistrationError,
    StateChunk,
    build_kv_cache_references,
)
from transport import HOST, Device, Memory

if TYPE_CHECKING:
    import torch


def kv_cache_references(
    config: KVCacheConfig,
    kv_caches: dict[str, torch.Tensor],
    *,
    layout: str,
    total_kv_heads: Callable[[str], int | None],
    states: Callable[[Any], tuple[StateChunk, ...]],
    tp_rank: int,
    tp_size: int,
    opaque_tokens: bool,
    modules: Mapping[str, Any] | None = None,
) -> KVCacheReferences:
    """Describe the transferable groups of one worker.

    Args:
        config: the worker's KV cache configuration.
        kv_caches: the registered views, ``[B, H, N, C]`` by layer name.
        layout: the resolved layout's name.
        total_kv_heads: gives a layer's KV heads in the whole model, before tensor
            parallelism; None where they are not known.
        states: gives the chunks of a state layer's page from its specification
            (:func:`pdconn.vllm.blocks.states.state_chunks`).
        opaque_tokens: whether the backend packs tokens inside a head's block, as
            vLLM's CPU kernels do, so that a block can only move whole.
        modules: attention layers by name (vLLM's static forward context), which tell
            compressors; without them there are none.

    Raises:
        RegistrationError: memory that is laid out in a way this cannot describe,
            saying what was expected and what came.
    """
    placed = {name: tensor for tensor in config.kv_cache_tensors for name in tensor.layers}
    groups = []
    for group in config.transfer_groups:
        specs = group.kv_cache_spec
        layers = []
        for name in group.layer_names:
            if name not in placed:
                continue  # shares another layer's cache, and that one is described
            spec = layer_spec(specs, name)
            chunks: tuple[AttentionChunk | StateChunk, ...]
            if isinstance(spec, MambaSpec):
                chunks = states(spec)
            else:
                first = first_head(spec, total_kv_heads(name), tp_rank, tp_size)
                chunks = (_chunk(spec, layout, placed[name], first, opaque_tokens),)
            layers.append(_layer(name, placed[name], kv_caches[name], config, chunks))
        spec = layer_spec(specs, group.layer_names[0])
        kind, window = kind_of(spec)
        ratio = 1
        if kind is AttentionKind.SLIDING_WINDOW:
            ratio = compress_ratio(modules or {}, group.layer_names, spec)
        groups.append(GroupMemory(kind, window, specs.block_size, tuple(layers), ratio))
    return build_kv_cache_references(groups)


def _chunk(
    spec: Any, layout: str, tensor: KVCacheTensor, first_head: int, opaque_tokens: bool
) -> AttentionChunk:
    content: int = spec.state_content_size_bytes
    heads, rows = spec.num_heads, spec.num_states
    strides = page_strides(layout, tensor, heads, rows, content)
    # A head's block must be one piece before its tokens can be left packed.
    packed = opaque_tokens and strides["N"] == content
    if opaque_tokens and not packed:
        raise RegistrationError(
            f"layout: the CPU backend packs a head's tokens together, and {layout} does not"
        )
    return AttentionChunk(
        num_heads=heads,
        head_nbytes=rows * content,
        head_stride=strides["H"],
        token_stride=None if packed else strides["N"],
        token_nbytes=None if packed else content,
        first_head=first_head,
    )


def page_strides(
    layout: str, tensor: KVCacheTensor, heads: int, rows: int, content: int
) -> dict[str, int]:
    """Byte stride of each letter of ``layout``; L and B are as the tensor places them."""
    fixed = {"L": tensor.layer_stride, "B": tensor.block_stride}
    sizes = {"L": len(tensor.layers), "B": 1, "H": heads, "N": rows, "C": content}
    strides: dict[str, int] = {}
    dense = 1
    for letter in reversed(layout):
        strides[letter] = fixed.get(letter, dense)
        dense = strides[letter] * sizes[letter]
    return strides


def _layer(
    name: str,
    tensor: KVCacheTensor,
    view: torch.Tensor,
    config: KVCacheConfig,
    chunks: tuple[AttentionChunk | StateChunk, ...],
) -> LayerMemory:
    storage = view.untyped_storage()
    allocation = Memory(storage.data_ptr(), storage.nbytes(), _device(view))
    num_blocks = config.num_blocks_of(tensor)
    offset = tensor.offset + tensor.layers.index(name) * tensor.layer_stride
    made = LayerMemory(name, allocation, offset, tensor.block_stride, num_blocks, chunks)
    _check_view(made, view)
    return made


def _device(view: torch.Tensor) -> Device:
    if view.device.type == "cpu":
        return HOST
    if view.device.type != "cuda":
        raise RegistrationError(f"device: expected cpu or cuda, got {view.device.type}")
    return Device("cuda", view.device.index or 0)


def _check_view(layer: LayerMemory, view: torch.Tensor) -> None:
    """Hold our arithmetic against the strides of the engine's own view."""
    if view.shape[0] != layer.num_blocks:
        raise RegistrationError(
            f"{layer.layer}: expected {layer.num_blocks} blocks, got {view.shape[0]}: the "
            f"attention backend splits blocks; set --block-size to its kernel's block size"
        )
    size, stride = view.element_size(), layer.block_stride
    expected: list[int] = [layer.offset, stride]
    seen = [
        view.data_ptr() - layer.allocation.base,
        view.stride(0) * size if layer.num_blocks > 1 else stride,
    ]
    for chunk in layer.chunks:
        if isinstance(chunk, AttentionChunk) and chunk.num_heads > 1:
            expected.append(chunk.head_stride)
            seen.append(view.stride(1) * size)
    if expected != seen:
        raise RegistrationError(
            f"{layer.layer}: expected offset, block and head stride {expected}, got {seen}"
        )
