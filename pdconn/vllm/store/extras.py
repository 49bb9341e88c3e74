"""What else than its tokens a prompt's KV depends on: adapter, media, cache salt.

Each goes into the key of the first canonical block that it can change, and by the chain into
all after it.  A prompt for which that cannot be told has no keys: it is neither saved nor
loaded.  Names are not enough where content may change under them: an adapter is told by its
files, and media by the digest that vLLM makes of their content.  A name that a client gave them
is seen by its form, unless it has that of a digest, too.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pdconn.vllm.identity.adapters import adapter_digest

_DIGEST = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""What vLLM's hashers make, after the name of an adapter that changes embeddings."""


def extras_of(request: Any, block_tokens: int) -> list[bytes] | None:
    """What block i's key depends on besides tokens, at i; None if the prompt has no keys.

    ``request`` is vLLM's ``Request``.  May read files, so not on the engine's thread.
    """
    if not has_keys(request):
        return None
    found: dict[int, list[tuple[str | int, ...]]] = {}
    if request.cache_salt:
        found.setdefault(0, []).append(("salt", request.cache_salt))
    if request.lora_request is not None:
        adapter = adapter_digest(request.lora_request)
        if adapter is None:
            return None
        found.setdefault(0, []).append(("adapter", adapter))
    for feature in request.mm_features:
        if not _DIGEST.fullmatch(feature.identifier):
            return None
        position = feature.mm_position
        at = int(position.offset)
        seen = ("media", feature.identifier, at, int(position.length))
        found.setdefault(at // block_tokens, []).append(seen)
    last = max(found, default=-1)
    return [_encoded(found.get(index)) for index in range(last + 1)]


def _encoded(found: list[tuple[str | int, ...]] | None) -> bytes:
    """As JSON, so that no text of one can be taken for another."""
    return b"" if found is None else json.dumps(found).encode()


def has_keys(request: Any) -> bool:
    """Whether the prompt is one of tokens that stay, for an answer in tokens."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.pooling_params is None
        and not request.resumable
    )
