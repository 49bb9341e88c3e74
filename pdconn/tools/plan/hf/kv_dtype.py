"""The type of keys and values that a checkpoint requests, as vLLM 0.32 uses it under ``auto``.

A quantized checkpoint may have it in ``quantization_config`` of its ``config.json`` or, written by
ModelOpt 0.29 and before, in ``hf_quant_config.json`` beside it.  vLLM reads it twice:

    before the model is built (``resolve_kv_cache_dtype_string``): ModelOpt's alone, of the outer
        level, or of the file beside it if that level has none;
    in each attention layer: compressed-tensors' ``kv_cache_scheme``, of any level.  Layers of MLA
        do not look at it, and keep the model's type.

No other method of quantization changes the type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdconn.tools.plan.hf.config_keys import NESTED, Keys
from pdconn.tools.plan.plan_errors import UnreadableConfig, shown

BESIDE = "hf_quant_config.json"
"""The file beside ``config.json``."""

_FP8, _FP4 = "fp8", "nvfp4"
_OF_MODELOPT = {_FP8: "fp8_e4m3", _FP4: _FP4}
_FP8_ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
_STRATEGIES = ("tensor", "attn_head")


@dataclass(frozen=True, slots=True)
class KvDtype:
    """A value of ``--kv-cache-dtype``, and the key that asks for it."""

    name: str
    key: str


def checkpoint_kv_dtype(config: Keys, beside: Keys | None, *, is_latent: bool) -> KvDtype | None:
    """The type that the checkpoint requests; None for the model's own type.

    Args:
        config: the whole ``config.json``.
        beside: ``hf_quant_config.json``; None without one.
        is_latent: whether all attention is MLA.

    Raises:
        UnreadableConfig: a value that vLLM refuses, or a type that is not forecast.
    """
    outer, where = _object(config, "quantization_config"), "quantization_config"
    if outer is None and beside is not None:
        outer, where = _checked(beside, BESIDE), BESIDE
    method = "" if outer is None else _method(outer, where)
    if outer is not None and method.startswith("modelopt"):
        return _modelopt(outer, where)
    for found in (outer, *_further(config)):
        if found is not None:
            return None if is_latent else _compressed_tensors(found, method or _method(found, ""))
    return None


def _further(config: Keys) -> list[Keys | None]:
    """The places where vLLM looks if the outermost level has no ``quantization_config``."""
    inner = (_object(config, key) for key in NESTED)
    nested = [_object(one, "quantization_config") for one in inner if one is not None]
    return [*nested, _object(config, "compression_config")]


def _method(found: Keys, where: str) -> str:
    """The method's name, as vLLM normalizes it."""
    inner = found.get("quantization")
    producer = found.get("producer")
    if isinstance(inner, Mapping):
        made_by = producer.get("name") if isinstance(producer, Mapping) else None
        algo = inner.get("quant_algo")
        if algo is not None and (made_by == "modelopt" or "modelopt_quant_config" in inner):
            if str(algo).upper() in _FP8_ALGOS:
                return "modelopt"
            if str(algo).upper() == "NVFP4":
                return "modelopt_fp4"
            expected = f"{', '.join(_FP8_ALGOS)} or NVFP4, as vLLM does"
            raise UnreadableConfig(f"quant_algo of {where}", expected, shown(algo), _BY_DTYPE)
    return str(found.get("quant_method") or "").lower().replace("compressed_tensors", _CT)


_CT = "compressed-tensors"
_BY_DTYPE = "--dtype plans with a type that you choose"


def _modelopt(found: Keys, where: str) -> KvDtype | None:
    inner = found.get("quantization", found)
    levels = (inner if isinstance(inner, Mapping) else found, found)
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        given = next((level[key] for level in levels if level.get(key)), None)
        if given:
            return _in_modelopt(given, f"{where}: {key}")
    return None


def _in_modelopt(given: Any, key: str) -> KvDtype | None:
    """The type of ModelOpt; vLLM warns about unknown ones, and keeps the model's type."""
    algo = given.lower() if isinstance(given, str) else ""
    if isinstance(given, Mapping) and given.get("type") == "float":
        if given.get("num_bits") == 8 and given.get("dynamic") is False:
            algo = _FP8
        elif given.get("num_bits") == 4:
            algo = _FP4
    if algo == _FP4:
        raise UnreadableConfig(key, "8 or 16 bits a number", _FP4, _BY_DTYPE)
    return KvDtype(_OF_MODELOPT[algo], key) if algo in _OF_MODELOPT else None


def _compressed_tensors(found: Keys, method: str) -> KvDtype | None:
    """The type of compressed-tensors; vLLM supports scales of 8-bit numbers only."""
    scheme = found.get("kv_cache_scheme")
    if method != _CT or scheme is None:
        return None
    key = "kv_cache_scheme"
    checked = _checked(scheme, key)
    known = checked.get("type") == "float" and checked.get("num_bits") == 8
    if not known or checked.get("strategy") not in _STRATEGIES or not checked.get("symmetric"):
        expected = "8-bit floats, symmetric, one scale a tensor or head, as vLLM does"
        raise UnreadableConfig(key, expected, shown(scheme), _BY_DTYPE)
    return KvDtype(_FP8, f"quantization_config: {key}")


def _object(keys: Keys, key: str) -> Keys | None:
    value = keys.get(key)
    return None if value is None else _checked(value, key)


def _checked(value: Any, key: str) -> Keys:
    if not isinstance(value, Mapping):
        raise UnreadableConfig(key, "an object", shown(value))
    return value
