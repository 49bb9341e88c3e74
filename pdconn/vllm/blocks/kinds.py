"""Kinds of KV cache by vLLM's specifications."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from registration.references import AttentionKind, RegistrationError

_KINDS = {
    FullAttentionSpec: AttentionKind.FULL,
    SinkFullAttentionSpec: AttentionKind.FULL,
    MLAAttentionSpec: AttentionKind.FULL,
    SlidingWindowSpec: AttentionKind.SLIDING_WINDOW,
    SlidingWindowMLASpec: AttentionKind.SLIDING_WINDOW,
    ChunkedLocalAttentionSpec: AttentionKind.CHUNKED_LOCAL,
    MambaSpec: AttentionKind.STATE,
}


def layer_spec(spec: Any, name: str) -> Any:
    """The specification of one layer of a group."""
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def kind_of(spec: Any) -> tuple[AttentionKind, int | None]:
    """The kind of a layer's cache, and its window.

    Raises:
        RegistrationError: the kind is not supported.
    """
    kind = _KINDS.get(type(spec))
    if kind is None:
        known = ", ".join(known.__name__ for known in _KINDS)
        raise RegistrationError(
            f"KV cache spec: expected one of {known}, got {type(spec).__name__}: pdconn "
            f"does not support such a cache yet"
        )
    if kind is AttentionKind.SLIDING_WINDOW:
        return kind, spec.sliding_window
    if kind is AttentionKind.CHUNKED_LOCAL:
        return kind, spec.attention_chunk_size
    return kind, None


def is_state(spec: Any) -> bool:
    """Whether layers of the specification keep a recurrent state."""
    return isinstance(spec, MambaSpec)


def keeps_states(config: KVCacheConfig) -> Iterator[bool]:
    """Of each group that is transferred, whether it keeps states."""
    for group in config.transfer_groups:
        yield is_state(layer_spec(group.kv_cache_spec, group.layer_names[0]))


def transferred_specs(config: KVCacheConfig) -> dict[str, Any]:
    """Specification of each layer whose cache is transferred, by its name.

    Without layers that share the cache of another layer.
    """
    placed = {name for tensor in config.kv_cache_tensors for name in tensor.layers}
    return {
        name: layer_spec(group.kv_cache_spec, name)
        for group in config.transfer_groups
        for name in group.layer_names
        if name in placed
    }


def kinds_of(config: KVCacheConfig) -> Iterator[AttentionKind | None]:
    """The kind of each group that is transferred; None for an unknown kind."""
    for group in config.transfer_groups:
        yield _KINDS.get(type(layer_spec(group.kv_cache_spec, group.layer_names[0])))


def may_lag(config: KVCacheConfig) -> bool:
    """Whether every group that may hold less of a prompt than full attention keeps states."""
    return set(kinds_of(config)) == {AttentionKind.FULL, AttentionKind.STATE}
