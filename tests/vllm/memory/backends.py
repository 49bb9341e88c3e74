"""vLLM's attention backends, imported as far as this machine has their libraries."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

_KERNELS = "vllm._C"
"""vLLM's kernels for CPUs with AVX-512 BF16.  Its platform for CPUs loads another library on
other CPUs; its backend for ROCm loads this one anywhere, and there that ends the process."""


@contextmanager
def without_foreign_kernels() -> Iterator[None]:
    """Importing kernels that this CPU cannot run raises ImportError, as if there were none."""
    if torch.cpu._is_avx512_bf16_supported() or _KERNELS in sys.modules:
        yield
        return
    sys.modules[_KERNELS] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[_KERNELS]


def real_backends() -> list[Any]:
    """Every backend class of vLLM that imports on this machine."""
    found = []
    with without_foreign_kernels():
        for each in (*AttentionBackendEnum, *MambaAttentionBackendEnum):
            try:
                backend = each.get_class()
                backend.supported_kv_cache_layouts()
            except Exception:  # noqa: BLE001 - of libraries for other hardware, in every shape
                continue
            found.append(backend)
    return found
