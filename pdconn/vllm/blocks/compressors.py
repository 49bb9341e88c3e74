"""Which caches belong to compressors, and how many tokens these compress into one.

For vLLM the tokens that a compressor has yet to compress are a sliding window; that it is read only
where an output ends is not in the spec.  A compressor's layer is identified by its attention
backend, and the attention layer that it is a part of has the ratio::

    model.layers.2.attn                             compress_ratio 4
    model.layers.2.attn.compressor.state_cache      window 8, CompressorBackend    -> 4
    model.layers.2.attn.swa_cache                   window 128, another backend    -> 1

If the ratio is unknown it is taken as 1: the window is transferred whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_BACKEND = "CompressorBackend"


def compress_ratio(layers: Mapping[str, Any], names: Iterable[str], spec: Any) -> int:
    """The ratio of a group of layers with a sliding window; 1 unless all are compressors of one.

    Args:
        layers: vLLM's static forward context.
        names: the group's layers; those that this rank lacks are left out.
        spec: of any of them, a ``SlidingWindowSpec``.
    """
    ratios = {_ratio_of(layers, name) for name in names if name in layers}
    if len(ratios) != 1 or spec.extra_retained_tokens > 0:
        return 1
    (ratio,) = ratios
    return ratio if spec.sliding_window % ratio == 0 else 1


def _ratio_of(layers: Mapping[str, Any], name: str) -> int:
    backend = getattr(layers[name], "get_attn_backend", None)
    if backend is None or backend().get_name() != _BACKEND:
        return 1
    while "." in name:
        name = name.rpartition(".")[0]
        found = getattr(layers.get(name), "compress_ratio", None)
        if isinstance(found, int) and found > 0:
            return found
    return 1
