"""What an engine's KV memory looks like, and pinning it once.

``registration.references`` describes memory, ``registration.register`` pins it.  Both
run without torch, as the router and the command line must.  ``registration.allocation.allocate``
(with ``layers`` and ``contents`` to describe what an engine wants) makes memory; it
needs torch and is imported by name.
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
