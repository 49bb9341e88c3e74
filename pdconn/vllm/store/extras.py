"""What else than its tokens a prompt's KV depends on: adapter, media, cache salt.

Each goes into the key of the first canonical block that it can change, and by the chain into
all after it.  A prompt for which that cannot be told has no keys: it is neither saved nor
loaded.  Names are not enough where content may change under them: an adapter is told by its
files, and media by the digest that vLLM makes of their content.  A name that a client gave them
is seen by its form, unless it has that of a digest, too.

An adapter whose files change while an engine runs has no keys until the engine is started anew:
its weights in memory may be the old ones, and so may blocks in the engine's own prefix cache,
which knows an adapter by its name and path.
"""

from __future__ import annotations

import json
import logging
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from pdconn.vllm.identity.files import weights_digest
from transport.errors import shown

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""What vLLM's hashers make, after the name of an adapter that changes embeddings."""

_CHANGED = ""
_seen: dict[tuple[str, str], str] = {}
"""Adapters by name and path: the digest of their files, or :data:`_CHANGED` once they differed."""


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
        adapter = _adapter(request.lora_request)
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
        and getattr(request, "prompt_embeds", None) is None
        and request.pooling_params is None
        and not getattr(request, "resumable", False)
    )


def _adapter(lora: Any) -> str | None:
    """The adapter's digest; None where its files cannot be seen from here, or have changed."""
    found = _files_digest(lora)
    if found is None:
        return None
    which = str(lora.lora_name), str(lora.lora_path)
    first = _seen.setdefault(which, found)
    if first in (found, _CHANGED):
        return first or None
    _seen[which] = _CHANGED
    log.warning(
        "pdconn: store: files of an adapter have changed under the engine: its prompts are "
        "neither saved nor loaded any more: adapter=%s",
        shown(which[0]),
    )
    return None


def _files_digest(lora: Any) -> str | None:
    path = Path(lora.lora_path)
    try:
        files = tuple(sorted((f.name, f.stat().st_ctime_ns, f.stat().st_size)
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
    return weights + (config.read_text(encoding="utf-8") if config.is_file() else "")
