"""The namespace of an engine's rows: a digest of all that makes KV of equal tokens differ.

Keys of rows depend on the prompt alone, so two engines may share rows only if they compute the
same KV from the same tokens.  That takes the same weights, used in the same way: configuration
with overrides, dtypes, rotary tables, draft model; and the same meaning of bytes in a block.

Weights are told by the commit of a model hub, else by their files: names, sizes, the headers of
safetensors, and a sample of each tensor, since a fine-tuned model has the header of its base.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdconn.store.format.footer import FORMAT_VERSION
from pdconn.store.format.layout import StoreLayout

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.index.json")
_SAMPLE = 1024
_SAMPLES = 64
_MAX_HEADER = 1 << 27
_DEPENDS_ON_LENGTH = ("longrope", "dynamic", "su")
"""Rotary embeddings whose tables depend on the engine's maximum length."""


def namespace_of(config: Any, traits: dict[str, str], layout: StoreLayout, salt: str = "") -> str:
    """The namespace of an engine.

    Args:
        config: vLLM's configuration.
        traits: what the bytes of a block mean (:func:`block_traits`).
        layout: of whole rows.
        salt: differs after weights may have changed under a running engine.
    """
    facts: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "traits": {name: value for name, value in traits.items() if name != "model"},
        "layout": layout.encoded().decode(),
        "model": _model(config.model_config, config.load_config),
        "salt": salt,
    }
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    if draft is not None:
        facts["draft"] = _model(draft, config.load_config)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def weights_digest(model: str) -> str | None:
    """Of the weights' files in the directory ``model``; None if there are none."""
    digest, found = hashlib.sha256(), False
    for path in sorted({path for form in _WEIGHTS for path in Path(model).glob(form)}):
        found = True
        digest.update(f"{path.name}|{path.stat().st_size}|".encode())
        with path.open("rb") as file:
            for start, nbytes in _samples(path, file):
                file.seek(start)
                digest.update(file.read(nbytes))
    return digest.hexdigest() if found else None


def _samples(path: Path, file: Any) -> Iterator[tuple[int, int]]:
    """(start, bytes) of what is read of a file: header and each tensor's start, or evenly."""
    size = path.stat().st_size
    if path.suffix == ".json" or size <= _SAMPLE * _SAMPLES:
        yield 0, size
        return
    if path.suffix == ".safetensors":
        header_nbytes = int.from_bytes(file.read(8), "little")
        if header_nbytes <= min(_MAX_HEADER, size - 8):
            header = file.read(header_nbytes)
            yield 0, 8 + header_nbytes
            for name, tensor in json.loads(header).items():
                if name != "__metadata__":
                    yield 8 + header_nbytes + int(tensor["data_offsets"][0]), _SAMPLE
            return
    for number in range(_SAMPLES):
        yield (size - _SAMPLE) * number // (_SAMPLES - 1), _SAMPLE


def _model(model: Any, load: Any) -> dict[str, Any]:
    hf = model.hf_config
    facts = {
        "config": _plain(hf.to_dict()),
        "text": _plain(model.hf_text_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "weights": _weights(model, load),
    }
    if any(word in json.dumps(facts["config"]) for word in _DEPENDS_ON_LENGTH):
        facts["max_model_len"] = model.max_model_len
    return facts


def _weights(model: Any, load: Any) -> str:
    if str(getattr(load, "load_format", "")).lower().endswith("dummy"):
        return f"dummy:{getattr(model, 'seed', 0)}"
    name = str(model.model)
    if Path(name).is_dir():
        found = weights_digest(name)
        if found is not None:
            return found
    commit = getattr(model.hf_config, "_commit_hash", None)
    return f"{name}@{commit or model.revision}"


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it, the same for equal configurations."""
    if isinstance(value, dict):
        return {
            str(key): _plain(each)
            for key, each in value.items()
            if key not in ("_name_or_path", "transformers_version", "_commit_hash")
        }
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
