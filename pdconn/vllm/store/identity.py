"""The namespace of an engine's rows: a digest of all that makes KV of equal tokens differ.

Keys of rows depend on the prompt alone, so two engines may share rows only if they compute the
same KV from the same tokens.  That takes the same weights, used in the same way: configuration
with overrides, dtypes, rotary tables, draft model; and the same meaning of bytes in a block.

Weights are told by the commit of a model hub, else by their files: names, sizes, the headers of
safetensors, and samples of each tensor, since a fine-tuned model has the header of its base::

    safetensors    header | 1 KiB ........ 1 KiB ........ 1 KiB | 1 KiB ...
                            start   a step of 16 MiB        end   next tensor
    other files    64 samples, evenly

Models that differ in a few rows of one tensor alone can look the same; docs/stores.md says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pdconn.store.format.footer import FORMAT_VERSION
from pdconn.store.format.layout import StoreLayout

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
_INDEX = "*.index.json"
_SAMPLE = 1024
_SAMPLES = 64
_STEP = 16 << 20
_MAX_HEADER = 1 << 27
_DEPENDS_ON_LENGTH = ('"longrope"', '"dynamic"', '"su"')
"""Rotary embeddings whose tables depend on the engine's maximum length."""
_READ_FROM_MODEL = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "gguf",
     "mistral", "bitsandbytes", "sharded_state", "runai_streamer", "runai_streamer_sharded"}
)  # fmt: skip
"""Ways to load that read the model's own files; others may be told of weights elsewhere."""


def namespace_of(config: Any, traits: dict[str, str], layout: StoreLayout) -> str:
    """The namespace of an engine.

    Args:
        config: vLLM's configuration.
        traits: what the bytes of a block mean (:func:`block_traits`).
        layout: of whole rows.
    """
    facts: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "traits": {name: value for name, value in traits.items() if name != "model"},
        "layout": layout.encoded().decode(),
        "model": _model(config.model_config, config.load_config),
    }
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    if draft is not None:
        facts["draft"] = _model(draft, config.load_config)
    return _digest(facts)


def salted(namespace: str, salt: str) -> str:
    """Another namespace for ``namespace``, after weights may have changed under an engine."""
    return _digest([namespace, salt])


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def weights_digest(model: str) -> str | None:
    """Of the weights in ``model``, a directory or one file; None if there are none.

    An index alone names tensors and not what is in them: that is no weights.
    """
    if Path(model).is_file():
        weights, index = {Path(model)}, set()
    else:
        weights = {path for form in _WEIGHTS for path in Path(model).glob(form)}
        index = set(Path(model).glob(_INDEX))
    if not weights:
        return None
    digest = hashlib.sha256()
    for path in sorted(weights | index):
        digest.update(f"{path.name}|{path.stat().st_size}|".encode())
        with path.open("rb") as file:
            for start, nbytes in _samples(path, file):
                file.seek(start)
                digest.update(file.read(nbytes))
    return digest.hexdigest()


def _samples(path: Path, file: Any) -> Iterator[tuple[int, int]]:
    """(start, bytes) of what is read of a file: header and samples of each tensor, or evenly."""
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
                    first, end = (8 + header_nbytes + int(at) for at in tensor["data_offsets"])
                    for start in (*range(first, end, _STEP), max(first, end - _SAMPLE)):
                        yield start, min(_SAMPLE, end - start)
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
        "quantization_config": _plain(getattr(model, "quantization_config", None)),
        "media": _media(getattr(model, "multimodal_config", None)),
        "weights": _weights(model, load),
    }
    if any(word in json.dumps(facts["config"]) for word in _DEPENDS_ON_LENGTH):
        facts["max_model_len"] = model.max_model_len
    return facts


def _media(config: Any) -> Any:
    """What changes the embeddings of media, and is not in the digests that vLLM makes of them."""
    names = ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method")
    return {name: _plain(getattr(config, name, None)) for name in names}


def _weights(model: Any, load: Any) -> str:
    """What tells the weights: their files, or where they come from.

    Of a bucket vLLM copies all but the weights to a folder, which is then the model's name: the
    bucket's name is what there is.
    """
    how = str(getattr(load, "load_format", "auto")).lower().rpartition(".")[2]
    if how == "dummy":
        return f"dummy:{getattr(model, 'seed', 0)}"
    name = str(getattr(model, "model_weights", "") or model.model)
    found = weights_digest(name)
    if found is None:
        commit = getattr(model.hf_config, "_commit_hash", None)
        found = f"{name}@{commit or model.revision}"
    if how in _READ_FROM_MODEL:
        return found
    extra = _plain(getattr(load, "model_loader_extra_config", None))
    return json.dumps([found, how, extra], sort_keys=True)


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
    if isinstance(value, set | frozenset):  # as text, their order differs from boot to boot
        return sorted(json.dumps(_plain(each), sort_keys=True) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
