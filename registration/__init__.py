"""Describes an engine's KV memory and registers it with a transport, once.

references   KV memory as byte references: where every head and token of a block lies
register     registers one worker's KV memory, and releases it in the right order
scratch      a page of memory for reads whose bytes are not used
allocation/  allocates cross-layer KV memory; needs torch, so it is imported by name

Everything but ``scratch`` and ``allocation`` runs without torch, as the router and the
command line must.
"""

from registration.references import (
    AttentionChunk,
    AttentionKind,
    GroupMemory,
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
    KVCacheTensorReference,
    LayerMemory,
    RegistrationError,
    StateChunk,
    build_kv_cache_references,
)
from registration.register import OverlappingMemory, RegisteredKVMemory, RegistrationClosed

__all__ = [
    "AttentionChunk",
    "AttentionKind",
    "GroupMemory",
    "KVCacheDataReference",
    "KVCacheGroupReference",
    "KVCacheReferences",
    "KVCacheTensorReference",
    "LayerMemory",
    "OverlappingMemory",
    "RegisteredKVMemory",
    "RegistrationClosed",
    "RegistrationError",
    "StateChunk",
    "build_kv_cache_references",
]
