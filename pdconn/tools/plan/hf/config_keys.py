"""Values of a ``config.json``, each checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pdconn.tools.plan.model_shape import MAX_LAYERS
from pdconn.tools.plan.plan_errors import UnreadableConfig, shown

Keys = Mapping[str, Any]

NESTED = ("text_config", "llm_config", "language_config")

# vLLM caches 32-bit models in 16 bits; a config without a dtype counts as 32-bit.
_ITEM_NBYTES = {
    "float32": 2, "float16": 2, "bfloat16": 2, "half": 2, "float": 2, "float8_e4m3fn": 1,
}  # fmt: skip


def text_keys(config: Keys, is_inner: Callable[[str], bool] = lambda _: False) -> dict[str, Any]:
    """The language model's keys, over those of the outer level (such as its dtype).

    A null of the inner level is replaced by a value of the outer one, and kept without one: it
    means "none", while a missing key means "the default".

    Args:
        is_inner: whether a class of nested configurations reads this key from the inner level
            alone, as all do for keys of a layer's cache.
    """
    if not isinstance(config, Mapping):
        raise UnreadableConfig("config", "a JSON object", type(config).__name__)
    for key in NESTED:
        inner = config.get(key)
        if inner is not None:
            if not isinstance(inner, Mapping):
                raise UnreadableConfig(key, "an object", shown(inner))
            outer = {k: v for k, v in config.items() if not is_inner(k)}
            kept = {k: v for k, v in inner.items() if v is not None or k not in outer}
            return {**outer, **kept}
    return dict(config)


def number(keys: Keys, key: str, most: int = 1 << 24) -> int:
    """The whole number above 0 of ``key``."""
    value = keys.get(key)
    if type(value) is not int or not 0 < value <= most:
        seen = "nothing" if value is None else shown(value)
        raise UnreadableConfig(key, f"a whole number from 1 to {most}", seen)
    return value


def optional(keys: Keys, key: str, default: int) -> int:
    """The whole number above 0 of ``key``, or ``default`` where it is missing."""
    return default if not keys.get(key) else number(keys, key, MAX_LAYERS)


def item_nbytes(keys: Keys) -> int:
    """Bytes of one number in the cache, from the model's dtype."""
    for key in ("torch_dtype", "dtype"):
        if keys.get(key) is not None:
            dtype = str(keys[key]).removeprefix("torch.")
            if dtype not in _ITEM_NBYTES:
                raise UnreadableConfig(key, " or ".join(_ITEM_NBYTES), keys[key])
            return _ITEM_NBYTES[dtype]
    return 2


def dtype_name(keys: Keys) -> str:
    """The type of the cache that vLLM uses for a model of this dtype."""
    for key in ("torch_dtype", "dtype"):
        if keys.get(key) is not None:
            dtype = str(keys[key]).removeprefix("torch.")
            return {"half": "float16", "float": "bfloat16", "float32": "bfloat16"}.get(dtype, dtype)
    return "bfloat16"


def named_layers(keys: Keys, key: str, layers: int, names: Mapping[str, Any]) -> list[Any]:
    """The meanings of the first ``layers`` names of a list."""
    listed = keys.get(key)
    if not isinstance(listed, list) or len(listed) < layers:
        raise UnreadableConfig(key, f"a list of {layers} kinds", shown(listed))
    foreign = [name for name in listed if not (isinstance(name, str) and name in names)]
    if foreign:
        raise UnreadableConfig(key, " or ".join(names), shown(foreign[0]))
    return [names[name] for name in listed[:layers]]


def indices(keys: Keys, key: str, first: int, layers: int) -> set[int]:
    """The layers in a list, counted from ``first``, as numbers from 0."""
    listed = keys.get(key)
    end = layers + first
    if not isinstance(listed, list) or not all(
        type(one) is int and first <= one < end for one in listed
    ):
        raise UnreadableConfig(key, f"a list of numbers from {first} to {end - 1}", shown(listed))
    return {one - first for one in listed}
