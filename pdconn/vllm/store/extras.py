"""What else than its tokens a prompt's KV depends on: adapter, media, cache salt.

Each goes into the key of the first canonical block that it can change, and by the chain into
all after it.  A prompt for which that cannot be told has no keys: it is neither saved nor
loaded.  Names are not enough where content may change under them: an adapter is told by its
files, and media by the digest that vLLM makes of their content, not by names of clients.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from pdconn.vllm.store.identity import weights_digest

_DIGEST = re.compile(r"[0-9a-f]{32}")


def extras_of(request: Any, block_tokens: int) -> list[bytes] | None:
    """What block i's key depends on besides tokens, at i; None if the prompt has no keys.

    ``request`` is vLLM's ``Request``.  May read files, so not on the engine's thread.
    """
    if not has_keys(request):
        return None
    found: dict[int, list[str]] = {}
    if request.cache_salt:
        found.setdefault(0, []).append(f"salt={request.cache_salt!r}")
    if request.lora_request is not None:
        adapter = _adapter(request.lora_request)
        if adapter is None:
            return None
        found.setdefault(0, []).append(f"adapter={adapter}")
    for feature in request.mm_features:
        if not _DIGEST.search(feature.identifier):
            return None
        position = feature.mm_position
        at = int(position.offset)
        text = f"media={feature.identifier}@{at}+{int(position.length)}"
        found.setdefault(at // block_tokens, []).append(text)
    last = max(found, default=-1)
    return ["|".join(found.get(index, ())).encode() for index in range(last + 1)]


def has_keys(request: Any) -> bool:
    """Whether the prompt is one of tokens that stay, for an answer in tokens."""
    return (
        request.prompt_token_ids is not None
        and getattr(request, "prompt_embeds", None) is None
        and request.pooling_params is None
        and not getattr(request, "resumable", False)
    )


def _adapter(lora: Any) -> str | None:
    """The adapter's digest, or None where its files cannot be seen from here."""
    path = Path(lora.lora_path)
    try:
        files = tuple(sorted((f.name, f.stat().st_mtime_ns, f.stat().st_size)
                             for f in path.iterdir() if f.is_file()))  # fmt: skip
    except OSError:
        return None
    return _adapter_digest(str(path), files)


@lru_cache(maxsize=1024)
def _adapter_digest(path: str, files: tuple[tuple[str, int, int], ...]) -> str | None:
    weights = weights_digest(path)
    config = Path(path, "adapter_config.json")
    if weights is None:
        return None
    return weights + (config.read_text() if config.is_file() else "")
