"""Stands in for vLLM's compiled kernels: what vLLM 0.32 touches on an eager path, in torch.

The unpacked vLLM has modules of the compiled ones' names, which call :func:`stand_in` as vLLM
imports them, in each of its processes.  With ``custom_ops: ["none"]``, no compilation, and the IR's
operations set to ``native`` vLLM calls no compiled kernel for the two models of the kit, and Triton
attention writes the KV cache by a Triton kernel.  Some operations are called whatever is
configured: on CUDA, as modules are imported, those that ask which products of quantized numbers the
kernels have; on a CPU, the one by which the worker binds memory to a node.  A layer of gated units
looks up its kernel as it is built, though it then computes by torch; these are here in torch too.
Model runner V2 writes what a step needs into pinned memory of the host, and its kernels read it
there: the view of such memory as the card's is made through ``__cuda_array_interface__``.
"""

from __future__ import annotations

import os
from typing import Any

_kept: list[Any] = []
"""Libraries of operations live as long as their objects."""

HOPPER = (9, 0)
_LACKING = (
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
)
"""Questions that are answered by no."""
GATED = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")


def stand_in() -> None:
    """Define what is missing.  Idempotent."""
    if _kept:
        return
    import torch

    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda _nodes: None, "CompositeExplicitAutograd")
    for name in _LACKING:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda _capability: False, "CompositeExplicitAutograd")
    for name in GATED:
        library.define(f"{name}(Tensor! result, Tensor input) -> ()")
        library.impl(name, _gated(name), "CompositeExplicitAutograd")
    library.define("get_cuda_view_from_cpu_tensor(Tensor(a) host) -> Tensor(a)")
    library.impl("get_cuda_view_from_cpu_tensor", seen_by_card, "CompositeExplicitAutograd")
    _kept.append(library)
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        _fake_card()


class CardArray:
    """Pinned memory of the host, described as a card's array: it has one address for both.

    Source: CUDA Array Interface, version 3.
    """

    def __init__(self, host: Any) -> None:
        self._host = host  # the view keeps this object, and so the memory, alive
        self.__cuda_array_interface__ = {
            "shape": (host.numel() * host.element_size(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def seen_by_card(host: Any) -> Any:
    """A tensor on the card of the same shape, dtype and bytes.

    Raises:
        ValueError: the memory is not pinned, or not in one piece.
    """
    import torch

    if not host.numel():
        return torch.empty(host.shape, dtype=host.dtype, device="cuda")
    if not host.is_pinned() or not host.is_contiguous():
        raise ValueError(
            f"expected pinned memory in one piece, got pinned={host.is_pinned()}, "
            f"contiguous={host.is_contiguous()}"
        )
    seen = torch.as_tensor(CardArray(host), device="cuda")
    return seen.view(host.dtype).view(host.shape)


def _gated(name: str) -> Any:
    """The first half of the last axis through a function, times the second half."""
    import torch.nn.functional as functions

    def act(half: Any) -> Any:
        if name == "silu_and_mul":
            return functions.silu(half)
        return functions.gelu(half, approximate="tanh" if "tanh" in name else "none")

    def gated(result: Any, source: Any) -> None:
        first, second = source.chunk(2, dim=-1)
        result.copy_(act(first) * second)

    return gated


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
