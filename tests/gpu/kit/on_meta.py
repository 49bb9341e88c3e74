"""How far step (c) comes without a card: both models as on an H100, on torch's device ``meta``.

    python -m tests.gpu.kit.on_meta

vLLM takes its platform for CUDA, with the answers of an H100 made up.  Configuration, choice of the
runner and of attention, the models' construction and a forward pass run; each operation that is not
torch's own is listed, and a compiled one (``_C``) is an error.  No kernel runs: attention and
mixers are skipped.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.kit.native import HOPPER
from tests.gpu.kit.steps.vllm import MODELS, options_of
from transport import Device

TOKENS = 7
_TORCHS = ("aten", "prim", "prims", "profiler")
_SKIPPED = ("unified_attention_with_output", "mamba_mixer2")
"""They write into what they are given, and have no kernel for this device."""


class Listing(TorchDispatchMode):
    """Notes the names of operations that are not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs it, unless it is skipped."""
        if func.namespace not in _TORCHS:
            self.names.add(func.name())
        if func.name().partition("::")[2] in _SKIPPED:
            return None
        return func(*args, **(kwargs or {}))


def pretend_h100() -> None:
    """vLLM's platform without NVML, and answers of an H100; before vLLM looks for one."""
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda _cls, device_id=0: DeviceCapability(*HOPPER))
        get_device_name = classmethod(lambda _cls, device_id=0: "H100")
        get_device_total_memory = classmethod(lambda _cls, device_id=0: 80 << 30)
        device_count = classmethod(lambda _cls: 1)
        num_compute_units = classmethod(lambda _cls, device_id=0: 132)

    torch.cuda.get_device_capability = lambda _device=None: HOPPER
    platforms._current_platform = H100()


def start_groups() -> None:
    """The process groups of one rank, which layers ask for."""
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    initialize_model_parallel(1, 1)


def built(config: Any) -> dict[str, Any]:
    """Build a model on ``meta`` and run it; what was chosen, and which operations were called."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.utils import initialize_model

    with torch.device("meta"):
        model = initialize_model(config)
    for module in model.modules():
        if hasattr(module, "cos_sin_cache"):
            module.cos_sin_cache = module.cos_sin_cache.to("meta")
    ids = torch.zeros(TOKENS, dtype=torch.long, device="meta")
    with set_forward_context(None, config, num_tokens=TOKENS), Listing() as listing:
        logits = model.compute_logits(model(ids, ids))
    layers = config.compilation_config.static_forward_context.values()
    chosen = {one.attn_backend.get_name() for one in layers if hasattr(one, "attn_backend")}
    return {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "worker": config.parallel_config.worker_cls,
        "layers": sorted({type(one).__name__ for one in layers}),
        "attention": sorted(chosen),
        "operations": sorted(listing.names),
        "logits": list(logits.shape),
    }


def main() -> int:
    """Exit status 1: an operation of the compiled kernels was called."""
    pretend_h100()
    from vllm.config import set_current_vllm_config

    from tests.gpu.kit.engine_process import arguments_of

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, model in enumerate(MODELS):
            written = str(model.write(Path(folder) / model.name))
            options = options_of(Device("cuda"), model, "kv_producer")
            config = arguments_of(written, options).create_engine_config()
            with set_current_vllm_config(config):
                if not number:
                    start_groups()
                found[model.name] = built(config)
    print(json.dumps(found, indent=1))
    names = [name for one in found.values() for name in one["operations"]]
    return int(any(name.startswith("_") for name in names))


if __name__ == "__main__":
    sys.exit(main())
