"""Stands in for vLLM's compiled kernels: what vLLM 0.32 touches on an eager path, in torch.

The unpacked vLLM has modules of the compiled ones' names, which call :func:`stand_in` as vLLM
imports them, in each of its processes.  With ``custom_ops: ["none"]``, no compilation, and the IR's
operations set to ``native`` vLLM calls no compiled kernel for the two models of the kit, and Triton
attention writes the KV cache by a Triton kernel.  One operation is called whatever is configured:
``_C::init_cpu_memory_env``, by the worker for CPUs, to bind memory to a node.
"""

from __future__ import annotations

import os
from typing import Any

_kept: list[Any] = []
"""Libraries of operations live as long as their objects."""

HOPPER = (9, 0)


def stand_in() -> None:
    """Define what is missing.  Idempotent."""
    if _kept:
        return
    import torch

    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda _nodes: None, "CompositeExplicitAutograd")
    _kept.append(library)
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        _fake_card()


def _fake_card() -> None:
    """On a CPU: Triton attention as on a card, with Triton's kernels interpreted.

    vLLM's platform for CPUs has attention of its own, which is compiled.  A kernel of Triton
    attention asks for the card's generation to choose how much it does at once.
    """
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def triton(*_: Any, **__: Any) -> str:
        return AttentionBackendEnum.TRITON_ATTN.get_path()

    CpuPlatform.get_attn_backend_cls = classmethod(triton)
    torch.cuda.get_device_capability = lambda _device=None: HOPPER
