"""What the names of rows depend on besides tokens: an engine's namespace, a prompt's extras.

Keys of rows depend on the prompt alone, so two engines may share rows only if they compute the
same KV from the same tokens.  That takes the same weights, used in the same way: configuration
with overrides, dtypes, rotary tables, draft model; and the same meaning of bytes in a block.  A
digest of all that is the *namespace*.

Weights count by what proves them (:mod:`pdconn.vllm.identity.weights`).  Where nothing does, the
namespace is random: rows are the engine's own, and nobody finds them after it.

*Extras* are adapter, media and cache salt.  Each goes into the key of the first canonical block
that it can change, and by the chain into all after it.  A prompt for which that cannot be told has
no keys: it is neither saved nor loaded.  Names are not enough where content may change under them:
an adapter is told by its files, and media by the digest that vLLM makes of their content.  A name
that a client gave them is seen by its form, unless it has that of a digest, too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from pdconn.protocol.compat import DRAFT, WEIGHTS
from pdconn.store.format.row import FORMAT_VERSION, StoreLayout
from pdconn.vllm.blocks.drafts import drafter
from pdconn.vllm.identity.adapters import adapter_digest
from pdconn.vllm.identity.weights import Weights, is_commit

_WEIGHTS = (WEIGHTS, DRAFT + WEIGHTS)
_DEPENDS_ON_LENGTH = ('"longrope"', '"dynamic"', '"su"')
"""Rotary embeddings whose tables depend on the engine's maximum length."""


_ELSEWHERE = ("_name_or_path", "transformers_version", "_commit_hash")
"""What a configuration says of where it comes from, and not of the model."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Where an engine's rows are.

    Attributes:
        name: of the folder.
        doubt: why no other engine, and no other boot of this one, has rows there; else empty.
    """

    name: str
    doubt: str


def namespace_of(
    config: Any, traits: Mapping[str, str], layout: StoreLayout, *, salt: str
) -> Namespace:
    """The namespace of an engine.

    Args:
        config: vLLM's configuration.
        traits: what the bytes of a block mean, and what proves the weights (:func:`block_traits`).
        layout: of whole rows.
        salt: random, for weights that nothing proves: no other engine has the same.
    """
    weights = {name: Weights.from_trait(traits[name]) for name in _WEIGHTS if name in traits}
    others = {name: value for name, value in traits.items() if name not in ("model", *_WEIGHTS)}
    plain = _Plain()
    facts: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "traits": others,
        "layout": layout.encoded().decode(),
        "model": _model(config.model_config, plain),
        "weights": {name: found.proofs[:1] for name, found in weights.items()},
    }
    if (draft := drafter(config)) is not None:
        facts["draft"] = _model(draft, plain)
    doubts = [f"{name}: {found.doubt}" for name, found in weights.items() if not found.proofs]
    doubts += _foreign_code(config.model_config)
    doubts += [f"{where} is no plain data" for where in plain.others]
    name = _digest(facts)
    return Namespace(salted(name, salt) if doubts else name, "; ".join(doubts))


def salted(namespace: str, salt: str) -> str:
    """Another namespace for ``namespace``, after weights may have changed under an engine."""
    return _digest([namespace, salt])


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _model(model: Any, plain: _Plain) -> dict[str, Any]:
    hf = model.hf_config
    facts = {
        "config": plain.of(hf.to_dict(), "hf_config"),
        "text": plain.of(model.hf_text_config.to_dict(), "hf_text_config"),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "quantization_config": plain.of(model.quantization_config, "quantization_config"),
        "media": _media(model.multimodal_config, plain),
        "code": _code(model),
    }
    if any(word in json.dumps(facts["config"]) for word in _DEPENDS_ON_LENGTH):
        facts["max_model_len"] = model.max_model_len
    return facts


def _code(model: Any) -> Any:
    """The code that comes with a model, where it may run; with a commit it is part of that."""
    if not model.trust_remote_code:
        return None
    files = sorted(Path(model.model).glob("*.py"))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return [str(model.code_revision), digests]


def _foreign_code(model: Any) -> list[str]:
    """Code that may run and comes from another repository, as it is there at the moment."""
    named = model.hf_config.to_dict().get("auto_map", {})
    foreign = [where for where in map(str, named.values()) if "--" in where]
    if not model.trust_remote_code or is_commit(model.code_revision):
        return []
    return [f"code of {where} at no commit (code_revision)" for where in foreign]


def _media(config: Any, plain: _Plain) -> Any:
    """What changes the embeddings of media, and is not in the digests that vLLM makes of them."""
    names = (
        "mm_processor_kwargs", "video_pruning_rate", "video_pruning_method",
        "mm_device_do_normalize", "mm_encoder_attn_dtype",
    )  # fmt: skip
    if config is None:
        return None
    facts = {name: plain.of(getattr(config, name), name) for name in names}
    if scales := config.mm_encoder_fp8_scale_path:
        facts["scales"] = Path(scales).read_text(encoding="utf-8")
    return facts


class _Plain:
    """Values as JSON holds them, the same for equal configurations and for no others.

    Lists stay lists; mappings, sets, records, enumerations, bytes and dtypes become objects of one
    key, their kind, so that values of two kinds are never written alike.  Objects of other types
    are not written, but listed: their text may equal another's, or differ in each process.

    Attributes:
        others: where such objects were met, and of which type.
    """

    def __init__(self) -> None:
        self.others: list[str] = []

    def of(self, value: Any, where: str) -> Any:
        """``value``, which is at ``where``."""
        if isinstance(value, dict):
            kept = {key: each for key, each in value.items() if key not in _ELSEWHERE}
            if all(isinstance(key, str) for key in kept):
                found = {key: self.of(each, f"{where}.{key}") for key, each in kept.items()}
                return {"mapping": found}
            return {"pairs": self._unordered(list(kept.items()), where)}
        if isinstance(value, list | tuple):
            return [self.of(each, where) for each in value]
        if isinstance(value, set | frozenset):  # their order differs from boot to boot
            return {"set": self._unordered(value, where)}
        if is_dataclass(value) and not isinstance(value, type):
            found = {each.name: getattr(value, each.name) for each in fields(value)}
            return {f"record {type(value).__qualname__}": self.of(found, where)}
        return self._single(value, where)

    def _single(self, value: Any, where: str) -> Any:
        if isinstance(value, Enum):
            return {f"enumeration {type(value).__qualname__}": value.name}
        if isinstance(value, bytes | torch.dtype):
            return {type(value).__name__: str(value)}
        if isinstance(value, str | int | float | bool | None):
            return value
        self.others.append(f"{where} (a {type(value).__name__})")
        return None

    def _unordered(self, values: Iterable[Any], where: str) -> list[str]:
        return sorted(json.dumps(self.of(each, where), sort_keys=True) for each in values)


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
