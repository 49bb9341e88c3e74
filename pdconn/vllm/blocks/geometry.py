"""vLLM's KV cache records as byte references.

Placement comes from ``KVCacheTensor`` (offset, layer stride, block stride), the order of heads,
tokens and content inside a page from the layout's name, whose letters run from the outermost
dimension to the innermost: L(ayer) B(lock) H(ead) N(tokens) C(ontent, K and V fused).  The result
is checked against the strides of the registered tensor views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from pdconn.vllm.blocks.arrangement import Unit
from pdconn.vllm.blocks.compressors import compress_ratio
from pdconn.vllm.blocks.heads import first_head
from pdconn.vllm.blocks.kinds import is_state, kind_of, layer_spec
from pdconn.vllm.blocks.pages import Pages
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
    units: Callable[[str, Any], Unit],
    tp_rank: int,
    tp_size: int,
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
            (:func:`pdconn.vllm.blocks.recurrent_states.state_chunks`).
        units: the part of an attention layer's page that moves by itself, from the layer's name and
            specification (:func:`pdconn.vllm.blocks.arrangement.arrangement_of`).
        modules: attention layers by name (vLLM's static forward context), by which compressors are
            identified; without them there are none.

    Returns:
        References to the engine's blocks, or to kernel blocks where a split block differs from an
        unsplit one, as ``block_tokens`` of a group shows.

    Raises:
        RegistrationError: memory that cannot be described, with the expected and the seen value.
    """
    placed = {name: tensor for tensor in config.kv_cache_tensors for name in tensor.layers}
    groups = []
    for group in config.transfer_groups:
        pages = []
        for name in group.layer_names:
            if name in placed:  # otherwise it shares another layer's cache, which is described
                spec, tensor = layer_spec(group.kv_cache_spec, name), placed[name]
                blocks = config.num_blocks_of(tensor)
                pages.append(Pages(name, spec, layout, tensor, blocks, kv_caches[name]))
        parts = _parts(pages, units)
        layers = []
        for page in pages:
            page.check_view()
            if is_state(page.spec):
                layers.append(_layer(page, states(page.spec), 1))
            else:
                first = first_head(page.spec, total_kv_heads(page.layer), tp_rank, tp_size)
                unit = units(page.layer, page.spec)
                layers.append(_layer(page, page.block_chunks(unit, first, parts), parts))
        groups.append(_group(group, tuple(layers), parts, modules or {}))
    return build_kv_cache_references(groups)


def _group(
    group: Any, layers: tuple[LayerMemory, ...], parts: int, modules: Mapping[str, Any]
) -> GroupMemory:
    """A group of which each block is ``parts`` blocks here."""
    spec = layer_spec(group.kv_cache_spec, group.layer_names[0])
    kind, window = kind_of(spec)
    ratio = 1
    if kind is AttentionKind.SLIDING_WINDOW:
        ratio = compress_ratio(modules, group.layer_names, spec)
    tokens = group.kv_cache_spec.block_size // parts
    return GroupMemory(kind, window, tokens, layers, ratio)


def _parts(pages: Sequence[Pages], units: Callable[[str, Any], Unit]) -> int:
    """In how many parts the blocks of a group are described: 1, or as many as kernel blocks.

    Raises:
        RegistrationError: layers of one block table whose blocks are split differently.
    """
    pages = [page for page in pages if not is_state(page.spec)]
    if all(page.is_as_unsplit(units(page.layer, page.spec)) for page in pages):
        return 1
    ratios = {page.kernel_blocks for page in pages}
    if len(ratios) > 1:
        layers = ", ".join(f"{page.layer} {page.kernel_blocks}" for page in pages)
        raise RegistrationError(
            f"kernel blocks of a block: expected as many for all layers of a group, got {layers}"
        )
    return ratios.pop()


def _layer(page: Pages, chunks: tuple[AttentionChunk | StateChunk, ...], parts: int) -> LayerMemory:
    storage = page.view.untyped_storage()
    return LayerMemory(
        page.layer,
        Memory(storage.data_ptr(), storage.nbytes(), _device(page.view)),
        page.offset,
        page.tensor.block_stride // parts,
        page.num_blocks * parts,
        chunks,
    )


def _device(view: torch.Tensor) -> Device:
    if view.device.type == "cpu":
        return HOST
    if view.device.type != "cuda":
        raise RegistrationError(f"device: expected cpu or cuda, got {view.device.type}")
    return Device("cuda", view.device.index or 0)
