"""What the names of rows depend on besides tokens: an engine's namespace, a prompt's extras.

Keys of rows depend on the prompt alone, so two engines may share rows only if they compute the
same KV from the same tokens.  That takes the same weights, used in the same way: configuration
with overrides, dtypes, rotary tables, draft model; and the same meaning of bytes in a block.  A
digest of all that is the *namespace*.

Weights are identified by proofs (:mod:`pdconn.vllm.identity.weights`).  Without any the namespace
is random: rows are for this boot of this engine alone.

*Extras* are adapter, media and cache salt.  Each goes into the key of the first canonical block
that it can change, and through the chain into all after it.  A prompt whose extras are not known
has no keys: it is neither saved nor loaded.  Names are not enough, since their content may change:
an adapter is identified by its files, and media by vLLM's digest of their content.
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
from pdconn.store.format.footer import FORMAT_VERSION
from pdconn.store.format.row import StoreLayout
from pdconn.vllm.blocks.drafts import drafter
from pdconn.vllm.identity.adapters import adapter_digest
from pdconn.vllm.identity.weights import Weights, is_commit

_WEIGHTS = (WEIGHTS, DRAFT + WEIGHTS)
_DEPENDS_ON_LENGTH = ('"longrope"', '"dynamic"', '"su"')
"""Rotary embeddings whose tables depend on the engine's maximum length."""


_ELSEWHERE = ("_name_or_path", "transformers_version", "_commit_hash")
"""Fields of a configuration about its origin, not about the model."""


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
    """Another namespace in place of ``namespace``, when an engine's weights may have changed."""
    return _digest([namespace, salt])


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _model(model: Any, plain: _Plain) -> dict[str, Any]:
    hf = model.hf_config
    facts = {
        "config": plain.plain_value(hf.to_dict(), "hf_config"),
        "text": plain.plain_value(model.hf_text_config.to_dict(), "hf_text_config"),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "quantization_config": plain.plain_value(model.quantization_config, "quantization_config"),
        "media": _media(model.multimodal_config, plain),
        "code": _code(model),
    }
    if any(word in json.dumps(facts["config"]) for word in _DEPENDS_ON_LENGTH):
        facts["max_model_len"] = model.max_model_len
    return facts


def _code(model: Any) -> Any:
    """The code in a model's folder, if it may run; that of a hub's model is part of its commit."""
    if not model.trust_remote_code:
        return None
    files = sorted(Path(model.model).glob("*.py"))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return [str(model.code_revision), digests]


def _foreign_code(model: Any) -> list[str]:
    """Code from another repository that may run, in whatever version is there now."""
    named = model.hf_config.to_dict().get("auto_map", {})
    foreign = [where for where in map(str, named.values()) if "--" in where]
    if not model.trust_remote_code or is_commit(model.code_revision):
        return []
    return [f"code of {where} at no commit (code_revision)" for where in foreign]


def _media(config: Any, plain: _Plain) -> Any:
    """What changes the embeddings of media, and is not in vLLM's digests of their content."""
    names = (
        "mm_processor_kwargs", "video_pruning_rate", "video_pruning_method",
        "mm_device_do_normalize", "mm_encoder_attn_dtype",
    )  # fmt: skip
    if config is None:
        return None
    facts = {name: plain.plain_value(getattr(config, name), name) for name in names}
    if scales := config.mm_encoder_fp8_scale_path:
        facts["scales"] = Path(scales).read_text(encoding="utf-8")
    return facts


class _Plain:
    """Makes JSON values of configurations, equal ones for equal configurations and for no others.

    Attributes:
        others: places and types of objects that cannot be written: the text of one may equal
            another's, or differ in each process.
    """

    # Lists stay lists.  Mappings, sets, records, enumerations, bytes and dtypes become objects of
    # one key, their kind, so that values of two kinds are never written alike.

    def __init__(self) -> None:
        self.others: list[str] = []

    def plain_value(self, value: Any, where: str) -> Any:
        """``value`` as JSON; ``where`` names its place in errors."""
        if isinstance(value, dict):
            kept = {key: each for key, each in value.items() if key not in _ELSEWHERE}
            if all(isinstance(key, str) for key in kept):
                found = {
                    key: self.plain_value(each, f"{where}.{key}") for key, each in kept.items()
                }
                return {"mapping": found}
            return {"pairs": self._unordered(list(kept.items()), where)}
        if isinstance(value, list | tuple):
            return [self.plain_value(each, where) for each in value]
        if isinstance(value, set | frozenset):  # their order differs from boot to boot
            return {"set": self._unordered(value, where)}
        if is_dataclass(value) and not isinstance(value, type):
            found = {each.name: getattr(value, each.name) for each in fields(value)}
            return {f"record {type(value).__qualname__}": self.plain_value(found, where)}
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
        return sorted(json.dumps(self.plain_value(each, where), sort_keys=True) for each in values)


_DIGEST = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""The form of vLLM's digests, after the name of an adapter that changes embeddings.  A client may
name media as well: such a name is refused by its form, unless it looks like a digest."""


def extras_of(request: Any, block_tokens: int) -> list[bytes] | None:
    """What block i's key depends on besides tokens, at i; None if the prompt has no keys.

    ``request`` is vLLM's ``Request``.  May read files, so it is not called on the engine's thread.
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
    """Whether the request has a prompt of tokens alone, and an answer in tokens."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.pooling_params is None
        and not request.resumable
    )
