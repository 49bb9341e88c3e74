"""What vLLM's classes cache for a configuration: built on the device ``meta``, as on an H100.

    python -m tests.tools.plan.vllm.meta_specs < cases.json > specs.json

A case is ``{"config": …, "quantization": …, "dtype": …}``; the answer has, for each, the groups of
layers of equal specs, or the error with which vLLM or this process could not build it.  Nothing of
a model is loaded or run.  What stands in for a card and for kernels is in ``tests.gpu.kit``; here
are besides: names of operations that layers look up as they are built, packages for cards, and
configurations of a few families whose class comes with their weights.  Towers for pictures and
sounds are left out (``language_model_only``).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any, ClassVar

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}

import torch

from tests.gpu.kit.native import stand_in
from tests.gpu.kit.on_meta import pretend_h100, start_groups

_COMPILED = ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch", "_flashmla_C",
             "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C")  # fmt: skip
# Of published configurations: what their class has besides, and a model needs to be built.
_CLASSES = {"mimo": "Qwen2Config", "mimo_v2": "MiMoV2FlashConfig"}


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages of which modules of language models import the names alone."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in ("torchvision", "cutlass", "cuda"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


class _Name(type):
    """A class with any attribute, such as the members of an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (_Anything,), {})


class _Names(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (_Anything,), {})


class _Anything:
    """Decorates, is called, and is asked for attributes, as the names of kernels' languages are."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class _Op:
    """A compiled operation, of which a layer keeps the address and which nothing calls."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return False


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...


def pretend() -> None:
    """A machine with an H100, before vLLM looks."""
    from triton.backends import backends

    # vLLM for CPUs takes Triton for absent without it, and defines no kernels of state layers.
    backends["cpu"] = types.SimpleNamespace(driver=None)
    for name in _COMPILED:
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    stand_in()
    pretend_h100()
    item = torch.Tensor.item
    cpu = torch.Tensor.cpu
    torch.Tensor.cpu = lambda self: self if self.is_meta else cpu(self)  # type: ignore[method-assign,assignment]
    torch.Tensor.item = lambda self: 1.0 if self.is_meta else item(self)  # type: ignore[method-assign,assignment,return-value]
    card = types.SimpleNamespace(multi_processor_count=132, total_memory=80 << 30, name="H100",
                                 major=9, minor=0)  # fmt: skip
    for name, value in {
        "Stream": _Stream, "Event": _Stream, "current_device": lambda: 0,
        "get_device_properties": lambda _=None: card, "is_available": lambda: True,
        "device_count": lambda: 1, "current_stream": _Stream, "get_device_name": lambda *_: "H100",
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)
    time.sleep = lambda _: None  # vLLM waits before it reads a configuration again
    import xgrammar  # noqa: F401 - asks for ``cuda``, which is absent
    from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModel
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    sys.meta_path.insert(0, _Absent())  # after transformers has looked for it
    TimmWrapperModel._from_config = classmethod(lambda *_, **__: torch.nn.Module())  # Gemma 3n's
    type(current_platform).current_device = staticmethod(lambda: torch.device("meta"))
    type(current_platform).device_type = "meta"  # layers make small tensors "on the card"
    # vLLM inspects classes in a process of their own, which would not pretend.
    from vllm.model_executor.layers import sparse_attn_indexer

    sparse_attn_indexer.has_deep_gemm = lambda: True
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: (  # type: ignore[method-assign]
        registry._ModelInfo.from_model_cls(self.load_model_cls())
    )
    _find_operations()


def _find_operations() -> None:
    """After vLLM has declared shapes for those that it has."""
    find = torch._ops._OpNamespace.__getattr__

    def found(self: Any, name: str) -> Any:
        try:
            return find(self, name)
        except AttributeError:
            if not self.name.startswith(("_C", "_moe_C")):
                raise
            return _Op()

    torch._ops._OpNamespace.__getattr__ = found  # type: ignore[method-assign]


def _know(family: str) -> None:
    """A class for a family whose own comes with its weights."""
    import transformers
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if family in transformers.CONFIG_MAPPING or family in _CONFIG_REGISTRY:
        return
    base = getattr(transformers, _CLASSES.get(family, "PretrainedConfig"))
    made = type(f"Any{family.title().replace('-', '')}", (base,), {"model_type": family})
    transformers.AutoConfig.register(family, made)


def specs(case: dict[str, Any], *, starts: bool) -> dict[str, Any]:
    """The type of the cache, and the layers of each spec."""
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("config", "config"), ("quantization", "hf_quant_config")):
            if case.get(name):
                Path(folder, f"{text}.json").write_text(json.dumps(case[name]), encoding="utf-8")
        _know(case["config"]["model_type"])
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            language_model_only=True,
            max_model_len=2048,
            kv_cache_dtype=case.get("dtype", "auto"),
            compilation_config={"mode": 0, "custom_ops": ["none"]},
        ).create_engine_config()
        with set_current_vllm_config(config):
            if starts:
                start_groups()
            with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
                initialize_model(config)
            layers = get_layers_from_vllm_config(config, AttentionLayerBase)
            found = {name: _described(layer, config) for name, layer in layers.items()}
    groups: dict[str, list[int]] = {}
    num_layers = config.model_config.hf_text_config.num_hidden_layers
    for name, one in found.items():
        if one is not None:
            # Falcon-H1 numbers its states on from its attention.
            layer = next(int(part) for part in name.split(".") if part.isdecimal()) % num_layers
            groups.setdefault(json.dumps(one), []).append(layer)
    said = [{**json.loads(one), "layers": layers} for one, layers in groups.items()]
    return {"dtype": config.cache_config.cache_dtype, "groups": said}


def _described(layer: Any, config: Any) -> dict[str, Any] | None:
    spec = layer.get_kv_cache_spec(config)
    if spec is None or getattr(layer, "kv_sharing_target_layer_name", None):
        return None
    if type(spec).__name__ == "MambaSpec":
        return {"spec": "MambaSpec", "nbytes": spec.page_size_bytes}
    windows = (getattr(spec, key, None) for key in ("sliding_window", "attention_chunk_size"))
    return {
        "spec": type(spec).__name__,
        "heads": spec.num_heads,
        "row_nbytes": spec.state_content_size_bytes,
        "row_tokens": int(spec.tokens_per_state),
        "window": next(filter(None, windows), None),
    }


def main() -> int:
    """Read cases, answer each."""
    cases = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # vLLM writes there
        pretend()
        made, started = {}, False
        for name, case in cases.items():
            try:
                made[name] = specs(case, starts=not started)
            except Exception as error:  # noqa: BLE001 - the test distinguishes them
                made[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
            started = started or "error" not in made[name]
    json.dump(made, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
