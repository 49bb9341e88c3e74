"""What the steps that compare hand-overs share: options of their engines, and their start."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.gpu.kit.engine_process import EngineProcess
from transport import Device


def options_on(device: Device) -> dict[str, Any]:
    """Of an engine without a prefix cache of its own, several of which fit on a card."""
    most = 4096 if device.kind == "cuda" else 256
    return {
        "max_model_len": most,
        "max_num_batched_tokens": most,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": (2 << 30) if device.kind == "cuda" else (128 << 20),
        "gpu_memory_utilization": 0.08,
        "enable_prefix_caching": False,
    }


def started(
    stack: ExitStack, model: Path, folder: Path, options: Mapping[str, dict[str, Any]]
) -> list[EngineProcess]:
    """Start an engine for each name and its options; all at once, and each is ready."""
    made = []
    for name, given in options.items():
        one = EngineProcess(f"{model.name} {name}", model, given, folder / f"{name}.log")
        stack.callback(one.end)
        made.append(one)
    for one in made:
        one.answered()
    return made
