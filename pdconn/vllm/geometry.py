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

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheTensor,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pdconn.vllm.compressors import compress_ratio
from registration.references import (
    AttentionChunk,
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    LayerMemory,
    RegistrationError,
    build_kv_cache_references,
)
from transport import HOST, Device, Memory

if TYPE_CHECKING:
    import torch


_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")

_KINDS = {
    FullAttentionSpec: AttentionKind.FULL,
    SinkFullAttentionSpec: AttentionKind.FULL,
    MLAAttentionSpec: AttentionKind.FULL,
    SlidingWindowSpec: AttentionKind.SLIDING_WINDOW,
    SlidingWindowMLASpec: AttentionKind.SLIDING_WINDOW,
    ChunkedLocalAttentionSpec: AttentionKind.CHUNKED_LOCAL,
}


def kv_cache_references(
    config: KVCacheConfig,
    kv_caches: dict[str, torch.Tensor],
    *,
    layout: str,
    total_kv_heads: Callable[[str], int | None],
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
            spec = _layer_spec(specs, name)
            first_head = _first_head(spec, total_kv_heads(name), tp_rank, tp_size)
            chunk = _chunk(spec, layout, placed[name], first_head, opaque_tokens)
            layers.append(_layer(name, placed[name], kv_caches[name], config, chunk))
        spec = _layer_spec(specs, group.layer_names[0])
        kind, window = _kind(spec)
        ratio = 1
        if kind is AttentionKind.SLIDING_WINDOW:
            ratio = compress_ratio(modules or {}, group.layer_names, spec)
        groups.append(GroupMemory(kind, window, specs.block_size, tuple(layers), ratio))
    return build_kv_cache_references(groups)


def total_kv_heads(model: Any, layer: str) -> int | None:
    """KV heads of ``layer`` in the whole model; None when its config names several numbers.

    Where layers differ and ``transformers`` says so (Gemma 4), its config refuses to name one
    number, and vLLM knows every layer's.  A drafter's layers come after the model's.
    """
    if model.use_mla:
        return 1
    arch = model.model_arch_config
    if getattr(arch, "per_layer_overrides", None) is not None:
        index = next(int(part) for part in layer.split(".") if part.isdecimal())
        of_the_model = index < arch.total_num_hidden_layers
        return int(arch[index].total_num_kv_heads) if of_the_model else None
    total: int = model.get_total_num_kv_heads()
    names = [name for name in vars(model.hf_text_config) if name.endswith(_HEAD_COUNTS)]
    counts = {getattr(model.hf_text_config, name) for name in names} - {None}
    return total if counts <= {total} else None


def _layer_spec(spec: Any, name: str) -> Any:
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _kind(spec: Any) -> tuple[AttentionKind, int | None]:
    """What a layer keeps, and its window.  A kind of cache is served once it is known.

    Raises:
        RegistrationError: a spec that keeps something else than one row per token, or
            a state, which decode's recomputing of the last token would advance twice.
    """
    kind = _KINDS.get(type(spec))
    if kind is None:
        known = ", ".join(known.__name__ for known in _KINDS)
        raise RegistrationError(
            f"KV cache spec: expected one of {known}, got {type(spec).__name__}: pdconn "
            f"does not know yet how to hand such a cache over"
        )
    if kind is AttentionKind.SLIDING_WINDOW:
        return kind, spec.sliding_window
    if kind is AttentionKind.CHUNKED_LOCAL:
        return kind, spec.attention_chunk_size
    return kind, None


def _first_head(spec: Any, total_kv_heads: int | None, tp_rank: int, tp_size: int) -> int:
    """The model-wide index of this rank's first head; ranks with replicas share one.

    Raises:
        RegistrationError: which heads the rank holds cannot be determined.
    """
    heads: int = spec.num_heads
    if tp_size == 1:
        return 0
    if total_kv_heads is None or heads != max(1, total_kv_heads // tp_size):
        raise RegistrationError(
            f"KV heads: {heads} on a rank of {tp_size}, of {total_kv_heads or 'varying numbers'} "
            f"in the model: layers that differ in their heads need tensor_parallel_size 1"
        )
    shards = getattr(spec, "max_tp_shards", None) or total_kv_heads // heads
    return int(tp_rank * min(tp_size, shards) // tp_size * heads)


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
    chunk: AttentionChunk,
) -> LayerMemory:
    storage = view.untyped_storage()
    allocation = Memory(storage.data_ptr(), storage.nbytes(), _device(view))
    num_blocks = config.num_blocks_of(tensor)
    offset = tensor.offset + tensor.layers.index(name) * tensor.layer_stride
    made = LayerMemory(name, allocation, offset, tensor.block_stride, num_blocks, (chunk,))
    _check_view(made, view, chunk)
    return made


def _device(view: torch.Tensor) -> Device:
    if view.device.type == "cpu":
        return HOST
    if view.device.type != "cuda":
        raise RegistrationError(f"device: expected cpu or cuda, got {view.device.type}")
    return Device("cuda", view.device.index or 0)


def _check_view(layer: LayerMemory, view: torch.Tensor, chunk: AttentionChunk) -> None:
    """Hold our arithmetic against the strides of the engine's own view."""
    if view.shape[0] != layer.num_blocks:
        raise RegistrationError(
            f"{layer.layer}: expected {layer.num_blocks} blocks, got {view.shape[0]}: the "
            f"attention backend splits blocks; set --block-size to its kernel's block size"
        )
    size = view.element_size()
    expected = (layer.offset, layer.block_stride, chunk.head_stride)
    seen = (
        view.data_ptr() - layer.allocation.base,
        view.stride(0) * size if layer.num_blocks > 1 else layer.block_stride,
        view.stride(1) * size if chunk.num_heads > 1 else chunk.head_stride,
    )
    if expected != seen:
        raise RegistrationError(
            f"{layer.layer}: expected offset, block and head stride {expected}, got {seen}"
        )
